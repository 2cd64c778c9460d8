"""The random number of a sampled token: a function of (seed, position) and of nothing else.

So a token comes out the same alone or in a batch, and after any number of interruptions.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def as_seed(seed: int) -> int:
    """Any Python integer as the 64 bits that `uniforms` takes."""
    return seed & _MASK


def uniforms(
    seed_k: npt.NDArray[np.uint64], position_k: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), with 52 random bits.

    52 and not 53, so that u * total < total holds in float64 for every total > 0.
    """
    with np.errstate(over="ignore"):
        # SplitMix64's sequence from a start that is the mixed seed: position is its counter.
        start_k = _mix(seed_k + _GOLDEN)
        bits_k = _mix(start_k + (position_k.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits_k >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit changes every output bit with odds 1/2."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
