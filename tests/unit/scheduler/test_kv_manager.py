"""Block tables over the pool: SEMANTICS 2.4, 2.5, 3 and 4.4."""

from collections.abc import Sequence

import pytest

from scheduler.block_pool import BlockPool, Evictions
from scheduler.kv_manager import KVManager
from scheduler.messages import SamplingParams
from scheduler.prefix_cache import BlockHasher, PrefixMap
from scheduler.request import NEVER, Request
from tests.support.drive import request_of, text, token_row


class Manager(KVManager):
    """A manager with its pool, block size 16."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.prefix_map = PrefixMap()
        self.pool = BlockPool(num_blocks, self.prefix_map, Evictions())
        super().__init__(
            self.pool,
            self.prefix_map,
            BlockHasher(16),
            block_size=16,
            enable_prefix_caching=caching,
        )

    def run(self, request: Request) -> Request:
        """Admit a request and compute all of its tokens."""
        hit = self.find_hit(request)
        assert self.admit(request, hit, request.num_tokens)
        request.num_computed = request.num_tokens
        if request.num_tokens >= request.next_hash_at:
            self.register(request)
        return request

    def cache(self, tokens: Sequence[int]) -> list[int]:
        """Let some request compute `tokens` and go. Returns the blocks they were in."""
        request = self.run(request_with(tokens))
        blocks = request.block_ids
        self.release(request)
        return blocks


def request_with(
    tokens: Sequence[int], *, salt: str = "", prompt_logprobs: int | None = None
) -> Request:
    sampling = SamplingParams(max_tokens=9, seed=0, prompt_logprobs=prompt_logprobs)
    return Request.of(request_of("r", tokens, sampling, salt=salt), submit_index=0)


# -- lookup -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_hit_blocks"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2)]
)
def test_last_token_is_never_taken_from_the_cache(num_tokens: int, num_hit_blocks: int) -> None:
    """So a prompt that is cached whole and fills its last block recomputes that block."""
    manager = Manager(11)
    blocks = manager.cache(text("a", 64))
    hit = manager.find_hit(request_with(text("a", num_tokens)))
    assert hit == blocks[:num_hit_blocks]


def test_lookup_stops_at_the_first_block_that_is_gone() -> None:
    manager = Manager(11)
    blocks = manager.cache(text("a", 64))
    manager.pool.touch([blocks[1]])
    manager.pool.forget(blocks[1])
    assert manager.find_hit(request_with(text("a", 64))) == blocks[:1]


def test_lookup_changes_nothing() -> None:
    manager = Manager(11)
    manager.cache(text("a", 64))
    before = list(manager.pool.free_queue())
    manager.find_hit(request_with(text("a", 64)))
    assert list(manager.pool.free_queue()) == before


def test_salted_request_finds_only_what_has_its_salt() -> None:
    manager = Manager(21)
    blue = manager.run(request_with(text("a", 33), salt="blue"))
    assert manager.find_hit(request_with(text("a", 33), salt="red")) == []
    assert manager.find_hit(request_with(text("a", 33))) == []
    assert manager.find_hit(request_with(text("a", 33), salt="blue")) == blue.block_ids[:2]


def test_generated_tokens_are_found_like_prompt_tokens() -> None:
    manager = Manager(11)
    request = manager.run(request_with(text("a", 30)))
    for token_id in text("b", 3):
        request.append(token_id)
    assert manager.grow(request, 33)
    request.num_computed = 33
    manager.register(request)
    follow_up = request_with([*text("a", 30), *text("b", 3), *text("c", 5)])
    assert manager.find_hit(follow_up) == request.block_ids[:2]


def test_without_caching_nothing_is_found_and_nothing_hashed() -> None:
    manager = Manager(11, caching=False)
    manager.cache(text("a", 64))
    request = request_with(text("a", 64))
    assert manager.find_hit(request) == []
    assert request.block_hashes == []
    assert manager.pool.num_evictable == 0


def test_request_for_prompt_logprobs_reads_no_cache_at_first() -> None:
    manager = Manager(11)
    manager.cache(text("a", 64))
    assert manager.find_hit(request_with(text("a", 64), prompt_logprobs=0)) == []


@pytest.mark.parametrize(("num_rows", "num_hit_blocks"), [(15, 0), (16, 1), (32, 2), (63, 3)])
def test_request_for_prompt_logprobs_reads_up_to_the_first_missing_row(
    num_rows: int, num_hit_blocks: int
) -> None:
    """Row p comes from the logits of token p - 1, which must then be computed again."""
    manager = Manager(11)
    blocks = manager.cache(text("a", 64))
    request = request_with(text("a", 64), prompt_logprobs=0)
    request.prompt_logprobs += [token_row(p, 0) for p in range(1, num_rows + 1)]
    assert manager.find_hit(request) == blocks[:num_hit_blocks]


# -- admission --------------------------------------------------------------------------


def test_admission_takes_blocks_for_what_is_planned_only() -> None:
    manager = Manager(11)
    request = request_with(text("a", 100))
    assert manager.admit(request, [], 40)
    assert request.block_ids == [1, 2, 3]


def test_admission_is_refused_unless_all_known_tokens_would_fit() -> None:
    """Even if only 16 of them are planned now."""
    manager = Manager(7)
    assert not manager.admit(request_with(text("a", 97)), [], 16)
    assert manager.admit(request_with(text("a", 96)), [], 16)


def test_evictable_hits_count_as_demand() -> None:
    manager = Manager(5)
    manager.cache(text("a", 32))
    manager.pool.allocate(1)
    request = request_with([*text("a", 32), *text("b", 17)])
    assert manager.pool.num_free == 3
    assert not manager.admit(request, manager.find_hit(request), 49)


def test_held_hits_cost_nothing() -> None:
    manager = Manager(5)
    manager.run(request_with(text("a", 32)))
    request = request_with([*text("a", 32), *text("b", 17)])
    assert manager.pool.num_free == 2
    assert manager.admit(request, manager.find_hit(request), 49)


def test_refused_admission_changes_nothing() -> None:
    manager = Manager(5)
    manager.cache(text("a", 32))
    manager.pool.allocate(1)
    before = list(manager.pool.free_queue())
    request = request_with([*text("a", 32), *text("b", 17)])
    manager.admit(request, manager.find_hit(request), 49)
    assert list(manager.pool.free_queue()) == before
    assert request.block_ids == []
    assert request.next_hash_at == NEVER


def test_hit_is_never_evicted_by_its_own_request() -> None:
    """The hit stands at the head of the queue, and still is not handed out again."""
    manager = Manager(4)
    manager.cache(text("a", 16))
    manager.cache(text("b", 32))
    assert next(manager.pool.free_queue()) == 1
    request = request_with([*text("a", 16), *text("c", 20)])
    hit = manager.find_hit(request)
    assert manager.admit(request, hit, 36)
    assert request.block_ids[0] == 1
    assert len(set(request.block_ids)) == 3


# -- growth -----------------------------------------------------------------------------


def test_table_grows_by_what_is_missing() -> None:
    manager = Manager(5)
    request = manager.run(request_with(text("a", 16)))
    assert manager.grow(request, 33)
    assert request.block_ids == [1, 2, 3]


def test_growing_beyond_the_pool_changes_nothing() -> None:
    manager = Manager(4)
    request = manager.run(request_with(text("a", 16)))
    assert not manager.grow(request, 49)
    assert request.block_ids == [1]
    assert manager.pool.num_free == 2


# -- hashes -----------------------------------------------------------------------------


def test_block_gets_its_hash_once_all_its_slots_are_planned() -> None:
    manager = Manager(11)
    request = request_with(text("a", 40))
    assert manager.admit(request, [], 31)
    request.num_computed = 31
    manager.register(request)
    assert request.num_registered == 1
    request.num_computed = 32
    manager.register(request)
    assert request.num_registered == 2


def test_block_gets_no_hash_before_its_token_ids_are_known() -> None:
    """Under look-ahead slots are planned for tokens that are still to be sampled."""
    manager = Manager(11)
    request = manager.run(request_with(text("a", 31)))
    assert manager.grow(request, 33)
    request.num_computed = 33
    manager.register(request)
    assert request.num_registered == 1
    request.append(7)
    manager.register(request)
    assert request.num_registered == 2


def test_hashes_are_computed_once_per_block() -> None:
    manager = Manager(11)
    request = manager.run(request_with(text("a", 32)))
    before = request.block_hashes.copy()
    request.token_ids[0] = 999  # would change every hash if anything were hashed again
    for token_id in text("b", 16):
        request.append(token_id)
    assert manager.grow(request, 48)
    request.num_computed = 48
    manager.register(request)
    assert request.block_hashes[:2] == before
    assert len(request.block_hashes) == 3


def test_next_hash_is_due_when_the_next_block_is_full() -> None:
    manager = Manager(11)
    request = manager.run(request_with(text("a", 35)))
    assert request.next_hash_at == 48


def test_taken_back_slots_lose_their_hashes_from_the_block_of_the_first_one_on() -> None:
    manager = Manager(11)
    request = manager.run(request_with(text("a", 64)))
    manager.take_back(request, 40)
    blocks = request.block_ids
    assert [manager.pool.hash_of(block) is None for block in blocks] == [False, False, True, True]
    assert manager.find_hit(request_with(text("a", 64))) == blocks[:2]


def test_taking_back_from_a_block_boundary_keeps_what_is_before_it() -> None:
    manager = Manager(11)
    request = manager.run(request_with(text("a", 64)))
    manager.take_back(request, 32)
    assert request.num_registered == 2


def test_release_frees_the_last_block_first_and_keeps_hashes() -> None:
    manager = Manager(6)
    request = manager.run(request_with(text("a", 40)))
    manager.release(request)
    assert list(manager.pool.free_queue()) == [3, 4, 5, 2, 1]
    assert request.block_ids == []
    assert manager.find_hit(request_with(text("a", 40))) == [1, 2]
