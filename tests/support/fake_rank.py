"""A rank whose model is the fake one: everything of a worker but the arithmetic.

Loaded by the name `tests.support.fake_rank:load_fake_rank`. The name of the model, or of its
folder, may ask for a step that takes some time, and for one that ends the process when it computes
a prompt that begins with `POISON`: `fake-5ms-poison`.
"""

import os
import re
import socket
import threading
import time
from pathlib import Path

from configs import Device, ResolvedConfig
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
_DEFAULT_NUM_BLOCKS = 256


class FakeRank:
    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        assert config.parallel.pipeline_parallel_size == 1, "fake ranks hand nothing on"
        self._config = config
        self._answers = place_of_rank(config.parallel, rank).tp_rank == 0
        found = re.fullmatch(r"fake(?:-(\d+)ms)?(-poison)?", Path(config.model.model).name)
        assert found, config.model.model
        self._step_seconds = int(found[1] or 0) / 1e3
        self._dies_of_poison = bool(found[2])
        self._poison_ids: set[str] = set()
        self._aborted = threading.Event()

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        if listener is not None:
            listener.close()
        self._aborted.clear()
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
        if self._dies_of_poison:
            self._look_for_poison(plan)
        _, outputs = self._stage.execute(plan, None)
        if self._step_seconds:
            self._aborted.wait(self._step_seconds)
        if not self._answers:
            return None
        return StepResult(plan.epoch, plan.step_id, outputs, time.perf_counter() - began)

    def _look_for_poison(self, plan: StepPlan) -> None:
        for update in plan.updates:
            if isinstance(update, Open) and unpack_token_ids(update.token_ids)[0] == POISON:
                self._poison_ids.add(update.seq.request_id)
        if any(work.seq.request_id in self._poison_ids for work in plan.work):
            os._exit(1)

    def abort(self) -> None:
        self._aborted.set()

    def leave(self) -> None:
        pass


def load_fake_rank(config: ResolvedConfig, device: Device, rank: int) -> FakeRank:
    return FakeRank(config, rank)
