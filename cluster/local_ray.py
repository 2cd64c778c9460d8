"""A Ray cluster of our own on this machine, or a connection to one that runs already.

Ray reads its environment when it is imported, so nothing here imports it at the top.
"""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from cluster.errors import CommandError

_OBJECT_STORE_BYTES = 256 << 20

# For a cluster of ours; whoever sets one of these means it.
_ENVIRONMENT = {
    # Who may connect may run code, so a token is asked for; Ray keeps it in the user's home.
    "RAY_AUTH_MODE": "token",
    # Despite its name: off means that all of Ray listens on the loopback interface only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # CPU workers ask for no GPU, which is no reason to hide the GPUs with a warning.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


AUTO = "auto"
"""Stands for the address of the cluster on this machine."""


@contextlib.contextmanager
def own_cluster() -> Iterator[None]:
    """Ray for this process and its children, on the loopback interface; nothing of it is left.

    When this process dies in whatever way, the kernel ends Ray's processes too.
    """
    _set_environment()
    import ray

    context = ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    session_dir = Path(context.address_info["session_dir"])
    note = _notes_folder() / str(os.getpid())
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(context.address_info["gcs_address"])
    try:
        yield
    finally:
        note.unlink(missing_ok=True)
        ray.shutdown()
        _remove_session(session_dir)


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """A connection to the Ray cluster at `address`. Raises CommandError if there is none."""
    if address in _noted_clusters():
        # It listens on the loopback interface, where Ray would not look for it by itself.
        _set_environment()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(
            f"There is no Ray cluster to join at {address} ({str(error).splitlines()[0]}); start "
            f"one with `ray start --head`, or leave --address out."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _notes_folder() -> Path:
    """Where each running command that has a cluster of its own notes its address."""
    return platformdirs.user_state_path("palimpsest") / "clusters"


def _noted_clusters() -> list[str]:
    """Addresses of the clusters whose commands are alive, the oldest first."""
    folder = _notes_folder()
    notes = (
        sorted(folder.iterdir(), key=lambda note: note.stat().st_mtime) if folder.is_dir() else []
    )
    return [note.read_text() for note in notes if _is_alive(int(note.name))]


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
