"""A request that was refused is not looked up again in vain, and never one step too long."""

import random

import pytest

from scheduler.kv_manager import KVManager
from scheduler.messages import encode
from scheduler.request import Request
from tests.support.drive import Driver, opened, scheduled, text


def refused() -> Driver:
    """A holds 6 of 10 blocks; R, at the head of the queue, needs 5."""
    driver = Driver(11, max_num_batched_tokens=64)
    driver.submit("A", text("a", 90), max_tokens=60)
    driver.submit("short", text("s", 10), max_tokens=60)
    driver.steps(3)
    driver.submit("R", text("r", 70), max_tokens=5)
    driver.steps(2)
    assert driver.waiting == ["R"]
    return driver


def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were looked up from now on."""
    names: list[str] = []
    find_hit = KVManager.find_hit

    def counted(manager: KVManager, request: Request) -> list[int]:
        names.append(request.request_id)
        return find_hit(manager, request)

    monkeypatch.setattr(KVManager, "find_hit", counted)
    return names


def test_request_is_not_looked_up_while_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = refused()
    names = lookups(monkeypatch)
    driver.steps(3)
    assert names == []


def test_request_is_admitted_in_the_step_after_blocks_were_freed() -> None:
    driver = refused()
    driver.end("A")
    assert scheduled(driver.step())["R"] == 63


def test_freed_blocks_that_are_not_enough_do_not_let_it_in() -> None:
    driver = refused()
    driver.end("short")
    driver.step()
    assert driver.waiting == ["R"]
    driver.end("A")
    assert "R" in opened(driver.step())


def test_request_is_admitted_as_soon_as_another_has_filled_what_it_shares() -> None:
    """Of 8 blocks A holds 3, the third one partly filled: R, which begins like A, could share 2
    and lacks 6 of 5. When A has filled its third, R lacks 5, and nothing was freed."""
    driver = Driver(9, max_num_batched_tokens=40, long_prefill_token_threshold=4)
    driver.submit("A", text("a", 128))
    driver.step()
    driver.submit("R", text("a", 120))
    assert scheduled(driver.step()) == {"A": 4}
    plan = driver.step()
    assert scheduled(plan) == {"A": 4, "R": 4}
    assert opened(plan)["R"].num_computed == 48


@pytest.mark.parametrize("seed", range(4))
def test_remembering_a_refusal_changes_no_decision(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembering = random_plans(seed)
    monkeypatch.setattr(KVManager, "is_still_refused", lambda manager, request: False)
    assert random_plans(seed) == remembering


def random_plans(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    policy = rng.choice(("fcfs", "priority"))
    stages = rng.choice((1, 1, 2))
    driver = Driver(
        rng.randint(8, 20),
        policy=policy,
        pipeline_stages=stages,
        steps_in_flight=stages + rng.randint(0, 2),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
        slot_preemption=rng.random() < 0.5,
    )
    for count in range(40):
        driver.submit(
            f"r{count}",
            text(rng.choice("ab"), rng.randint(1, 100)),
            max_tokens=rng.randint(1, 20),
            priority=rng.randrange(3) if policy == "priority" else 0,
            prompt_logprobs=0 if rng.random() < 0.2 else None,
        )
        driver.steps(rng.randrange(8))
        if rng.random() < 0.15 and driver.core.requests:
            driver.end(rng.choice(list(driver.core.requests)))
        if rng.random() < 0.02:
            driver.lose_group()
    driver.run()
    return [encode(plan) for plan in driver.plans]
