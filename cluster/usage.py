"""The `usage` of an answer: tokens, cached tokens, and what interruptions cost."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from cluster.choice import Piece
from scheduler.messages import InterruptionCause, Usage


class PromptTokensDetails(Struct):
    cached_tokens: int


class PreemptionUsage(Struct):
    """What interruptions did to a request, summed over its choices."""

    count: int
    causes: dict[InterruptionCause, int]
    recovered_tokens: int
    recomputed_tokens: int
    stalled_ms: float


class UsageAnswer(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    preemption: PreemptionUsage | UnsetType = UNSET


class UsageCount:
    """Usage of a request with several prompts and choices. Prompts count once."""

    def __init__(self, num_prompt_tokens: Sequence[int], num_choices_per_prompt: int) -> None:
        """`num_prompt_tokens`: per choice, those of one prompt side by side."""
        self._num_choices_per_prompt = num_choices_per_prompt
        self._prompt_tokens = sum(num_prompt_tokens[::num_choices_per_prompt])
        self._output_tokens = [0] * len(num_prompt_tokens)
        self._usages: dict[int, Usage] = {}

    def add(self, piece: Piece) -> None:
        self._output_tokens[piece.index] = piece.num_output_tokens
        if piece.usage is not None:
            self._usages[piece.index] = piece.usage

    def so_far(self) -> UsageAnswer:
        completion_tokens = sum(self._output_tokens)
        return UsageAnswer(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
        )

    def total(self) -> UsageAnswer:
        """When all choices have ended."""
        answer = self.so_far()
        first_choices = range(0, len(self._output_tokens), self._num_choices_per_prompt)
        answer.prompt_tokens_details = PromptTokensDetails(
            sum(self._usages[i].cached_tokens for i in first_choices if i in self._usages)
        )
        answer.preemption = self._preemption()
        return answer

    def _preemption(self) -> PreemptionUsage | UnsetType:
        interruptions = [u.interruptions for u in self._usages.values() if u.interruptions]
        if not interruptions:
            return UNSET
        causes: dict[InterruptionCause, int] = {}
        for one in interruptions:
            for cause, count in one.causes.items():
                causes[cause] = causes.get(cause, 0) + count
        return PreemptionUsage(
            count=sum(causes.values()),
            causes=causes,
            recovered_tokens=sum(one.recovered_tokens for one in interruptions),
            recomputed_tokens=sum(one.recomputed_tokens for one in interruptions),
            stalled_ms=round(sum(one.stalled_seconds for one in interruptions) * 1000, 3),
        )
