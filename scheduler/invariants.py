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


def _require(holds: bool, what: str, *values: object) -> None:
    """`values` fill the braces of `what`, which nobody has to read as long as all is well."""
    if not holds:
        raise BrokenInvariantError(what.format(*values))


def _check_pool(core: SchedulerCore) -> None:
    """N-1 = held + evictable + scratch; the free queue holds exactly what nobody holds; a
    reference count is the number of tables that contain the block."""
    pool = core.group.pool
    tables: Counter[int] = Counter()
    for request in core.requests.values():
        tables.update(request.block_ids)
    held = {block: count for block in range(pool.num_blocks) if (count := pool.ref_count(block))}
    _require(held == tables, "the reference counts are {}, the tables have {}", held, tables)
    _require(NULL_BLOCK not in tables, "the null block is in a table")
    free = list(pool.free_queue())
    not_held = {*range(1, pool.num_blocks)} - held.keys()
    _require(len(free) == len(not_held), "{} queue, free are {}", free, not_held)
    _require(set(free) == not_held, "{} queue, free are {}", free, not_held)
    evictable = len(free) - [pool.hash_of(block) for block in free].count(None)
    _require(len(free) == pool.num_free, "{} blocks queue, {} are free", len(free), pool.num_free)
    _require(evictable == pool.num_evictable, "{} evictable, not {}", evictable, pool.num_evictable)
    total = len(tables) + pool.num_evictable + pool.num_scratch
    _require(total == pool.num_usable, "{} of {} blocks accounted for", total, pool.num_usable)
    backwards = list(pool.free_queue(backwards=True))
    _require(backwards[::-1] == free, "the links disagree: {}, {} backwards", free, backwards)


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
    group, name = core.group, request.request_id
    block_ids = request.block_ids
    computed, known, expected = request.num_computed, request.num_tokens, request.num_expected
    _require(
        len(block_ids) == group.kv.blocks_for(computed),
        "request {} has the blocks {} for {} computed tokens",
        name,
        block_ids,
        computed,
    )
    _require(known < request.max_total_tokens, "request {} is alive at its full length", name)
    _require(
        request.status is not Status.RUNNING or (computed <= expected and known <= expected),
        "request {} has {} tokens and expects {}, {} computed",
        name,
        known,
        expected,
        computed,
    )
    num_hashed = request.num_registered
    if request.next_hash_at is NEVER:
        _require(num_hashed == 0, "request {} has hashes without a table", name)
        return
    full = min(computed, known) // group.kv.block_size
    _require(num_hashed == full, "request {}: {} of {} blocks hashed", name, num_hashed, full)
    carried = [group.pool.hash_of(block) for block in block_ids]
    due = [*request.block_hashes[:full], *[None] * (len(block_ids) - full)]
    _require(carried == due, "request {}: of the blocks {} some have a wrong hash", name, block_ids)


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
            "bills of {}: {} held, {} settled, {} open",
            cause,
            totals.held_tokens,
            settled,
            open_bills[cause],
        )


def _check_plan(core: SchedulerCore, plan: StepPlan) -> None:
    num_tokens = sum(work.num_tokens for work in plan.work)
    budget = core.max_num_batched_tokens
    _require(num_tokens <= budget, "{} tokens planned, the budget is {}", num_tokens, budget)
    planned = [work.seq.request_id for work in plan.work]
    _require(len(set(planned)) == len(planned), "a request is in the plan twice")
    for work in plan.work:
        request = core.requests[work.seq.request_id]
        _require(work.seq == request.ref, "{} is planned but not open", work.seq)
        _require(work.start + work.num_tokens == request.num_computed, "{} was not counted", work)
