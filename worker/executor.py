"""One rank of a worker group: a plan in, its part of the result out.

A step:   updates -> mirror     what is open, which tokens and blocks
          work    -> flat batch
          hidden  =  embed (first stage) or what the stage before sent
          layers  =  this stage's, attention over the paged cache
          last stage: logits of the sampled tokens -> rank 0 samples, the others are told
          other stages: hidden is sent on, and the next plan can begin

Steps in flight need nothing special here: with one stage the token sampled in step s is in the
mirror before step s + 1 begins; with several, the scheduler sends it with a later plan.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.errors import ProtocolError
from scheduler.messages import PromptLogprobs, SeqOutput, StepPlan, StepResult
from worker.attention.base import AttentionBackend
from worker.attention.paged import PagedAttend
from worker.batch import FlatBatch, flat_batch
from worker.comm import Group
from worker.kv_cache import KVCache
from worker.logprobs import prompt_logprobs
from worker.models.base import Decoder
from worker.sampler import Sampled, Sampler
from worker.sampling_table import SamplingTable
from worker.sequence_table import SequenceTable, Work


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank computes with: its weights, its part of the cache, its attention."""

    decoder: Decoder
    cache: KVCache
    attention: AttentionBackend
    device: torch.device


class Executor:
    """Executes the plans of one epoch, in order. Not thread-safe."""

    def __init__(
        self, shard: Shard, group: Group, *, epoch: int, num_blocks: int | None = None
    ) -> None:
        """`num_blocks`: the pool of the group, where another rank's cache holds fewer blocks
        than this one's."""
        self._shard = shard
        self._group = group
        self._epoch = epoch
        self._next_step_id = 0
        spec, size = shard.decoder.spec, shard.cache.size
        self._block_size = size.block_size
        self._table = SequenceTable(
            num_blocks=num_blocks or size.num_blocks,
            block_size=size.block_size,
            vocab_size=spec.vocab_size,
        )
        self._sampling = SamplingTable(vocab_size=spec.vocab_size, device=shard.device)
        self._sampler = Sampler(self._sampling, self._table)

    @property
    def num_open(self) -> int:
        """Sequences that are open now."""
        return len(self._table)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one plan to its end.

        Returns the result on tensor-parallel rank 0 of the last stage, None on other ranks,
        and None for a plan of an older epoch, which is dropped. Raises ProtocolError for a
        newer epoch or a gap in step ids, MirrorDriftError for a plan that contradicts the mirror,
        GroupBrokenError when another rank is gone; after any of these only a new epoch helps.
        """
        if plan.epoch < self._epoch:
            return None
        self._check_order(plan)
        began = time.perf_counter()
        for row, opened in self._table.apply(plan.updates):
            self._sampling.open(row, opened.sampling)
        outputs: tuple[SeqOutput, ...] | None = ()
        if plan.work:
            work = self._table.work(plan.work)
            with torch.inference_mode():
                outputs = self._run(work)
        if outputs is None or not self._group.answers:
            return None
        return StepResult(plan.epoch, plan.step_id, outputs, time.perf_counter() - began)

    def _check_order(self, plan: StepPlan) -> None:
        if plan.epoch > self._epoch:
            raise ProtocolError(
                f"a plan of epoch {plan.epoch} reached a worker of epoch {self._epoch}"
            )
        if plan.step_id != self._next_step_id:
            raise ProtocolError(
                f"step {plan.step_id} came where step {self._next_step_id} was due "
                f"in epoch {self._epoch}"
            )
        self._next_step_id += 1

    def _run(self, work: Work) -> tuple[SeqOutput, ...] | None:
        """The forward pass; None on ranks that have no part in the result."""
        shard, group = self._shard, self._group
        decoder = shard.decoder
        batch = flat_batch(work, self._table, block_size=self._block_size, device=shard.device)
        if group.is_first_stage:
            hidden_tE = decoder.embed(batch.token_ids_t)
        else:
            hidden_tE = group.receive(
                (batch.num_tokens, decoder.spec.hidden_size), decoder.spec.dtype, shard.device
            )
        attend = PagedAttend(shard.attention, shard.cache, batch.attention)
        hidden_tE = decoder.layers(hidden_tE, batch.position_ids_t, attend)
        self._table.advance(work)
        if not group.is_last_stage:
            group.send(hidden_tE)
            return None
        rated = prompt_logprobs(batch, hidden_tE, decoder.logits, self._sampling, self._table)
        sampled = self._sample(batch, hidden_tE)
        return _outputs(batch, sampled, rated) if sampled is not None else None

    def _sample(self, batch: FlatBatch, hidden_tE: Tensor) -> Sampled | None:
        """Sample on rank 0 and let every rank append; None on the others."""
        row_k = batch.work.row_s[batch.sampled_k]
        sampled = Sampled(np.zeros(len(row_k), np.int64), [], [])
        if len(row_k):
            at_k = torch.from_numpy(batch.last_token_k).to(self._shard.device)
            logits_kV = self._shard.decoder.logits(hidden_tE[at_k])
            if self._group.answers:
                sampled = self._sampler.sample(logits_kV, row_k)
            if self._group.num_stages == 1:
                # With more stages the ids come back with the plan, to all ranks alike.
                token_id_k = self._group.broadcast_ids(sampled.token_id_k)
                self._table.append(row_k, token_id_k)
        return sampled if self._group.answers else None


def _outputs(
    batch: FlatBatch, sampled: Sampled, rated: dict[int, PromptLogprobs]
) -> tuple[SeqOutput, ...]:
    """One output per piece that made something, in the order of the work."""
    place_of = {int(s): k for k, s in enumerate(batch.sampled_k)}
    token_ids = sampled.token_id_k.tolist()
    outputs = []
    for s in sorted(place_of.keys() | rated.keys()):
        seq, rows = batch.work.seqs[s], rated.get(s)
        k = place_of.get(s)
        if k is None:
            outputs.append(SeqOutput(seq, (), (), rows))
            continue
        error, logprobs = sampled.errors[k], sampled.logprobs[k]
        if error is not None:
            outputs.append(SeqOutput(seq, (), error=error))
            continue
        outputs.append(
            SeqOutput(seq, (token_ids[k],), () if logprobs is None else (logprobs,), rows)
        )
    return tuple(outputs)
