"""What the scheduler core costs: `python tests/benchmarks/scheduler_core.py`.

CPU time of this process, median of several rounds. The workers' answers are made beforehand,
so that only the core is measured. Figures for a peer on the same kind of machine: 10.6, 10.6
and 12.6 µs per running request, 0.40 µs per hashed token, 0.38 µs per block.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from configs import CacheConfig, Config, SchedulerConfig, resolve
from scheduler.block_pool import BlockPool, Evictions
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Accepted,
    SamplingParams,
    SeqOutput,
    StepResult,
    SubmitRequest,
    pack_token_ids,
)
from scheduler.prefix_cache import BlockHasher, PrefixMap

BLOCK_SIZE = 16
CONTEXT_TOKENS = 512
ROUNDS = 9
STEPS_PER_ROUND = 16  # each request takes a new block once in 16 steps


def main() -> None:
    print("plan + apply + take_batches, steady decode, context 512, steps in flight 1 and 2")
    for num_requests in (64, 256, 1024):
        figures = [decode_seconds(num_requests, steps_in_flight=n) for n in (1, 2)]
        print(
            f"  {num_requests:5} requests    {_micro(figures[0])}  {_micro(figures[1])} a request"
        )
    print("the same, 256 requests, and what must not matter")
    for num_blocks in (10_000, 1_000_000):
        print(f"  {num_blocks:9} blocks   {_micro(decode_seconds(256, num_blocks=num_blocks))}")
    for num_finished in (100, 100_000):
        print(
            f"  {num_finished:9} finished {_micro(decode_seconds(256, num_finished=num_finished))}"
        )
    for algorithm in ("xxh3_128", "sha256"):
        print(f"hashing, {algorithm:8}       {_micro(hash_seconds(algorithm))} a token")
    print(f"allocate + free, 500 blocks {_micro(pool_seconds(evicting=False))} a block")
    print(f"the same, each an eviction  {_micro(pool_seconds(evicting=True))} a block")


def decode_seconds(
    num_requests: int,
    *,
    steps_in_flight: int = 1,
    num_blocks: int = 0,
    num_finished: int = 0,
) -> float:
    """CPU seconds per running request and step."""
    core = _core(num_requests, num_blocks or 45 * num_requests + 1, steps_in_flight)
    for i in range(num_finished):
        _submit(core, f"finished-{i}", num_prompt_tokens=4, max_tokens=1, first=i)
        _step(core)
        if i % 10_000 == 0:
            core.take_batches()
    for i in range(num_requests):
        _submit(core, f"r{i}", CONTEXT_TOKENS, max_tokens=100_000, first=i * CONTEXT_TOKENS)
    while any(r.num_output_tokens < 1 for r in core.requests.values()):
        _step(core)
    pending: deque[StepResult] = deque()
    per_round = []
    for _ in range(ROUNDS):
        spent = sum(_timed_step(core, pending) for _ in range(STEPS_PER_ROUND))
        per_round.append(spent / STEPS_PER_ROUND / num_requests)
    return statistics.median(per_round)


def _core(num_requests: int, num_blocks: int, steps_in_flight: int) -> SchedulerCore:
    config = Config(
        scheduler=SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            steps_in_flight=steps_in_flight,
            max_waiting_tokens=1 << 40,
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE),
    )
    resolved = resolve(config, "cpu", model_context_tokens=1 << 20)
    return SchedulerCore(
        scheduler=resolved.scheduler,
        cache=resolved.cache,
        num_blocks=num_blocks,
        max_model_len=1 << 20,
    )


def _submit(
    core: SchedulerCore, name: str, num_prompt_tokens: int, *, max_tokens: int, first: int
) -> None:
    message = SubmitRequest(
        request_id=name,
        client_id="bench",
        prompt_token_ids=pack_token_ids(range(first, first + num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        arrival_seconds=0.0,
    )
    assert isinstance(core.submit([message], now=0.0), Accepted)


def _step(core: SchedulerCore) -> None:
    plan = core.plan(0.0)
    if plan is not None:
        outputs = tuple(SeqOutput(work.seq, (7,)) for work in plan.work if work.sample)
        core.apply(StepResult(plan.epoch, plan.step_id, outputs), 0.0)


def _timed_step(core: SchedulerCore, pending: deque[StepResult]) -> float:
    """Fill the window, then apply one result and take its deltas."""
    start = time.process_time()
    plan = core.plan(0.0)
    spent = time.process_time() - start
    while plan is not None:
        outputs = tuple(SeqOutput(work.seq, (7,)) for work in plan.work)
        pending.append(StepResult(plan.epoch, plan.step_id, outputs))
        start = time.process_time()
        plan = core.plan(0.0)
        spent += time.process_time() - start
    result = pending.popleft()
    start = time.process_time()
    core.apply(result, 0.0)
    core.take_batches()
    return spent + time.process_time() - start


def hash_seconds(algorithm: str) -> float:
    hasher = BlockHasher(BLOCK_SIZE, algorithm)  # type: ignore[arg-type]
    data = pack_token_ids(range(64_000))
    root = hasher.root()
    return _median_seconds(lambda: hasher.chain(root, data)) / 64_000


def pool_seconds(*, evicting: bool) -> float:
    prefix_map = PrefixMap()
    pool = BlockPool(501 if evicting else 10_001, prefix_map, Evictions())
    hashes = [i.to_bytes(16, "little") for i in range(500)]
    per_round = []
    for _ in range(ROUNDS * 20):
        start = time.process_time()
        blocks = pool.allocate(500)
        spent = time.process_time() - start
        if evicting:
            for block, block_hash in zip(blocks, hashes, strict=True):
                pool.register(block, block_hash)
        start = time.process_time()
        pool.free(reversed(blocks))
        per_round.append((spent + time.process_time() - start) / 500)
    return statistics.median(per_round)


def _median_seconds(work: Callable[[], object]) -> float:
    figures = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        figures.append(time.process_time() - start)
    return statistics.median(figures)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:7.3f} µs"


if __name__ == "__main__":
    main()
