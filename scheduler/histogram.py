"""A histogram with fixed bounds, in the shape that Prometheus wants."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = tuple(0.001 * 2**i for i in range(21))
"""1 ms to 17 minutes, each bound twice the last."""
STEP_SECONDS = tuple(0.00005 * 2**i for i in range(21))
"""50 us, which is less than planning takes, to 52 s."""
COUNTS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
TOKENS = tuple(2**i for i in range(21))
"""1 to a million."""


class Histogram:
    __slots__ = ("bounds", "bucket_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the rising, inclusive upper bounds; one more bucket takes what is above."""
        self.bounds = tuple(bounds)
        self.bucket_counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @classmethod
    def of_seconds(cls) -> "Histogram":
        return cls(SECONDS)

    @classmethod
    def of_counts(cls) -> "Histogram":
        return cls(COUNTS)

    @classmethod
    def of_step_seconds(cls) -> "Histogram":
        return cls(STEP_SECONDS)

    @classmethod
    def of_tokens(cls) -> "Histogram":
        return cls(TOKENS)

    @property
    def count(self) -> int:
        return sum(self.bucket_counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.bucket_counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
