"""The exact cases of SEMANTICS 7, by number. Block size 16; the pool size counts the null block."""

from tests.support.drive import Driver, opened, scheduled, text

COMMON = text("C", 48)


def table(driver: Driver, name: str) -> tuple[int, list[int]]:
    """What the workers were told when `name` was opened last: the hit, and the blocks."""
    for plan in reversed(driver.plans):
        if name in opened(plan):
            return opened(plan)[name].num_computed, list(opened(plan)[name].block_ids)
    raise AssertionError(f"{name} was never opened")


def start(driver: Driver, name: str, prompt: list[int]) -> tuple[int, list[int]]:
    """Submit a request that will not end by itself soon, and let it compute its prompt."""
    driver.submit(name, prompt, max_tokens=100)
    driver.step()
    return table(driver, name)


def after_case_1() -> Driver:
    driver = Driver(11)
    start(driver, "A", [*COMMON, *text("a", 7)])
    return driver


def after_case_2() -> Driver:
    driver = after_case_1()
    start(driver, "B", [*COMMON, *text("b", 5)])
    return driver


def after_case_3() -> Driver:
    driver = after_case_2()
    driver.end("A")
    driver.end("B")
    return driver


def after_case_4() -> Driver:
    driver = after_case_3()
    start(driver, "C", [*COMMON, *text("c", 6)])
    return driver


def test_case_1_first_request_hits_nothing_and_gets_1_2_3_4() -> None:
    driver = after_case_1()
    assert table(driver, "A") == (0, [1, 2, 3, 4])
    pool = driver.core.group.pool
    assert [pool.hash_of(block) is not None for block in (1, 2, 3, 4)] == [True, True, True, False]


def test_case_2_second_request_shares_the_common_blocks() -> None:
    driver = after_case_2()
    pool = driver.core.group.pool
    assert table(driver, "B") == (48, [1, 2, 3, 5])
    assert [pool.ref_count(block) for block in (1, 2, 3)] == [2, 2, 2]
    assert pool.num_free == 5


def test_case_3_order_after_both_are_freed() -> None:
    assert after_case_3().free_queue == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_case_4_third_request_hits_blocks_out_of_the_free_queue() -> None:
    driver = after_case_4()
    assert table(driver, "C") == (48, [1, 2, 3, 5])
    assert driver.core.group.pool.num_free == 6


def test_case_5_request_for_the_whole_pool_spends_the_shared_prefix_last() -> None:
    driver = after_case_4()
    driver.end("C")
    driver.submit("D", text("d", 160))
    driver.step()
    assert table(driver, "D") == (0, [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])


def test_case_6_partial_block_is_spent_first_and_the_rest_last() -> None:
    driver = Driver(11)
    start(driver, "first", text("a", 87))
    start(driver, "other", text("b", 48))
    driver.end("first")
    driver.end("other")
    assert driver.free_queue == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    assert start(driver, "again", text("a", 35)) == (32, [1, 2, 6])
    assert driver.core.group.pool.num_free == 7


def test_case_7_hit_is_never_evicted_by_its_own_request() -> None:
    driver = Driver(3)
    driver.submit("A", text("a", 16))
    driver.step()
    driver.submit("B", text("b", 16))
    driver.step()
    assert driver.free_queue == [1, 2]
    driver.submit("both", [*text("a", 16), *text("b", 16)])
    driver.step()
    assert table(driver, "both") == (16, [1, 2])


def test_case_8_evictable_hits_count_as_demand() -> None:
    driver = Driver(11)
    driver.submit("gone", text("a", 96))
    driver.step()
    start(driver, "holder", [*text("a", 48), *text("b", 20)])
    pool = driver.core.group.pool
    assert (pool.num_free, pool.num_free_among([1, 2, 3, 4, 5, 6])) == (5, 3)
    before = [pool.ref_count(block) for block in range(11)], driver.free_queue
    driver.submit("refused", [*text("a", 96), *text("c", 48)])
    plan = driver.plan()
    assert "refused" not in scheduled(plan)
    assert driver.waiting == ["refused"]
    assert ([pool.ref_count(block) for block in range(11)], driver.free_queue) == before


def test_case_9_only_block_goes_to_the_next_request_and_its_hash_is_gone() -> None:
    driver = Driver(2)
    driver.submit("cached", text("a", 16))
    driver.step()
    block_hash = driver.core.group.pool.hash_of(1)
    assert block_hash is not None
    driver.submit("next", text("b", 15))
    driver.step()
    assert table(driver, "next") == (0, [1])
    assert driver.core.group.prefix_map.get(block_hash) is None


def test_case_10_long_prompts_share_the_budget_in_chunks() -> None:
    driver = Driver(
        200, max_num_batched_tokens=1024, long_prefill_token_threshold=400, max_model_len=4096
    )
    for name in ("A", "B", "C"):
        driver.submit(name, text(name, 800), max_tokens=9)
    assert [list(scheduled(plan).values()) for plan in driver.steps(3)] == [
        [400, 400, 224],
        [400, 400, 224],
        [1, 1, 352],
    ]


def test_case_11_chunked_prefill_starts_what_fits_into_the_budget() -> None:
    driver = Driver(200, max_num_batched_tokens=1024, max_model_len=1024)
    for name, count in (("A", 800), ("B", 800), ("C", 10), ("D", 10)):
        driver.submit(name, text(name, count))
    assert scheduled(driver.step()) == {"A": 800, "B": 224}


def test_case_11_without_chunks_the_second_prompt_waits() -> None:
    driver = Driver(
        200, max_num_batched_tokens=1024, max_model_len=1024, enable_chunked_prefill=False
    )
    for name, count in (("A", 800), ("B", 800), ("C", 10), ("D", 10)):
        driver.submit(name, text(name, count))
    assert scheduled(driver.step()) == {"A": 800}


def test_case_12_identical_prompts_of_one_step_share() -> None:
    driver = Driver(20)
    driver.submit("A", text("a", 100))
    driver.submit("B", text("a", 100))
    assert scheduled(driver.step()) == {"A": 100, "B": 4}


def test_case_13_second_time_16_of_17_tokens_are_cached() -> None:
    driver = Driver(11)
    for name in ("first", "second"):
        driver.submit(name, text("a", 17))
        driver.run()
    assert driver.usage("first").cached_tokens == 0
    assert driver.usage("second").cached_tokens == 16


def test_case_14_growing_urgent_request_preempts_and_the_victim_resumes_whole() -> None:
    driver = Driver(5, policy="priority")
    driver.submit("low", text("l", 30), max_tokens=8, priority=1)
    driver.step()
    driver.submit("high", text("h", 32), max_tokens=8, priority=0)
    driver.step()
    assert driver.running == ["low", "high"]
    driver.step()
    assert driver.running == ["high"]
    assert driver.waiting == ["low"]
    driver.run()
    assert driver.output("low") == driver.solo("low")
    assert driver.output("high") == driver.solo("high")
    assert driver.usage("high").interruptions is None


def test_case_15_without_caching_blocks_return_in_reverse_to_the_head() -> None:
    driver = Driver(6, caching=False)
    start(driver, "A", text("a", 40))
    assert table(driver, "A") == (0, [1, 2, 3])
    driver.end("A")
    assert driver.free_queue == [3, 2, 1, 4, 5]
