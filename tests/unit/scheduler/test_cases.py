"""Cases that broke other servers (CASES), at the level of the core, by number."""

import random

import pytest

from scheduler.messages import (
    EndReason,
    FinishReason,
    InterruptionCause,
    NeverFits,
    SamplingParams,
)
from tests.support.drive import Driver, closed, opened, request_of, scheduled, text, token_row

BLOCKS = InterruptionCause.BLOCKS
in_every_window = pytest.mark.parametrize(
    ("steps_in_flight", "pipeline_stages"), [(1, 1), (2, 1), (3, 1), (4, 3)]
)


@in_every_window
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
@pytest.mark.parametrize("num_blocks", [9, 10, 11, 12])
def test_case_1_resumed_request_is_not_preempted_for_ever(
    num_blocks: int, limit: str, steps_in_flight: int, pipeline_stages: int
) -> None:
    """Chunks of 32, two prompts of 100 tokens, a pool for one and a half."""
    driver = Driver(
        num_blocks,
        steps_in_flight=steps_in_flight,
        pipeline_stages=pipeline_stages,
        **{limit: 32},  # type: ignore[arg-type]
    )
    driver.submit("A", text("a", 100), max_tokens=20)
    driver.submit("B", text("b", 100), max_tokens=20)
    driver.run()
    for name in ("A", "B"):
        assert driver.output(name) == driver.solo(name)
        interruptions = driver.usage(name).interruptions
        if interruptions is not None:
            assert interruptions.count <= 2
            assert interruptions.recomputed_tokens <= 120


@in_every_window
def test_case_2_echo_with_logprobs_in_a_tight_pool_loses_no_row(
    steps_in_flight: int, pipeline_stages: int
) -> None:
    """10 blocks are free for the prompt of 150; A takes one of them during its 5 chunks."""
    num_preemptions = 0
    for others_tokens in range(40, 49):
        driver = Driver(
            14,
            long_prefill_token_threshold=32,
            steps_in_flight=steps_in_flight,
            pipeline_stages=pipeline_stages,
        )
        driver.submit("A", text("a", others_tokens), max_tokens=60)
        driver.submit("echo", text("e", 150), max_tokens=2, prompt_logprobs=0, logprobs=0)
        driver.run()
        rows = [row for delta in driver.deltas["echo"] for row in delta.prompt_logprobs]
        assert rows == [token_row(p, text("e", 150)[p]) for p in range(1, 150)]
        assert driver.output("echo") == driver.solo("echo")
        num_preemptions += driver.core.accounting.by_cause[BLOCKS].preemptions
    assert num_preemptions > 0


def test_case_3_preempted_request_goes_before_its_equal_that_never_ran() -> None:
    """Its blocks are still there, so nothing is recomputed."""
    driver = Driver(20, policy="priority", max_num_seqs=1)
    driver.submit("preempted", text("p", 40), max_tokens=30, priority=1, arrival=5.0)
    while driver.request("preempted").num_computed < 48:
        driver.step()
    driver.submit("urgent", text("u", 20), max_tokens=2, priority=0)
    driver.submit("new", text("n", 200), max_tokens=2, priority=1, arrival=1.0)
    driver.step()
    assert driver.waiting == ["preempted", "new"]
    driver.run()
    interruptions = driver.usage("preempted").interruptions
    assert interruptions is not None
    assert (interruptions.recovered_tokens, interruptions.recomputed_tokens) == (48, 0)
    assert driver.output("preempted") == driver.solo("preempted")


def test_case_4_victim_that_was_already_planned_crashes_nothing() -> None:
    """`patient` was admitted first and is planned first; then `growing` needs a block."""
    driver = Driver(5, policy="priority", max_num_batched_tokens=64)
    driver.submit("patient", text("p", 18), max_tokens=30, priority=2)
    driver.step()
    driver.submit("growing", text("g", 31), max_tokens=30, priority=0)
    while not closed(plan := driver.step()):
        pass
    assert list(closed(plan)) == ["patient"]
    assert scheduled(plan) == {"growing": 1}
    driver.run()
    for name in ("patient", "growing"):
        assert driver.output(name) == driver.solo(name)


def test_case_5_only_request_outgrows_the_pool_and_is_clamped() -> None:
    driver = Driver(9)
    driver.submit("R", text("r", 60), max_tokens=1000)
    driver.run()
    assert driver.output("R") == driver.solo("R")[: 128 + 1 - 60]
    assert driver.finish("R") is FinishReason.LENGTH
    driver.submit("next", text("n", 10), max_tokens=2)
    driver.run()
    assert driver.output("next") == driver.solo("next")


def test_case_5_with_ignore_eos_it_is_refused_and_the_server_lives() -> None:
    driver = Driver(9)
    sampling = SamplingParams(max_tokens=1000, seed=0, ignore_eos=True)
    answer = driver.offer(request_of("R", text("r", 60), sampling))
    assert isinstance(answer, NeverFits)
    assert answer.capacity_tokens == 128
    driver.submit("next", text("n", 10), max_tokens=2)
    driver.run()
    assert driver.output("next") == driver.solo("next")


