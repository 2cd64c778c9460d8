"""A real rank that cannot go on with certain requests, as if the model gave them no logits.

Loaded by the name `tests.support.failing_rank:load_failing_rank`. What fails is the second token of
each request with the seed `FAILING_SEED`.
"""

import socket

import msgspec

from configs import Device, ParallelConfig, ResolvedConfig
from scheduler.messages import Close, JoinGroup, Open, SeqRef, StepPlan, StepResult, WorkerHello
from worker.actor import LoadedRank
from worker.member import load_rank

FAILING_SEED = 500


class FailingRank:
    def __init__(self, rank: LoadedRank) -> None:
        self._rank = rank
        self._num_tokens: dict[SeqRef, int] = {}
        """What each of the sequences that fail has yielded so far."""

    def join(self, message: JoinGroup, listener: socket.socket | None) -> WorkerHello:
        return self._rank.join(message, listener)

    def execute(self, plan: StepPlan) -> StepResult | None:
        for update in plan.updates:
            if isinstance(update, Open) and update.sampling.seed == FAILING_SEED:
                self._num_tokens[update.seq] = 0
            elif isinstance(update, Close):
                self._num_tokens.pop(update.seq, None)
        result = self._rank.execute(plan)
        if result is None or not self._num_tokens:
            return result
        outputs = []
        for output in result.outputs:
            if output.seq in self._num_tokens:
                self._num_tokens[output.seq] += len(output.token_ids)
                if self._num_tokens[output.seq] > 1:
                    output = msgspec.structs.replace(output, token_ids=(), error="it was to fail")
            outputs.append(output)
        return msgspec.structs.replace(result, outputs=tuple(outputs))

    def check_shape(self, parallel: ParallelConfig) -> None:
        self._rank.check_shape(parallel)

    def abort(self) -> None:
        self._rank.abort()

    def leave(self) -> None:
        self._rank.leave()


def load_failing_rank(config: ResolvedConfig, device: Device, rank: int) -> FailingRank:
    return FailingRank(load_rank(config, device, rank))
