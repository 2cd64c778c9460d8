"""Made-up token ids share exactly what the trace says they share."""

import numpy as np

from scheduler.messages import unpack_token_ids
from scheduler.simulate import MAX_PREFIX_IDS, TOKENS_PER_PREFIX_ID, TraceRequest
from scheduler.simulate.workload import ID_MASK, prompt_token_ids


def ids(request: TraceRequest, unique_from: int = 1 << 30) -> list[int]:
    return list(unpack_token_ids(prompt_token_ids(request, unique_from)))


def with_prefix(num_tokens: int, *prefix_ids: int) -> list[int]:
    return ids(TraceRequest(0.0, num_tokens, 1, prefix_ids=prefix_ids))


def test_equal_prefix_ids_give_equal_tokens_and_others_share_none() -> None:
    first = with_prefix(1200, 3, 4, 5)
    second = with_prefix(1100, 3, 4, 6)
    assert (len(first), len(second)) == (1200, 1100)
    assert first[:1024] == second[:1024]
    assert len({*first, *second[1024:]}) == 1200 + 76
    assert with_prefix(700, 3, 4) == first[:700]


def test_ids_never_repeat_over_a_large_range() -> None:
    request = TraceRequest(0.0, 500_000, 1)
    tokens = np.frombuffer(prompt_token_ids(request, ID_MASK - 250_000), dtype="<i4")
    assert len(np.unique(tokens)) == 500_000
    assert 0 <= tokens.min() <= tokens.max() <= ID_MASK


def test_the_largest_prefix_id_is_unlike_the_first() -> None:
    last = with_prefix(TOKENS_PER_PREFIX_ID, MAX_PREFIX_IDS - 1)
    assert not {*last} & {*with_prefix(TOKENS_PER_PREFIX_ID, 0)}


def test_prompts_without_prefix_ids_share_nothing() -> None:
    first = ids(TraceRequest(0.0, 100, 1), unique_from=1 << 30)
    second = ids(TraceRequest(0.0, 100, 1), unique_from=(1 << 30) + 100)
    assert len({*first, *second, *with_prefix(100, 0)}) == 300
