"""Two cores in one process share nothing, and a core is a function of its events."""

import gc

from scheduler.messages import encode
from scheduler.request import Request
from tests.support.drive import Driver, text


def story(seed: int) -> Driver:
    """A tight pool with preemptions; `seed` changes every token."""
    driver = Driver(8, max_num_batched_tokens=40, steps_in_flight=2)
    for i, letter in enumerate("ABCDE"):
        driver.submit(letter, text(letter, 20 + i, start=seed * 100), max_tokens=25, seed=seed)
    return driver


def plans_of(driver: Driver) -> list[bytes]:
    return [encode(plan) for plan in driver.plans]


def test_same_events_give_the_same_plans() -> None:
    a, b = story(1), story(1)
    a.run()
    b.run()
    assert plans_of(a) == plans_of(b)
    assert a.deltas == b.deltas


def test_two_cores_side_by_side_decide_as_each_does_alone() -> None:
    alone_1, alone_2 = story(1), story(2)
    alone_1.run()
    alone_2.run()
    a, b = story(1), story(2)
    while a.core.requests or b.core.requests:
        a.step()
        b.step()
    a.run()
    b.run()
    assert plans_of(a) == plans_of(alone_1)
    assert plans_of(b) == plans_of(alone_2)


def test_end_and_loss_in_one_core_do_not_reach_the_other() -> None:
    alone = story(1)
    alone.run()
    a, b = story(1), story(1)
    for _ in range(5):
        a.step()
        b.step()
    b.end("A")
    b.lose_group(num_blocks=5)
    a.run()
    assert plans_of(a) == plans_of(alone)


def test_ended_requests_are_let_go() -> None:
    """A long-lived core must not keep what every request ever said."""
    driver = Driver(20, max_num_seqs=4)
    for i in range(300):
        driver.submit(f"r{i}", text("a", 20, start=i), max_tokens=2)
        driver.steps(2)
        driver.now += 30
    driver.run()
    driver.core.submit([], driver.now)
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Request]
    assert len(alive) < 100
    assert len(driver.core._tombstones) < 10
