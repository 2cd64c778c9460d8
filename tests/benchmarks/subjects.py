"""Who is measured: our executor, with attention and without, and transformers' `generate`."""

import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scheduler.messages import (
    Close,
    CloseReason,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    pack_token_ids,
)
from tests.support.models import quiet_transformers
from worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, LayerCache
from worker.comm import Group
from worker.executor import Executor, Shard
from worker.kv_cache import KVCache
from worker.models.base import Decoder

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)


class Subject(Protocol):
    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each step, from `context` tokens on."""
        ...

    def prefill(self, length: int, chunk: int) -> float:
        """Seconds from the prompt to the first token."""
        ...


class NoAttention:
    """What is left of a step without attention."""

    name = "none"

    def attend(
        self,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> Tensor:
        return torch.zeros_like(q_tHD, memory_format=torch.contiguous_format)


class Ours:
    """An executor driven by hand-made plans: what the scheduler would send, without it."""

    def __init__(self, decoder: Decoder, cache: KVCache, attention: AttentionBackend) -> None:
        shard = Shard(decoder, cache, attention, torch.device("cpu"))
        self._executor = Executor(shard, Group(), epoch=0)
        self._step_id = 0
        self._openings = 0

    def run(self, updates: tuple[Any, ...], work: tuple[SeqWork, ...]) -> float:
        plan = StepPlan(0, self._step_id, updates, work)
        self._step_id += 1
        began = time.perf_counter()
        self._executor.execute(plan)
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        self._openings += 1
        seqs = [SeqRef(f"{self._openings}/{i}", 1) for i in range(batch)]
        blocks = -(-(context + steps + 1) // BLOCK_SIZE)
        for i, seq in enumerate(seqs):
            ids = tuple(range(1 + i * blocks, 1 + (i + 1) * blocks))
            # What the cache holds does not matter for speed: declared as computed but for one.
            prompt = pack_token_ids(3 + (i * 31 + p * 17) % 500 for p in range(context))
            opening = Open(seq, prompt, context, ids, context - 1, GREEDY)
            self.run((opening,), (SeqWork(seq, context - 1, 1, True),))
        seconds = [
            self.run((), tuple(SeqWork(seq, context + step, 1, True) for seq in seqs))
            for step in range(steps)
        ]
        self.run(tuple(Close(seq, CloseReason.FINISHED) for seq in seqs), ())
        return seconds

    def prefill(self, length: int, chunk: int) -> float:
        self._openings += 1
        seq = SeqRef(f"prefill{self._openings}", 1)
        prompt = pack_token_ids(3 + p % 500 for p in range(length))
        opening = Open(seq, prompt, length, tuple(range(1, length // BLOCK_SIZE + 2)), 0, GREEDY)
        seconds = 0.0
        updates: tuple[Any, ...] = (opening,)
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            piece = SeqWork(seq, start, count, start + count == length)
            seconds += self.run(updates, (piece,))
            updates = ()
        self.run((Close(seq, CloseReason.FINISHED),), ())
        return seconds


class _Clock:
    """A streamer of `generate`: told the prompt first, then each step's tokens as they come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Theirs:
    """transformers' `generate`, greedy, with its own dynamic cache; the whole prompt at once."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        with quiet_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Prefills the context once for all steps."""
        ids = (3 + torch.arange(context) % 500).expand(batch, -1)
        return self._generate(ids, steps + 1)[1:]

    def prefill(self, length: int, chunk: int) -> float:
        return self._generate(3 + torch.arange(length)[None] % 500, 1)[0]

    def _generate(self, ids: Tensor, count: int) -> list[float]:
        """Seconds of each step, the first one with the prompt."""
        clock = _Clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
