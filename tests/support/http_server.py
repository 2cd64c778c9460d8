"""The whole HTTP side on a real socket, over an engine in the same process."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from cluster.chat_template import ChatTemplate
from cluster.frontend import Frontend
from cluster.http_app import build_http_app
from cluster.http_settings import HttpSettings
from cluster.operations import Operations
from cluster.sampling import SamplingDefaults, SeedSource
from cluster.text import TextCodec
from configs import Config
from tests.support.engine import LocalEngine, local_engine
from tests.support.local_link import StepWorker
from tests.support.parrot import Parrot
from tests.support.tokenizers import CHAT_TEMPLATE, IM_END_ID, byte_level

T = TypeVar("T")

MODEL = "parrot"
START_SECONDS = 20.0
KEEP_ALIVE_SECONDS = 90
"""As Ray Serve has it. uvicorn's own 5 are also httpx's, so that a client may send its next request
on a connection that the server closes at that moment."""


@dataclass(slots=True)
class HttpServer:
    """A running server. Its parts live on an event loop of their own; `run` works there."""

    url: str
    app: ASGIApp
    engine: LocalEngine
    codec: TextCodec
    tokenizer: Tokenizer
    _loop: asyncio.AbstractEventLoop

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(START_SECONDS)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def wait_idle(self, timeout_seconds: float = 10.0) -> None:
        """Returns when no request is alive anywhere; raises AssertionError if one stays."""
        deadline_seconds = time.monotonic() + timeout_seconds
        while (left := self.run(self._left)) and time.monotonic() < deadline_seconds:
            time.sleep(0.01)
        assert not left, f"still there after {timeout_seconds} s: {left}"

    async def _left(self) -> dict[str, int]:
        status = await self.engine.actor.status()
        assert status.counters is not None
        counts = {
            "held blocks": status.counters.held_blocks,
            "running": status.info.running_requests,
            "waiting": status.info.waiting_requests,
            "streams": self.engine.client.num_streams,
        }
        return {what: count for what, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says, and with which words."""

    worker: StepWorker
    tokenizer: Tokenizer
    make_codec: Callable[[Executor], TextCodec]
    vocab_size: int
    defaults: SamplingDefaults


def parrot(
    tokenizer: Tokenizer | None = None, defaults: SamplingDefaults | None = None
) -> ServedModel:
    """The model that repeats its prompt."""
    tokenizer = tokenizer or byte_level()
    return ServedModel(
        worker=Parrot(tokenizer),
        tokenizer=tokenizer,
        make_codec=lambda executor: TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE, {}), executor),
        vocab_size=tokenizer.get_vocab_size(),
        defaults=defaults or SamplingDefaults(eos_token_ids=(IM_END_ID,)),
    )


@contextmanager
def http_server(
    config: Config | None = None,
    model: ServedModel | None = None,
    *,
    settings: HttpSettings | None = None,
    operations: Operations | None = None,
    model_names: tuple[str, ...] = (MODEL,),
    max_queue_seconds: float = 60.0,
    **engine_options: Any,
) -> Iterator[HttpServer]:
    """A server in a thread, of a parrot by default. `engine_options` go to `local_engine`."""
    served = model or parrot()
    started: asyncio.Queue[HttpServer] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        with ThreadPoolExecutor(2) as executor:
            async with local_engine(
                served.worker, config, vocab_size=served.vocab_size, **engine_options
            ) as engine:
                frontend = Frontend(
                    engine=engine.client,
                    codec=served.make_codec(executor),
                    defaults=served.defaults,
                    seeds=SeedSource(0),
                    model_names=model_names,
                    max_queue_seconds=max_queue_seconds,
                )
                app = build_http_app(frontend, settings or HttpSettings(), operations)
                server = uvicorn.Server(
                    uvicorn.Config(
                        app,
                        host="127.0.0.1",
                        port=0,
                        log_config=None,
                        lifespan="off",
                        timeout_keep_alive=KEEP_ALIVE_SECONDS,
                    )
                )
                serving = asyncio.create_task(server.serve())
                while not server.started:
                    await asyncio.sleep(0.005)
                port = server.servers[0].sockets[0].getsockname()[1]
                url = f"http://127.0.0.1:{port}"
                started.put_nowait(
                    HttpServer(url, app, engine, frontend.codec, served.tokenizer, loop)
                )
                await stopping.wait()
                server.should_exit = True
                await serving

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(started.get(), loop).result(START_SECONDS)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
