"""The whole HTTP side on a real socket, over an engine in the same process."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from cluster.chat_template import ChatTemplate
from cluster.frontend import Frontend
from cluster.http_app import HttpSettings, build_http_app
from cluster.sampling import SamplingDefaults, SeedSource
from cluster.text import TextCodec
from configs import Config
from tests.support.engine import LocalEngine, local_engine
from tests.support.tokenizers import CHAT_TEMPLATE, IM_END_ID, byte_level

T = TypeVar("T")

MODEL = "parrot"
START_SECONDS = 20.0


@dataclass(slots=True)
class HttpServer:
    """A running server. Its parts live on an event loop of their own; `run` works there."""

    url: str
    app: ASGIApp
    engine: LocalEngine
    tokenizer: Tokenizer
    _loop: asyncio.AbstractEventLoop

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(START_SECONDS)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def wait_idle(self, timeout_seconds: float = 2.0) -> None:
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


@contextmanager
def http_server(
    config: Config | None = None,
    *,
    settings: HttpSettings | None = None,
    defaults: SamplingDefaults | None = None,
    tokenizer: Tokenizer | None = None,
    max_queue_seconds: float = 60.0,
    **engine_options: Any,
) -> Iterator[HttpServer]:
    """A server in a thread. `engine_options` go to `local_engine`."""
    tokenizer = tokenizer or byte_level()
    started: asyncio.Queue[HttpServer] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        with ThreadPoolExecutor(2) as executor:
            async with local_engine(tokenizer, config, **engine_options) as engine:
                frontend = Frontend(
                    engine=engine.client,
                    codec=TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE, {}), executor),
                    defaults=defaults or SamplingDefaults(eos_token_ids=(IM_END_ID,)),
                    seeds=SeedSource(0),
                    model_names=(MODEL,),
                    max_queue_seconds=max_queue_seconds,
                )
                app = build_http_app(frontend, settings or HttpSettings())
                server = uvicorn.Server(
                    uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
                )
                serving = asyncio.create_task(server.serve())
                while not server.started:
                    await asyncio.sleep(0.005)
                port = server.servers[0].sockets[0].getsockname()[1]
                started.put_nowait(
                    HttpServer(f"http://127.0.0.1:{port}", app, engine, tokenizer, loop)
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
