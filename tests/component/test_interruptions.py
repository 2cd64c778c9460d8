"""The real scheduler core and a real worker: whatever happens on the way, the text is the same.

Random submissions, aborts, lost groups, preemptions in a pool far too small, cache resets; the
answers must equal those of each request alone in a large pool.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from scheduler import invariants
from scheduler.messages import EndReason, SamplingParams
from tests.support.real_worker import Answer, LocalWorker, Server, complete, worker_config

LONGEST_PROMPT = 60


@pytest.fixture(scope="module")
def workers(stories: Path) -> dict[str, LocalWorker]:
    """One with a large pool for the undisturbed runs, one per disturbed configuration."""
    return {"large": LocalWorker(worker_config(num_blocks=400), stories)}


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    shared = [
        list(range(3 + k, 3 + k + 40)) for k in range(3)
    ]  # prefixes that requests have in common
    prompt = rng.choice(shared)[: rng.randrange(0, 41)]
    prompt = prompt + [rng.randrange(3, 512) for _ in range(rng.randint(1, 20))]
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 15, 16, 17, 40]),
        "seed": rng.getrandbits(64),
        "temperature": rng.choice([0.0, 0.8]),
        "ignore_eos": True,
    }
    if rng.random() < 0.3:
        params |= {"top_p": 0.9, "top_k": 40}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    if rng.random() < 0.3:
        params |= {"logprobs": 2}
    if rng.random() < 0.2:
        params |= {"prompt_logprobs": 1}
    if rng.random() < 0.2:
        params |= {"min_tokens": 5, "stop_token_ids": tuple(range(100, 400)), "bad_words": ((9,),)}
    return prompt, SamplingParams(**params)


def undisturbed(worker: LocalWorker, prompt: list[int], sampling: SamplingParams) -> Answer:
    worker.join(0)
    [answer] = complete(
        worker_config(num_blocks=400, steps_in_flight=1), worker, [prompt], sampling
    )
    return answer


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.error is None
    assert found.token_ids == expected.token_ids
    assert found.finish == expected.finish
    assert found.usage is not None
    assert expected.usage is not None
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    for ours, theirs in (
        (found.logprobs, expected.logprobs),
        (found.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert [row.logprob for row in ours] == pytest.approx(
            [row.logprob for row in theirs], abs=1e-4
        )


def disturb(
    server: Server, rng: random.Random, requests: list[Any], priorities: list[int]
) -> set[str]:
    """Run all requests with random events between steps; those that were aborted."""
    pending = list(enumerate(requests))
    aborted: set[str] = set()
    losses = 0
    while pending or not server.core.is_idle:
        event = rng.random()
        if pending and event < 0.3:
            number, (prompt, sampling) = pending.pop(0)
            server.submit(str(number), prompt, sampling, priority=rng.choice(priorities))
        elif event < 0.34 and server.core.requests:
            request_id = rng.choice(sorted(server.core.requests))
            server.end(request_id, EndReason.ABORT)
            aborted.add(request_id)
        elif event < 0.37 and losses < 3:
            losses += 1
            server.lose_group()
        else:
            server.step()
        invariants.check(server.core)
    return aborted


CONFIGURATIONS: list[dict[str, Any]] = [
    {"num_blocks": 10, "max_num_batched_tokens": 32},
    {"num_blocks": 8, "max_num_batched_tokens": 128, "policy": "priority", "max_num_seqs": 3},
    {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 11, "steps_in_flight": 1},
    {"num_blocks": 10, "steps_in_flight": 4, "max_num_seqs": 6},
]


def run_episode(
    stories: Path, workers: dict[str, LocalWorker], settings: dict[str, Any], seed: int
) -> int:
    """One random episode; how often a request was preempted in it."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(12)]
    config = worker_config(**settings)
    name = str(sorted(settings.items()))
    if name not in workers:
        workers[name] = LocalWorker(config, stories)
    workers[name].join(0)
    server = Server(config, workers[name])
    priorities = [0, 0, 1] if config.scheduler.policy == "priority" else [0]
    aborted = disturb(server, rng, requests, priorities)
    assert len(server.answers) == len(requests)
    preemptions = 0
    for number, (prompt, sampling) in enumerate(requests):
        answer = server.answers[str(number)]
        expected = undisturbed(workers["large"], prompt, sampling)
        if str(number) in aborted:
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert_same(answer, expected)
        if answer.usage is not None and answer.usage.interruptions is not None:
            preemptions += answer.usage.interruptions.count
    server.drain()
    assert workers[name].rank.num_open == 0
    return preemptions


@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=str)
def test_random_interruptions_leave_the_text_alone(
    stories: Path, workers: dict[str, LocalWorker], settings: dict[str, Any]
) -> None:
    preemptions = sum(run_episode(stories, workers, settings, seed) for seed in range(2))
    assert preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_interruptions(
    stories: Path, workers: dict[str, LocalWorker], settings: dict[str, Any], seed: int
) -> None:
    run_episode(stories, workers, settings, seed)
