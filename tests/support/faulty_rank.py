"""Ranks with the real model that can be told to go wrong, or slowly.

Loaded by the name `LOADER`. A file in the folder of the model, named by `ask`, is consumed by its
rank before the next step with work, which then fails, or hangs; or before it joins a group, when it
stops like a process that was sent SIGSTOP; or before it loads the model (`stall`), which then never
comes to an end. While `slowed` lasts each step takes longer. A request with the seed `FAILING_SEED`
alone fails with its second token, as if the model gave it no logits.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from configs import Device, ParallelConfig, ResolvedConfig
from scheduler.messages import (
    Close,
    JoinGroup,
    Open,
    SeqOutput,
    SeqRef,
    StepPlan,
    StepResult,
    WorkerHello,
)
from worker.actor import LoadedRank

Fault: TypeAlias = Literal["raise", "hang", "stop", "stall"]

SLOW_STEP_SECONDS = 0.05
_SLOW_FILE = "slow"

LOADER = "tests.support.faulty_rank:load_faulty_rank"
FAILING_SEED = 500


def ask(model: Path, rank: int, fault: Fault) -> Path:
    """Let `rank` go wrong when it comes to that; the file is gone then."""
    path = model / f"{fault}-{rank}"
    path.touch()
    return path


@contextlib.contextmanager
def slowed(model: Path) -> Iterator[None]:
    """Let each step of all ranks take `SLOW_STEP_SECONDS` longer."""
    path = model / _SLOW_FILE
    path.touch()
    try:
        yield
    finally:
        path.unlink()


class FaultyRank:
    """Implements `worker.actor.LoadedRank` around another one."""

    def __init__(self, rank: LoadedRank, model: Path, number: int) -> None:
        self._rank = rank
        self._faults = {fault: model / f"{fault}-{number}" for fault in get_args(Fault)}
        self._slow = model / _SLOW_FILE
        self._num_tokens: dict[SeqRef, int] = {}
        """What each of the sequences that are to fail has yielded so far."""

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        self._num_tokens.clear()
        if _take(self._faults["stop"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._rank.join(message, listener)

    def execute(self, plan: StepPlan) -> StepResult | None:
        if plan.work:
            if _take(self._faults["raise"]):
                raise RuntimeError("the test wants this model to fail")
            while _take(self._faults["hang"]):
                time.sleep(3600)
            if self._slow.exists():
                time.sleep(SLOW_STEP_SECONDS)
        for update in plan.updates:
            if isinstance(update, Open) and update.sampling.seed == FAILING_SEED:
                self._num_tokens[update.seq] = 0
            elif isinstance(update, Close):
                self._num_tokens.pop(update.seq, None)
        result = self._rank.execute(plan)
        if result is None or not self._num_tokens:
            return result
        outputs = tuple(self._failed(output) for output in result.outputs)
        return msgspec.structs.replace(result, outputs=outputs)

    def check_shape(self, parallel: ParallelConfig) -> None:
        self._rank.check_shape(parallel)

    def abort(self) -> None:
        self._rank.abort()

    def leave(self) -> None:
        self._rank.leave()

    def _failed(self, output: SeqOutput) -> SeqOutput:
        """What a sequence yields instead, if it is to fail now."""
        if output.seq not in self._num_tokens:
            return output
        self._num_tokens[output.seq] += len(output.token_ids)
        if self._num_tokens[output.seq] <= 1:
            return output
        return msgspec.structs.replace(output, token_ids=(), error="it was to fail")


def load_faulty_rank(config: ResolvedConfig, device: Device, rank: int) -> FaultyRank:
    from worker.member import load_rank

    model = Path(config.model.model)
    while _take(model / f"stall-{rank}"):
        time.sleep(3600)
    return FaultyRank(load_rank(config, device, rank), model, rank)


def _take(fault: Path) -> bool:
    try:
        fault.unlink()
    except FileNotFoundError:
        return False
    return True
