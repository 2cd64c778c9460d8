"""Identity of a block, and the map that finds it: SEMANTICS 2 and 3."""

import subprocess
import sys

import pytest

from scheduler.messages import pack_token_ids
from scheduler.prefix_cache import BlockHasher, HashAlgorithm, PrefixMap

ALGORITHMS: tuple[HashAlgorithm, ...] = ("xxh3_128", "sha256")


def hashes_of(token_ids: list[int], *, block_size: int = 4, salt: str = "") -> list[bytes]:
    hasher = BlockHasher(block_size)
    return hasher.chain(hasher.root(salt), pack_token_ids(token_ids))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_tokens_give_the_same_hash(algorithm: HashAlgorithm) -> None:
    tokens = pack_token_ids(range(16))
    a, b = BlockHasher(4, algorithm), BlockHasher(4, algorithm)
    assert a.chain(a.root(), tokens) == b.chain(b.root(), tokens)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_tokens_give_the_same_hash_in_another_process(algorithm: HashAlgorithm) -> None:
    """Python salts its own hashes per process; ours must not depend on them."""
    code = (
        "from scheduler.prefix_cache import BlockHasher\n"
        "from scheduler.messages import pack_token_ids\n"
        f"hasher = BlockHasher(4, {algorithm!r}, 7)\n"
        "print(hasher.chain(hasher.root('s'), pack_token_ids(range(8)))[-1].hex())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    hasher = BlockHasher(4, algorithm, 7)
    assert there == hasher.chain(hasher.root("s"), pack_token_ids(range(8)))[-1].hex()


def test_algorithms_have_their_own_widths() -> None:
    assert [len(BlockHasher(4, algorithm).root()) for algorithm in ALGORITHMS] == [16, 32]


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_hash_depends_on_everything_before_the_block() -> None:
    a, b = hashes_of([1, 2, 3, 4, 9, 9, 9, 9]), hashes_of([1, 2, 3, 5, 9, 9, 9, 9])
    assert a[0] != b[0]
    assert a[1] != b[1]


def test_blocks_of_equal_content_differ_by_position() -> None:
    first, second = hashes_of([9] * 8)
    assert first != second


def test_token_ids_are_of_fixed_width() -> None:
    """Else 1, 23 and 12, 3 could be one."""
    assert hashes_of([1, 23], block_size=2) != hashes_of([12, 3], block_size=2)
    assert hashes_of([0, 1], block_size=2) != hashes_of([256, 0], block_size=2)


def test_chaining_in_pieces_gives_the_same_as_at_once() -> None:
    hasher = BlockHasher(4)
    tokens = list(range(12))
    whole = hasher.chain(hasher.root(), pack_token_ids(tokens))
    head = hasher.chain(hasher.root(), pack_token_ids(tokens[:4]))
    tail = hasher.chain(head[-1], pack_token_ids(tokens[4:]))
    assert head + tail == whole


def test_salt_enters_every_block() -> None:
    plain, salted = hashes_of(list(range(8))), hashes_of(list(range(8)), salt="tenant")
    assert not set(plain) & set(salted)


def test_salt_equal_to_an_adapters_name_is_something_else() -> None:
    hasher = BlockHasher(4)
    assert hasher.root(salt="x") != hasher.root(adapter="x")


def test_parts_of_a_root_cannot_run_into_each_other() -> None:
    hasher = BlockHasher(4)
    roots = {
        hasher.root(salt="ab", adapter=""),
        hasher.root(salt="a", adapter="b"),
        hasher.root(salt="", adapter="ab"),
        hasher.root(salt="a\x01", adapter=""),
        hasher.root(salt="a", adapter="\x01"),
    }
    assert len(roots) == 5


def test_any_text_can_be_a_salt() -> None:
    """JSON can hold half a surrogate pair, and a salt comes from a client."""
    hasher = BlockHasher(4)
    assert hasher.root(salt="\ud800") != hasher.root(salt="\ud801")


def test_deployments_with_different_seeds_share_nothing() -> None:
    assert BlockHasher(4, seed=1).root() != BlockHasher(4, seed=2).root()


def test_largest_seed_is_usable() -> None:
    assert BlockHasher(4, seed=2**64 - 1).root()


# -- the map ----------------------------------------------------------------------------


def mapped(*blocks: tuple[bytes, int]) -> PrefixMap:
    prefix_map = PrefixMap()
    for block_hash, block in blocks:
        prefix_map.insert(block_hash, block)
    return prefix_map


def test_lookup_stops_at_the_first_miss() -> None:
    prefix_map = mapped((b"a", 7), (b"b", 3), (b"d", 12))
    assert prefix_map.longest_hit([b"a", b"b", b"c", b"d"]) == [7, 3]


def test_lookup_in_an_empty_map_finds_nothing() -> None:
    assert PrefixMap().longest_hit([b"a"]) == []


def test_first_inserted_of_three_is_found_until_it_goes() -> None:
    prefix_map = mapped((b"a", 5), (b"a", 3), (b"a", 9))
    found = []
    for block in (5, 3, 9):
        found.append(prefix_map.get(b"a"))
        prefix_map.remove(b"a", block)
    assert found == [5, 3, 9]
    assert prefix_map.get(b"a") is None


def test_removing_a_later_block_does_not_hide_the_first() -> None:
    prefix_map = mapped((b"a", 5), (b"a", 3))
    prefix_map.remove(b"a", 3)
    assert prefix_map.get(b"a") == 5


def test_removing_the_last_block_removes_the_hash() -> None:
    prefix_map = mapped((b"a", 5), (b"a", 3))
    prefix_map.remove(b"a", 5)
    prefix_map.remove(b"a", 3)
    assert len(prefix_map) == 0


@pytest.mark.parametrize("blocks", [[5], [5, 3]])
def test_removing_what_is_not_there_is_an_error(blocks: list[int]) -> None:
    prefix_map = mapped(*((b"a", block) for block in blocks))
    with pytest.raises(KeyError):
        prefix_map.remove(b"a", 4)
    with pytest.raises(KeyError):
        prefix_map.remove(b"b", 5)


def test_clear_forgets_everything() -> None:
    prefix_map = mapped((b"a", 5), (b"b", 3))
    prefix_map.clear()
    assert len(prefix_map) == 0
    assert list(prefix_map.items()) == []


def test_items_tell_every_block_of_every_hash() -> None:
    prefix_map = mapped((b"a", 5), (b"b", 3), (b"a", 4))
    assert dict(prefix_map.items()) == {b"a": (5, 4), b"b": (3,)}
