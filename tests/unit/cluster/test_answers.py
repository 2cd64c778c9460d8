"""Usage of requests with several prompts and choices, and of interrupted ones."""

import json

from cluster.answers import AnswerWriter, Shown
from cluster.choice import Finish, Piece
from cluster.openai_api import Endpoint
from cluster.prompt import Prompt
from cluster.token_words import TokenWords
from cluster.usage import PromptTokensDetails, UsageCount
from scheduler.messages import InterruptionCause, Interruptions, Usage
from tests.support.tokenizers import byte_level


def last_piece(index: int, num_output: int, usage: Usage) -> Piece:
    return Piece(index, "", num_output, finish=Finish.STOP, usage=usage)


def writer(endpoint: Endpoint, count: UsageCount) -> AnswerWriter:
    prompts, words = [Prompt([1, 2])] * 2, TokenWords(byte_level())
    return AnswerWriter(endpoint, "id", "m", 0, count, shown=Shown(), prompts=prompts, words=words)


def test_prompts_count_once_and_outputs_each() -> None:
    count = UsageCount([10, 10, 20, 20], num_choices_per_prompt=2)
    for index, cached in enumerate([0, 8, 16, 16]):
        count.add(last_piece(index, index + 1, Usage(10, 99, cached)))
    total = count.total()
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (30, 10, 40)
    # The second choice found what the first one had computed, which is no hit of the request.
    assert total.prompt_tokens_details == PromptTokensDetails(cached_tokens=16)


def test_usage_so_far_only_grows() -> None:
    count = UsageCount([10, 10], num_choices_per_prompt=2)
    seen = []
    for index, num_output in [(0, 1), (1, 1), (1, 2), (0, 2)]:
        count.add(Piece(index, "x", num_output))
        seen.append(count.so_far().completion_tokens)
    assert seen == [1, 2, 3, 4]


def test_interruptions_are_told_of_and_summed() -> None:
    count = UsageCount([10, 10], num_choices_per_prompt=2)
    first = Interruptions({InterruptionCause.BLOCKS: 2}, 30, 5, 0.25)
    second = Interruptions({InterruptionCause.BLOCKS: 1, InterruptionCause.WORKER_LOST: 1}, 7, 9, 1)
    count.add(last_piece(0, 1, Usage(10, 1, 0, first)))
    count.add(last_piece(1, 1, Usage(10, 1, 0, second)))
    pieces = [last_piece(index, 1, Usage(10, 1, 0)) for index in range(2)]
    body = writer("chat", count).whole(pieces)
    assert json.loads(body)["usage"]["preemption"] == {
        "count": 4,
        "causes": {"blocks": 3, "worker_lost": 1},
        "recovered_tokens": 37,
        "recomputed_tokens": 14,
        "stalled_ms": 1250.0,
    }


def test_a_request_that_was_never_interrupted_says_nothing_of_it() -> None:
    count = UsageCount([10], num_choices_per_prompt=1)
    piece = last_piece(0, 1, Usage(10, 1, 0))
    count.add(piece)
    body = writer("completions", count).whole([piece])
    assert "preemption" not in json.loads(body)["usage"]
