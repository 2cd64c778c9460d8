"""A worker whose model says what its prompt says. It needs no torch, and no time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from scheduler.messages import (
    Close,
    Extend,
    Open,
    PromptLogprobs,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_token_ids,
)

_LAST_USER_MESSAGE = re.compile(r".*<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


@dataclass(slots=True)
class _Sequence:
    """The worker's mirror of one open table."""

    opened: Open
    lines: Sequence[int]
    token_ids: list[int]


@dataclass
class Parrot:
    """Says what the prompt says (of a chat: its last user message), then ends.

    With a temperature it begins at a place that the seed decides, so that choices differ. Before
    `min_tokens`, and with `ignore_eos`, it begins again instead of ending. It checks that the
    scheduler feeds it every token in order.
    """

    tokenizer: Tokenizer
    fail_with: str | None = None
    """The error of every sequence that is worked on from now on."""
    _sequences: dict[SeqRef, _Sequence] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        for update in plan.updates:
            match update:
                case Open(seq=seq):
                    token_ids = list(unpack_token_ids(update.token_ids))
                    prompt = token_ids[: update.num_prompt_tokens]
                    self._sequences[seq] = _Sequence(update, self._lines(prompt), token_ids)
                case Extend(seq=seq):
                    self._sequences[seq].token_ids += update.token_ids
                case Close(seq=seq):
                    del self._sequences[seq]
        outputs = [self._output(work, self._sequences[work.seq]) for work in plan.work]
        return StepResult(plan.epoch, plan.step_id, tuple(outputs))

    def _output(self, work: SeqWork, sequence: _Sequence) -> SeqOutput:
        assert work.start + work.num_tokens <= len(sequence.token_ids)
        rated = _rate_prompt(work, sequence)
        if not work.sample:
            return SeqOutput(work.seq, (), prompt_logprobs=rated)
        sampling = sequence.opened.sampling
        num_output = len(sequence.token_ids) - sequence.opened.num_prompt_tokens
        token_id = next_token(sequence.lines, num_output, sampling)
        previous = sequence.token_ids[-1]
        sequence.token_ids.append(token_id)
        if self.fail_with is not None:
            return SeqOutput(work.seq, (), error=self.fail_with)
        row = () if sampling.logprobs is None else (rate(previous, token_id, sampling.logprobs),)
        return SeqOutput(work.seq, (token_id,), row, rated)

    def _lines(self, prompt: Sequence[int]) -> list[int]:
        """What is repeated."""
        message = _LAST_USER_MESSAGE.match(self.tokenizer.decode(prompt, skip_special_tokens=False))
        if message is None:
            return list(prompt)
        token_ids: list[int] = self.tokenizer.encode(message[1], add_special_tokens=False).ids
        return token_ids


def next_token(lines: Sequence[int], num_output: int, sampling: SamplingParams) -> int:
    allowed = sampling.allowed_token_ids
    if allowed:
        return allowed[num_output % len(allowed)]
    may_end = num_output >= sampling.min_tokens and not sampling.ignore_eos
    if num_output and num_output % len(lines) == 0 and may_end and sampling.eos_token_ids:
        return sampling.eos_token_ids[0]
    start = sampling.seed % len(lines) if sampling.temperature else 0
    return lines[(start + num_output) % len(lines)]


def rate(previous: int, token_id: int, num_top: int) -> TokenLogprobs:
    """A rating that depends on both tokens. The token is the likeliest one if its id is odd; an
    even one is not among the likeliest ones."""
    logprob = -(1 + (previous * 31 + token_id * 7) % 50) / 16
    if token_id % 2:
        top = ((token_id, logprob), *((other, logprob - 1 - other) for other in range(50, 100)))
        return TokenLogprobs(logprob, 1, top[:num_top])
    top = tuple((101 + 2 * place, logprob / (num_top + 2 - place)) for place in range(num_top))
    return TokenLogprobs(logprob, num_top + 1, tuple(sorted(top, key=lambda entry: -entry[1])))


def _rate_prompt(work: SeqWork, sequence: _Sequence) -> PromptLogprobs | None:
    num_top = sequence.opened.sampling.prompt_logprobs
    first = work.start + 1
    end = min(first + work.num_tokens, sequence.opened.num_prompt_tokens)
    if num_top is None or first >= end:
        return None
    ids = sequence.token_ids
    rows = tuple(rate(ids[place - 1], ids[place], num_top) for place in range(first, end))
    return PromptLogprobs(first, rows)
