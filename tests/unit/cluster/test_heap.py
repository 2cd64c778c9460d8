"""Free memory is given back to the system, once nobody needs it."""

import asyncio
import ctypes

import psutil
import pytest

from cluster.heap import trim_heap, trim_when_idle

PIECE_BYTES, NUM_PIECES = 2000, 40_000


def test_a_heap_full_of_holes_shrinks() -> None:
    assert hasattr(ctypes.CDLL(None), "malloc_trim"), "this C library is another one"
    pieces = [bytes(PIECE_BYTES) for _ in range(NUM_PIECES)]
    # What stays lies between what goes, up to the end of the heap.
    pieces = pieces[::100]
    before_bytes = psutil.Process().memory_info().rss
    trim_heap()
    given_back_bytes = before_bytes - psutil.Process().memory_info().rss
    assert given_back_bytes > PIECE_BYTES * NUM_PIECES / 2
    assert len(pieces) == NUM_PIECES // 100


@pytest.mark.parametrize(
    ("looks", "num_trims"),
    [("", 0), ("....", 0), ("b", 0), ("b.", 0), ("b..", 1), ("b......", 1), ("b.b.b..b...", 2)],
)
def test_it_happens_once_after_each_crowd(looks: str, num_trims: int) -> None:
    """Each look finds somebody (b), or nobody."""
    seen, trims = iter(looks), []

    def is_busy() -> bool:
        look = next(seen, None)
        if look is None:
            raise asyncio.CancelledError
        return look == "b"

    async def run() -> None:
        await trim_when_idle(is_busy, lambda: trims.append(1), look_seconds=0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert len(trims) == num_trims
