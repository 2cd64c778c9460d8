"""A model that says what time it is: each token is the moment in which its step ended.

So a client can tell how long a token took from there to its socket. Loaded by the name
`tests.support.clock_rank:load_clock_rank`; `model.model` is a folder that `write_clock_model` made,
whose name ends with the milliseconds of one step: `…/clock-50`.
"""

import json
import socket
import time
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from configs import ConfigError, Device, ParallelConfig, ResolvedConfig
from configs.ranks import world_size
from scheduler.messages import JoinGroup, SeqOutput, StepPlan, StepResult, WorkerHello

PERIOD_MS = 10_000
END_ID = PERIOD_MS
_MAX_POSITIONS = 8192


def write_clock_model(folder: Path, step_ms: int) -> Path:
    """A model directory as far as the HTTP side needs one."""
    directory = folder / f"clock-{step_ms}"
    directory.mkdir()
    words = {str(number): number for number in range(PERIOD_MS)} | {"</s>": END_ID}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    return directory


def clock_ms() -> int:
    """The same for all processes of a machine."""
    return int(time.monotonic() * 1000) % PERIOD_MS


def age_ms(word: str) -> int:
    """How long ago the model said `word`; more than a few seconds cannot be told."""
    return (clock_ms() - int(word)) % PERIOD_MS


class ClockRank:
    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        assert rank == 0, "the clock has one rank"
        self._step_seconds = int(config.model.model.rpartition("-")[2]) / 1000
        self._num_blocks = config.cache.num_blocks or 65_536
        self._next_seconds = 0.0

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        return WorkerHello(
            epoch=message.epoch,
            rank=message.rank,
            num_blocks=self._num_blocks,
            block_bytes=1,
            model_digest="clock",
            vocab_size=PERIOD_MS + 1,
            max_model_len=_MAX_POSITIONS,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.work:
            time.sleep(max(0.0, self._next_seconds - time.monotonic()))
            self._next_seconds = time.monotonic() + self._step_seconds
        now = clock_ms()
        outputs = tuple(SeqOutput(work.seq, (now,)) for work in plan.work if work.sample)
        return StepResult(plan.epoch, plan.step_id, outputs, self._step_seconds)

    def check_shape(self, parallel: ParallelConfig) -> None:
        if world_size(parallel) > 1:
            raise ConfigError("the clock has one rank")

    def abort(self) -> None:
        pass

    def leave(self) -> None:
        pass


def load_clock_rank(config: ResolvedConfig, device: Device, rank: int) -> ClockRank:
    return ClockRank(config, rank)
