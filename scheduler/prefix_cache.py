"""Identity of a full block, and the map from identities to the blocks that carry them.

    root = H(seed, salt, adapter)
    hash of block i = H(hash of block i-1, or root; the token ids of block i)

so that a hash names the whole sequence up to the end of its block. What must tell two equal
token sequences apart (a tenant's salt, an adapter) enters once, at the root, and the chain
carries it into every block.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import xxhash

from scheduler.messages import TOKEN_BYTES

BlockHash: TypeAlias = bytes
HashAlgorithm: TypeAlias = Literal["xxh3_128", "sha256"]


def _sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_DIGESTS: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    "xxh3_128": xxhash.xxh3_128_digest,
    "sha256": _sha256_digest,
}


class BlockHasher:
    """Computes block hashes. Equal inputs give equal hashes in every process of a deployment.

    `seed` is drawn once per deployment. XXH3 is fast and not collision resistant; where
    tenants do not trust each other use sha256.
    """

    def __init__(
        self, block_size: int, algorithm: HashAlgorithm = "xxh3_128", seed: int = 0
    ) -> None:
        self._digest = _DIGESTS[algorithm]
        self._block_bytes = block_size * TOKEN_BYTES
        self._seed = seed

    def root(self, salt: str = "", adapter: str = "") -> BlockHash:
        """The parent of the first block. Each part is tagged and carries its length, so that
        a salt equal to an adapter's name gives another root."""
        parts = [b"root", self._seed.to_bytes(8, "little")]
        for tag, text in ((b"s", salt), (b"a", adapter)):
            # A text out of JSON can hold half a surrogate pair, which strict UTF-8 has no form for.
            encoded = text.encode(errors="surrogatepass")
            parts += [tag, len(encoded).to_bytes(4, "little"), encoded]
        return self._digest(b"".join(parts))

    def chain(self, parent: BlockHash, token_bytes: bytes) -> list[BlockHash]:
        """The hashes of the full blocks in `token_bytes`, packed token ids that follow `parent`."""
        digest, width = self._digest, self._block_bytes
        hashes = []
        for start in range(0, len(token_bytes) - width + 1, width):
            parent = digest(parent + token_bytes[start : start + width])
            hashes.append(parent)
        return hashes


class PrefixMap:
    """Which blocks carry a hash. Several can: filled blocks are never merged, because tables
    only grow. A lookup gives the one inserted first."""

    def __init__(self) -> None:
        # Almost every hash has one block, so only the others pay for an ordered set.
        self._blocks: dict[BlockHash, int | dict[int, None]] = {}

    def __len__(self) -> int:
        """How many hashes can be found."""
        return len(self._blocks)

    def get(self, block_hash: BlockHash) -> int | None:
        entry = self._blocks.get(block_hash)
        return next(iter(entry)) if isinstance(entry, dict) else entry

    def longest_hit(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the hashes up to, and without, the first that nobody carries."""
        hit = []
        for block_hash in hashes:
            block = self.get(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    def insert(self, block_hash: BlockHash, block: int) -> None:
        entry = self._blocks.get(block_hash)
        if entry is None:
            self._blocks[block_hash] = block
        elif isinstance(entry, dict):
            entry[block] = None
        else:
            self._blocks[block_hash] = {entry: None, block: None}

    def remove(self, block_hash: BlockHash, block: int) -> None:
        """Raises KeyError if `block` is not in the map under `block_hash`."""
        entry = self._blocks[block_hash]
        if isinstance(entry, dict):
            del entry[block]
            if not entry:
                del self._blocks[block_hash]
        elif entry == block:
            del self._blocks[block_hash]
        else:
            raise KeyError(block)

    def clear(self) -> None:
        self._blocks.clear()

    def items(self) -> Iterable[tuple[BlockHash, Sequence[int]]]:
        for block_hash, entry in self._blocks.items():
            yield block_hash, tuple(entry) if isinstance(entry, dict) else (entry,)
