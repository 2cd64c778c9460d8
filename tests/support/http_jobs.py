"""Requests to the OpenAI endpoints, drawn at random from all that a small model can do."""

import random
from typing import Any

from tests.support.asking import CHAT, COMPLETIONS, Job

OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. He liked to play with it",
    "The big dog ran to the park and saw",
    "One day, a boy found a shiny stone.",
    "The cat was very sad because",
    "There was an old man with a big hat.",
)


def jobs(num_jobs: int, seed: int) -> list[Job]:
    """Greedy and seeded requests to both endpoints, with choices, stop texts, penalties, log
    probabilities and least lengths."""
    rng = random.Random(seed)
    drawn: list[Job] = []
    for number in range(num_jobs):
        text = rng.choice(OPENINGS)
        body: dict[str, Any] = {"max_tokens": rng.randint(30, 100), "stream": number % 2 == 0}
        if rng.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"temperature": rng.choice([0.7, 1.0]), "top_p": 0.9, "seed": number}
        if rng.random() < 0.3:
            body |= {"n": 2}
        if rng.random() < 0.3:
            body |= {"stop": [" She", " and the"]}
        if rng.random() < 0.3:
            body |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
        if number % 5 == 0:
            body |= {"min_tokens": 25}
        is_rated = number % 4 < 2
        if number % 3 == 0:
            body |= {"logprobs": True, "top_logprobs": 1} if is_rated else {}
            drawn.append((CHAT, {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            body |= {"logprobs": 1} if is_rated else {}
            drawn.append((COMPLETIONS, {**body, "prompt": text}))
    return drawn


def the_other_way(work: list[Job]) -> list[Job]:
    """The same requests, where those that were streamed are not, and the others are."""
    return [(path, {**body, "stream": not body["stream"]}) for path, body in work]


def num_sequences(work: list[Job]) -> int:
    return sum(body.get("n", 1) for _, body in work)