@pytest.mark.parametrize("resumed", [False, True], ids=["queued again", "being resumed"])
def test_case_6_abort_of_a_request_that_waits_for_its_kv(resumed: bool) -> None:
    driver = Driver(5, steps_in_flight=2)
    driver.submit("A", text("a", 31), max_tokens=30)
    driver.submit("R", text("r", 32), max_tokens=30)
    driver.plan()
    driver.plan()
    assert driver.waiting == ["R"]
    if resumed:
        driver.answer()
        driver.answer()
        driver.end("A")
        assert "R" in opened(driver.plan())
    driver.end("R")
    num_deltas = len(driver.deltas["R"])
    driver.run()  # late results come in
    assert len(driver.deltas["R"]) == num_deltas
    assert driver.finish("R") is FinishReason.ABORT
    assert driver.core.group.pool.num_held == 0


@in_every_window
def test_case_7_text_after_a_resume_is_that_of_an_undisturbed_run(
    steps_in_flight: int, pipeline_stages: int
) -> None:
    """The prompt stays cached because two choices share it; what was generated is not."""
    driver = Driver(
        8, steps_in_flight=steps_in_flight, pipeline_stages=pipeline_stages, policy="priority"
    )
    for choice in range(2):
        driver.submit(
            f"R/{choice}",
            text("r", 33),
            max_tokens=40,
            seed=7 + choice,
            priority=choice,
            logprobs=0,
        )
    driver.submit("other", text("o", 40), max_tokens=30, priority=2)
    driver.run()
    assert sum(t.preemptions for t in driver.core.accounting.by_cause.values()) > 0
    for name in ("R/0", "R/1", "other"):
        assert driver.output(name) == driver.solo(name)
    for name in ("R/0", "R/1"):
        rows = [row for delta in driver.deltas[name] for row in delta.logprobs]
        assert rows == [token_row(33 + i, id_) for i, id_ in enumerate(driver.solo(name))]


@pytest.mark.parametrize("seed", range(4))
def test_case_8_random_steps_keep_every_invariant(seed: int) -> None:
    """The driver checks after each event. `test_protocol` does the same for longer, with KV."""
    rng = random.Random(seed)
    pipeline_stages = rng.choice((1, 1, 3))
    driver = Driver(
        rng.randint(9, 17),
        policy=("fcfs", "priority")[seed % 2],
        pipeline_stages=pipeline_stages,
        steps_in_flight=pipeline_stages + rng.randint(0, 1),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
    )
    aborted = set()
    for count in range(180):
        name = f"r{count}"
        driver.submit(
            name,
            text(rng.choice("ab"), rng.randint(1, 100)),
            max_tokens=rng.randint(1, 28),
            priority=rng.randrange(3) if seed % 2 else 0,
        )
        while len(driver.waiting) > 4:
            driver.step()
        if rng.random() < 0.2:
            driver.end(victim := rng.choice(list(driver.core.requests)))
            aborted.add(victim)
        if rng.random() < 0.02:
            driver.lose_group()
    driver.run()
    for name in (f"r{count}" for count in range(180)):
        got, solo = driver.output(name), driver.solo(name)
        assert got == (solo[: len(got)] if name in aborted else solo)
        assert driver.finish(name) is not None
    assert sum(driver.core.accounting.finished.values()) == 180


def test_case_29_counters_after_20_requests_of_which_10_were_aborted() -> None:
    driver = Driver(60, max_num_seqs=5)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        driver.submit(name, text("a", 20), max_tokens=10)
    driver.steps(3)
    assert driver.running == names[:5]
    for name in (*names[:5], *names[10:15]):
        driver.end(name, EndReason.ABORT)
    driver.run()
    accounting = driver.core.accounting
    assert accounting.finished == {FinishReason.LENGTH: 10, FinishReason.ABORT: 10}
    assert (driver.running, driver.waiting) == ([], [])
    first_tokens = [name for name in names if driver.output(name)]
    assert len(first_tokens) == 15
    assert first_tokens == [*names[:10], *names[15:]]


def test_case_30_stall_shows_once_and_usage_agrees_with_the_histogram() -> None:
    driver = Driver(9)
    names = ["A", "B", "C", "D"]
    arrivals: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        driver.submit(name, text(name, 30), max_tokens=25)
    while driver.core.requests:
        before = {name: len(driver.output(name)) for name in names}
        driver.step()
        for name in names:
            arrivals[name] += [driver.now] * (len(driver.output(name)) - before[name])
    accounting = driver.core.accounting
    counts = []
    for name in names:
        interruptions = driver.usage(name).interruptions
        counts.append(interruptions.count if interruptions is not None else 0)
        gaps = [
            late - early for early, late in zip(arrivals[name], arrivals[name][1:], strict=False)
        ]
        stalled_seconds = sum(gap for gap in gaps if gap > 1.0)
        assert (interruptions is not None) == (stalled_seconds > 0)
        if interruptions is not None:
            # A pause of n seconds holds one ordinary second: that of the step before it.
            assert stalled_seconds - interruptions.stalled_seconds == interruptions.count
    assert sum(counts) > 0
    assert accounting.request_preemptions.sum == sum(counts)
    assert accounting.request_preemptions.count == len(names)
