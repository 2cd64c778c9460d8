"""The HTTP side as a Ray Serve deployment: stateless replicas, each with its line to the engine."""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ray import serve
from starlette.types import ASGIApp

from cluster.chaos import RayOperations
from cluster.engine_calls import connect
from cluster.engine_spec import EngineSpec
from cluster.errors import EngineLostError
from cluster.frontend import Frontend
from cluster.heap import trim_when_idle
from cluster.http_app import build_http_app
from cluster.http_settings import HttpSettings
from cluster.listening import take_over_ports
from cluster.logs import set_up_logging
from cluster.replica_shutdown import on_shutdown
from cluster.sampling import SamplingDefaults, SeedSource
from cluster.text import TextCodec
from configs import ModelConfig
from scheduler.messages import EngineState

logger = logging.getLogger(__name__)

_TEXT_THREADS = 4


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """What a replica is made from. Travels through Ray, so it holds no key."""

    engine: EngineSpec
    model: ModelConfig
    http: HttpSettings
    max_queue_seconds: float
    max_recovery_seconds: float
    enable_chaos: bool = False
    waits_for_engine: bool = False


class IngressReplica:
    """One replica. It is there at once unless it waits; `/ready` says how the engine is."""

    def __init__(self, spec: IngressSpec) -> None:
        set_up_logging(spec.engine.config.server)
        # Its threads would fight with the workers for the cores; ours are enough.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        take_over_ports()
        self._spec = spec
        self._waits_for_engine = spec.waits_for_engine
        app = serve.get_replica_context().app_name
        self._operations = RayOperations(app) if spec.enable_chaos else None
        self._engine = connect(
            app,
            spec.engine,
            max_recovery_seconds=spec.max_recovery_seconds,
        )
        self._trimming = asyncio.create_task(
            trim_when_idle(lambda: self._engine.num_streams > 0), name="heap-trim"
        )
        self._executor = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")
        self._leaving: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        on_shutdown(lambda: loop.call_soon_threadsafe(self._leave_in_time))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from worker.pull import find_or_pull

        directory = find_or_pull(self._spec.model)
        frontend = Frontend(
            engine=self._engine,
            codec=TextCodec.load(directory, self._executor),
            defaults=SamplingDefaults.read(directory),
            seeds=SeedSource(self._spec.model.seed),
            model_names=self._spec.model.served_model_name or (self._spec.model.model,),
            max_queue_seconds=self._spec.max_queue_seconds,
        )
        return build_http_app(frontend, self._spec.http, self._operations)

    def _leave_in_time(self) -> None:
        """Serve stops this replica: it sends nothing new here, and waits for what runs, which has
        a clear end when its time is over."""
        seconds = self._spec.engine.config.server.drain_seconds
        reason = f"this server process is being stopped, and what ran had {seconds:g} s to end"
        self._leaving = asyncio.get_running_loop().call_later(seconds, self._engine.leave, reason)

    async def check_health(self) -> None:
        """Serve replaces a replica whose engine is given up; the new one asks for a new engine."""
        if self._waits_for_engine:
            # Serve's first look, on which it sets no limit; the engine's start has its own.
            await self._engine.wait_ready()
            self._waits_for_engine = False
        info = self._engine.info()
        if info.state is EngineState.FAILED:
            raise EngineLostError(info.reason)

    async def __del__(self) -> None:
        self._trimming.cancel()
        if self._leaving is not None:
            self._leaving.cancel()
        await self._engine.close()
        self._executor.shutdown(wait=False)


# Serve builds the HTTP application after the constructor, in the process of the replica.
Ingress = serve.deployment(name="Ingress")(serve.ingress()(IngressReplica))
