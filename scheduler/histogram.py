"""A histogram with fixed bounds, in the shape that Prometheus wants."""

from bisect import bisect_left
from collections.abc import Sequence

# 1 ms to 17 minutes, each bound twice the last.
_SECONDS = tuple(0.001 * 2**i for i in range(21))
_COUNTS = (0, 1, 2, 3, 5, 8, 13, 21, 34)


class Histogram:
    __slots__ = ("bounds", "bucket_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the rising, inclusive upper bounds; one more bucket takes what is above."""
        self.bounds = tuple(bounds)
        self.bucket_counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @classmethod
    def of_seconds(cls) -> "Histogram":
        return cls(_SECONDS)

    @classmethod
    def of_counts(cls) -> "Histogram":
        return cls(_COUNTS)

    @property
    def count(self) -> int:
        return sum(self.bucket_counts)

    def observe(self, value: float) -> None:
        self.bucket_counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
