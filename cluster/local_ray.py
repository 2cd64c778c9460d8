"""A Ray cluster of our own on this machine, or a connection to one that runs already.

Ray reads its environment when it is imported, so nothing here imports it at the top.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import psutil

from cluster.errors import CommandError

_OBJECT_STORE_BYTES = 256 << 20
_SHUTDOWN_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
# Ray itself tries for twenty, which are wasted on a cluster with a key that we do not have.
_JOIN_SECONDS = 3
_GRACE_SECONDS = 3.0

# For every cluster.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.listening:middlewares",
}

# For a cluster of ours; whoever sets one of these means it.
_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    # Who may connect may run code, so a token is asked for; Ray keeps it in the user's home.
    "RAY_AUTH_MODE": "token",
    # Despite its name: off means that all of Ray listens on the loopback interface only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # CPU workers ask for no GPU, which is no reason to hide the GPUs with a warning.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # By default Ray's workers yield to whatever else runs, at a niceness of 15. Here they serve.
    "RAY_worker_niceness": "0",
    # glibc gives each of the some 20 threads of a Ray process a heap of its own, which only grows.
    "MALLOC_ARENA_MAX": "2",
}

# The ingress replica listens itself. Through Serve's proxy each token of each stream costs three
# times the CPU, and nobody learns that a client does not read.
_DIRECT_INGRESS = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_SERVE_PORT_QUARANTINE_S": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}

AUTO = "auto"
"""Stands for the address of the cluster on this machine."""


class NoClusterError(CommandError):
    """There is no Ray cluster to join."""


@contextlib.contextmanager
def own_cluster(
    http_port: int = 8000, *, num_replicas: int = 1, shows_logs: bool = False
) -> Iterator[None]:
    """Ray for this process and its children, on the loopback interface; nothing of it is left.

    A single ingress replica will listen on `http_port` itself; several stand behind Serve's proxy.
    `shows_logs`: those of all processes, on stderr. When this process dies in whatever way, the
    kernel ends Ray's processes too.
    """
    remove_remains()
    direct = {
        **_DIRECT_INGRESS,
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http_port + 1),  # exclusive
    }
    _set_environment(direct if num_replicas == 1 else {})
    import ray

    try:
        context = ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=shows_logs,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    except Exception as error:  # Ray has no narrower type for it
        raise CommandError(
            f"Ray does not start on this machine ({str(error).splitlines()[0]}); see whether other "
            f"work keeps it from starting within 30 s, and try again."
        ) from error
    info = context.address_info
    session_dir = Path(info["session_dir"])
    note = _Note.write(info["gcs_address"], session_dir)
    try:
        yield
    finally:
        started = psutil.Process().children(recursive=True)
        with _at_most(_SHUTDOWN_SECONDS, lambda: _remove_session(session_dir)):
            ray.shutdown()
            _wait_gone(started)
        _remove_session(session_dir)
        note.path.unlink(missing_ok=True)


def _wait_gone(processes: list[psutil.Process]) -> None:
    """Until then somebody may still listen on the port. What takes too long is killed."""
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_SECONDS)


@contextlib.contextmanager
def _at_most(seconds: float, last_act: Callable[[], None]) -> Iterator[None]:
    """End this process, after `last_act`, if the body takes longer.

    Ray waits for a minute and longer for processes that somebody has killed before.
    """

    def end_process() -> None:
        last_act()
        os._exit(1)

    timer = threading.Timer(seconds, end_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def joined_cluster(address: str, *, shows_logs: bool = False) -> Iterator[None]:
    """A connection to the Ray cluster at `address`. Raises NoClusterError if there is none."""
    _check_something_listens(address)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(_JOIN_SECONDS))
    if address in _noted_clusters():
        # It listens on the loopback interface, where Ray would not look for it by itself.
        _set_environment({})
    import ray

    try:
        ray.init(address=address, log_to_driver=shows_logs, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_something_listens(address: str) -> None:
    """Raises NoClusterError if nothing does. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "//" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> NoClusterError:
    reason = str(error).splitlines()[0]
    if address == AUTO:
        return NoClusterError(
            f"There is no Ray cluster to join on this machine ({reason}); `palimpsest serve` "
            f"starts one, and --address names another."
        )
    return NoClusterError(
        f"There is no Ray cluster to join at {address} ({reason}); start one with `ray start "
        f"--head`, or leave --address out."
    )


def _set_environment(more: Mapping[str, str]) -> None:
    """Must come before ray is imported for the first time."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Each process would compile torch again, and so would one that takes a dead one's place:
        # 3 s. Out of the way of who wants no bytecode beside the sources.
        folder = platformdirs.user_cache_path("palimpsest") / "bytecode"
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))
    for name, value in {**_ENVIRONMENT, **more}.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class _Note:
    """What a running command writes down about the cluster of its own, for other commands."""

    process_id: int
    address: str
    session_dir: Path

    @classmethod
    def write(cls, address: str, session_dir: Path) -> "_Note":
        """For this process."""
        note = cls(os.getpid(), address, session_dir)
        note.path.parent.mkdir(parents=True, exist_ok=True)
        note.path.write_text(json.dumps({"address": address, "session_dir": str(session_dir)}))
        return note

    @property
    def path(self) -> Path:
        return _notes_folder() / str(self.process_id)


def _notes_folder() -> Path:
    return Path(platformdirs.user_state_path("palimpsest")) / "clusters"


def _notes() -> list[_Note]:
    """Of all commands that have not taken theirs away, the oldest first."""
    notes = []
    for path in sorted(_notes_folder().glob("*"), key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is being written, or removed
            content = json.loads(path.read_text())
            notes.append(_Note(int(path.name), content["address"], Path(content["session_dir"])))
    return notes


def _noted_clusters() -> list[str]:
    """Addresses of the clusters whose commands are alive, the oldest first."""
    return [note.address for note in _notes() if _is_alive(note.process_id)]


def remove_remains() -> int:
    """Delete what commands have left that were killed; how many these were.

    Their processes are gone: the kernel ends Ray's with the command that started it.
    """
    killed = [note for note in _notes() if not _is_alive(note.process_id)]
    for note in killed:
        _remove_session(note.session_dir)
        note.path.unlink(missing_ok=True)
    return len(killed)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def clusters_at(address: str) -> list[str]:
    """The addresses that `address` stands for: with `AUTO` all clusters that commands of this
    user have started on this machine, if there are any."""
    return (_noted_clusters() if address == AUTO else []) or [address]


def start_serve(host: str, port: int, *, is_direct: bool) -> tuple[str, int]:
    """Start Ray Serve unless it runs already; where it listens then.

    `is_direct`: the one replica of a cluster of our own will listen on this port.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if is_direct:
        # Serve starts a proxy all the same, which is left aside.
        serve.start(http_options={"host": host, "port": _free_port(host)})
        return host, port
    serve.start(http_options={"host": host, "port": port})
    found = serve.context._get_global_client().http_config
    return found.host, found.port


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_is_free(host: str, port: int) -> None:
    """Raises CommandError if something listens there, or the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(
                f"Cannot listen on {host}:{port} ({error.strerror}): choose another port with "
                f"--port, or stop what runs there."
            ) from error


def _remove_session(session_dir: Path) -> None:
    """Delete the folder of Ray's logs and sockets, and the link to it."""
    shutil.rmtree(session_dir, ignore_errors=True)
    latest = session_dir.with_name("session_latest")
    with contextlib.suppress(OSError):
        if latest.is_symlink() and not latest.exists():
            latest.unlink()
