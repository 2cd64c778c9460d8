"""Ranks with the real model that can be told to go wrong.

Loaded by the name `tests.support.faulty_rank:load_faulty_rank`. A file in the folder of the model,
named by `ask`, is consumed by its rank before the next step with work, which then fails, or hangs;
before it joins a group, when it stops like a process that was sent SIGSTOP; or before it loads the
model, which then never comes to an end (`stall`).
"""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Literal, TypeAlias

from configs import Device, ParallelConfig, ResolvedConfig
from scheduler.messages import JoinGroup, StepPlan, StepResult, WorkerHello
from worker.actor import LoadedRank

Fault: TypeAlias = Literal["raise", "hang", "stop", "stall"]

LOADER = "tests.support.faulty_rank:load_faulty_rank"


def ask(model: Path, rank: int, fault: Fault) -> Path:
    """Let `rank` go wrong when it comes to that; the file is gone then."""
    path = model / f"{fault}-{rank}"
    path.touch()
    return path


class FaultyRank:
    """Implements `worker.actor.LoadedRank` around another one."""

    def __init__(self, rank: LoadedRank, model: Path, number: int) -> None:
        self._rank = rank
        self._model, self._number = model, number

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        if _take(self._model, self._number, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._rank.join(message, listener)

    def execute(self, plan: StepPlan) -> StepResult | None:
        if plan.work:
            if _take(self._model, self._number, "raise"):
                raise RuntimeError("the test wants this model to fail")
            while _take(self._model, self._number, "hang"):
                time.sleep(3600)
        return self._rank.execute(plan)

    def check_shape(self, parallel: ParallelConfig) -> None:
        self._rank.check_shape(parallel)

    def abort(self) -> None:
        self._rank.abort()

    def leave(self) -> None:
        self._rank.leave()


def _take(model: Path, rank: int, fault: Fault) -> bool:
    try:
        (model / f"{fault}-{rank}").unlink()
    except FileNotFoundError:
        return False
    return True


def load_faulty_rank(config: ResolvedConfig, device: Device, rank: int) -> FaultyRank:
    from worker.member import load_rank

    model = Path(config.model.model)
    while _take(model, rank, "stall"):
        time.sleep(3600)
    return FaultyRank(load_rank(config, device, rank), model, rank)
