"""A rank whose model is the fake one: everything of a worker but the arithmetic.

Loaded by the name `tests.support.fake_rank:load_fake_rank`. The name of the model, or of its
folder, may ask for a step that takes some time, and for what happens when it computes a prompt
that begins with `POISON`: with `fake-5ms-poison` its process ends, and with `fake-5ms-overflow` it
answers what no scheduler can hold. With `fake-5ms-stop` its process stops, as with SIGSTOP, when
it joins the group of epoch 1. With a folder `fake-5ms-once` rank 1 can be loaded only once.
"""

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec

from configs import ConfigError, Device, ParallelConfig, ResolvedConfig
from configs.ranks import place_of_rank
from scheduler.messages import (
    JoinGroup,
    Open,
    StepPlan,
    StepResult,
    WorkerHello,
    unpack_token_ids,
)
from tests.support.fake_model import MAX_POSITIONS, VOCABULARY
from tests.support.fake_worker import Stage

POISON = 31
_TOO_MUCH = 1 << 40
_DEFAULT_NUM_BLOCKS = 256


class FakeRank:
    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        assert config.parallel.pipeline_parallel_size == 1, "fake ranks hand nothing on"
        self._config = config
        self._answers = place_of_rank(config.parallel, rank).tp_rank == 0
        name = Path(config.model.model).name
        found = re.fullmatch(r"fake(?:-(\d+)ms)?(-poison|-overflow|-stop|-once)?", name)
        assert found, config.model.model
        self._step_seconds = int(found[1] or 0) / 1e3
        self._effect = found[2]
        if self._effect == "-once" and rank == 1:
            (Path(config.model.model) / "loaded").touch(exist_ok=False)
        self._poison_ids: set[str] = set()
        self._aborted = threading.Event()

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        if listener is not None:
            listener.close()
        self._aborted.clear()
        if self._effect == "-stop" and message.epoch == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        num_blocks = self._config.cache.num_blocks or _DEFAULT_NUM_BLOCKS
        self._stage = Stage(0, 1, num_blocks, self._config.cache.block_size)
        return WorkerHello(
            epoch=message.epoch,
            rank=message.rank,
            num_blocks=num_blocks,
            block_bytes=1,
            model_digest="fake",
            vocab_size=VOCABULARY,
            max_model_len=self._config.model.max_model_len or MAX_POSITIONS,
        )

    def execute(self, plan: StepPlan) -> StepResult | None:
        began = time.perf_counter()
        is_poisoned = self._effect is not None and self._looks_poisoned(plan)
        if is_poisoned and self._effect == "-poison":
            os._exit(1)
        _, outputs = self._stage.execute(plan, None)
        if is_poisoned:
            outputs = tuple(
                msgspec.structs.replace(output, token_ids=(_TOO_MUCH,))
                if output.seq.request_id in self._poison_ids
                else output
                for output in outputs
            )
        if self._step_seconds:
            self._aborted.wait(self._step_seconds)
        if not self._answers:
            return None
        return StepResult(plan.epoch, plan.step_id, outputs, time.perf_counter() - began)

    def _looks_poisoned(self, plan: StepPlan) -> bool:
        """It has work of a request that is."""
        for update in plan.updates:
            if isinstance(update, Open) and unpack_token_ids(update.token_ids)[0] == POISON:
                self._poison_ids.add(update.seq.request_id)
        return any(work.seq.request_id in self._poison_ids for work in plan.work)

    def check_shape(self, parallel: ParallelConfig) -> None:
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError("fake ranks hand nothing on: set pipeline_parallel_size to 1")

    def abort(self) -> None:
        self._aborted.set()

    def leave(self) -> None:
        pass


def load_fake_rank(config: ResolvedConfig, device: Device, rank: int) -> FakeRank:
    return FakeRank(config, rank)
