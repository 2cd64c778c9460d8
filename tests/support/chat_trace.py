"""A made-up trace of chats, in Mooncake's format: `examples/chat.jsonl` is what it prints.

Every conversation starts with one of three system prompts, and every turn's prompt is the whole
conversation so far, so prompts share what recorded ones share: their beginnings.
"""

import json
import math
import random
from collections.abc import Iterator

TOKENS_PER_HASH_ID = 512
SYSTEM_PROMPT_TOKENS = (512, 1024, 2048)


def chat_trace(
    num_conversations: int, *, conversations_per_second: float, seed: int
) -> Iterator[str]:
    """JSON lines by arrival."""
    random_numbers = random.Random(seed)
    next_hash_id = iter(range(1_000_000))
    systems = [
        [next(next_hash_id) for _ in range(tokens // TOKENS_PER_HASH_ID)]
        for tokens in SYSTEM_PROMPT_TOKENS
    ]
    requests = []
    started = 0.0
    for _ in range(num_conversations):
        started += random_numbers.expovariate(conversations_per_second)
        requests += _conversation(random_numbers, started, systems, next_hash_id)
    requests.sort(key=lambda request: request["timestamp"])
    return (json.dumps(request) for request in requests)


def _conversation(
    random_numbers: random.Random,
    started: float,
    systems: list[list[int]],
    next_hash_id: Iterator[int],
) -> list[dict[str, int | list[int]]]:
    full_ids = list(random_numbers.choices(systems, weights=(5, 3, 2))[0])
    num_tokens = len(full_ids) * TOKENS_PER_HASH_ID
    now = started
    turns: list[dict[str, int | list[int]]] = []
    for _ in range(random_numbers.choices((1, 2, 3, 5, 8), weights=(4, 3, 2, 2, 1))[0]):
        num_tokens += _length(random_numbers, typical=180, most=4000)
        while len(full_ids) < num_tokens // TOKENS_PER_HASH_ID:
            full_ids.append(next(next_hash_id))
        partial_id = [next(next_hash_id)] if num_tokens % TOKENS_PER_HASH_ID else []
        output_tokens = _length(random_numbers, typical=220, most=1500)
        turns.append(
            {
                "timestamp": round(now * 1000),
                "input_length": num_tokens,
                "output_length": output_tokens,
                "hash_ids": full_ids + partial_id,
            }
        )
        num_tokens += output_tokens
        now += output_tokens * 0.03 + random_numbers.expovariate(1 / 20)
    return turns


def _length(random_numbers: random.Random, *, typical: int, most: int) -> int:
    return min(most, max(8, round(random_numbers.lognormvariate(math.log(typical), 0.9))))


def example_trace() -> Iterator[str]:
    return chat_trace(300, conversations_per_second=2.0, seed=7)


if __name__ == "__main__":
    print("\n".join(example_trace()))
