"""What must hold between any two events, derived anew from the state that others keep."""

from collections import Counter

from scheduler.block_pool import NULL_BLOCK
from scheduler.core import SchedulerCore
from scheduler.errors import BrokenInvariantError
from scheduler.messages import StepPlan
from scheduler.request import NEVER, Request, Status


def check(core: SchedulerCore, plan: StepPlan | None = None) -> None:
    """Raises BrokenInvariantError, naming what is wrong; changes nothing.

    `plan`, if given, is the one that the core has just made. The cost grows with the pool:
    for tests, not for service.
    """
    _check_pool(core)
    _check_prefix_map(core)
    _check_queues(core)
    for request in core.requests.values():
        _check_table(core, request)
    _check_bills(core)
    if plan is not None:
        _check_plan(core, plan)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenInvariantError(what)


def _check_pool(core: SchedulerCore) -> None:
    """N-1 = held + evictable + scratch; the free queue holds exactly what nobody holds; a
    reference count is the number of tables that contain the block."""
    pool = core.group.pool
    tables = Counter(block for r in core.requests.values() for block in r.block_ids)
    for block in range(1, pool.num_blocks):
        _require(
            pool.ref_count(block) == tables[block],
            f"block {block} is in {tables[block]} tables, its count is {pool.ref_count(block)}",
        )
    _require(not tables[NULL_BLOCK], "the null block is in a table")
    free = list(pool.free_queue())
    _require(len(set(free)) == len(free), f"a block stands in the free queue twice: {free}")
    _require(not any(map(pool.ref_count, free)), f"a held block is in the free queue: {free}")
    evictable = sum(pool.hash_of(block) is not None for block in free)
    _require(len(free) == pool.num_free, f"{len(free)} blocks queue, {pool.num_free} are free")
    _require(evictable == pool.num_evictable, f"{evictable} evictable, not {pool.num_evictable}")
    total = len(tables) + pool.num_evictable + pool.num_scratch
    _require(total == pool.num_usable, f"{total} blocks of {pool.num_usable} are accounted for")
    backwards = list(pool.free_queue(backwards=True))
    _require(backwards[::-1] == free, f"the links disagree: {free} and {backwards} backwards")


def _check_prefix_map(core: SchedulerCore) -> None:
    """A block is in the map exactly under the hash it carries."""
    pool = core.group.pool
    mapped = {
        block: block_hash
        for block_hash, blocks in core.group.prefix_map.items()
        for block in blocks
    }
    carried = {
        block: block_hash
        for block in range(pool.num_blocks)
        if (block_hash := pool.hash_of(block)) is not None
    }
    _require(mapped == carried, "the prefix map and the hashes on the blocks differ")


def _check_queues(core: SchedulerCore) -> None:
    """Every live request stands in exactly one place, the one its status names."""
    running, waiting = core.group.running, list(core.waiting)
    _require(
        all(r.status is Status.RUNNING for r in running), "a request on the running list waits"
    )
    _require(all(r.status is Status.WAITING for r in waiting), "a request in the queue runs")
    places = Counter(r.request_id for r in [*running, *waiting])
    _require(
        places == dict.fromkeys(core.requests, 1), "a request is lost, or stands somewhere twice"
    )
    _require(len(waiting) == len(core.waiting), "the length of the queue is wrong")
    num_tokens = sum(r.num_tokens for r in waiting)
    _require(num_tokens == core.waiting.num_tokens, "the queue's sum of tokens is wrong")
    num_interrupted = sum(r.was_interrupted for r in waiting)
    _require(
        num_interrupted == core.waiting.num_interrupted, "the queue's count of resumes is wrong"
    )
    admissions = [r.admission_index for r in running]
    _require(admissions == sorted(admissions), "running requests are out of order")


def _check_table(core: SchedulerCore, request: Request) -> None:
    """A table has slots for what is computed, and its leading full blocks carry their hashes."""
    group, name = core.group, f"request {request.request_id}"
    computed, known = request.num_computed, request.num_tokens
    _require(
        len(request.block_ids) == group.kv.blocks_for(computed),
        f"{name} has {len(request.block_ids)} blocks for {computed} computed tokens",
    )
    _require(known < request.max_total_tokens, f"{name} is alive at its full length")
    if request.status is Status.RUNNING:
        _require(
            computed <= request.num_expected and known <= request.num_expected,
            f"{name} has {known} tokens and expects {request.num_expected}, {computed} computed",
        )
    full = min(computed, known) // group.kv.block_size
    if request.next_hash_at is NEVER:
        _require(request.num_registered == 0, f"{name} has hashes without a table")
        return
    _require(request.num_registered == full, f"{name}: {request.num_registered} of {full} hashed")
    for block, block_hash in zip(request.block_ids[:full], request.block_hashes, strict=False):
        _require(group.pool.hash_of(block) == block_hash, f"{name}: block {block} has no hash")
    for block in request.block_ids[full:]:
        _require(group.pool.hash_of(block) is None, f"{name}: block {block} is hashed too early")


def _check_bills(core: SchedulerCore) -> None:
    """held = recovered + recomputed + dropped + held by those still waiting to resume."""
    open_bills: Counter[str] = Counter()
    for request in core.requests.values():
        if request.bill is not None:
            open_bills[request.bill.cause] += request.bill.held_tokens
    for cause, totals in core.accounting.by_cause.items():
        settled = totals.recovered_tokens + totals.recomputed_tokens + totals.dropped_tokens
        _require(
            totals.held_tokens == settled + open_bills[cause],
            f"bills of {cause}: {totals.held_tokens} held, {settled} settled,"
            f" {open_bills[cause]} open",
        )


def _check_plan(core: SchedulerCore, plan: StepPlan) -> None:
    num_tokens = sum(work.num_tokens for work in plan.work)
    budget = core.max_num_batched_tokens
    _require(num_tokens <= budget, f"{num_tokens} tokens planned, the budget is {budget}")
    planned = [work.seq.request_id for work in plan.work]
    _require(len(set(planned)) == len(planned), "a request is in the plan twice")
    for work in plan.work:
        request = core.requests[work.seq.request_id]
        _require(work.seq == request.ref, f"{work.seq} is planned but not open")
        _require(work.start + work.num_tokens == request.num_computed, f"{work} was not counted")
