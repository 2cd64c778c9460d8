"""The fake world: a worker group that stores token ids as its KV cache, and what drives it."""
