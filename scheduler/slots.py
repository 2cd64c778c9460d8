"""Slot preemption: which running requests make way for strictly more urgent ones.

Asked before the running requests are planned, so the answer has to foresee what they will
take: a victim is given up only if the urgent request is then admitted in this very step.
"""

from collections import Counter

from scheduler.group import WorkerGroup
from scheduler.policy import Policy, WaitingQueue
from scheduler.request import Request


def choose_slot_victims(
    group: WorkerGroup, waiting: WaitingQueue, policy: Policy, *, budget: int, chunked: bool
) -> list[Request]:
    """One victim for each urgent request, in the order of the queue; stops at the first
    request that is not urgent enough or would not get in. Changes nothing.

    `budget` is that of the step, in tokens. Equals never swap.
    """
    remaining = sorted(group.running, key=policy.victim_key)
    victims: list[Request] = []
    given_up: Counter[int] = Counter()
    promised_blocks = promised_tokens = 0
    for urgent in waiting:
        if not remaining or remaining[-1].priority <= urgent.priority:
            break
        if group.is_in_flight(urgent):
            break
        victim = remaining.pop()
        given_up.update(victim.block_ids)
        num_tokens, num_blocks = _admission_cost(group, urgent, given_up)
        spare_tokens = budget - promised_tokens - sum(r.num_lacking for r in remaining)
        spare_blocks = (
            group.pool.num_free
            + _num_freed(group, given_up)
            - promised_blocks
            - sum(_growth(group, r) for r in remaining)
        )
        if spare_blocks < num_blocks or spare_tokens < (1 if chunked else num_tokens):
            break
        victims.append(victim)
        promised_blocks += num_blocks
        promised_tokens += min(num_tokens, spare_tokens)
    return victims


def _growth(group: WorkerGroup, request: Request) -> int:
    """Blocks that a running request will ask for in this step, at most."""
    num_slots = request.num_computed + request.num_lacking
    return max(0, group.kv.blocks_for(num_slots) - len(request.block_ids))


def _num_freed(group: WorkerGroup, given_up: Counter[int]) -> int:
    return sum(group.pool.ref_count(block) == count for block, count in given_up.items())


def _admission_cost(
    group: WorkerGroup, request: Request, given_up: Counter[int]
) -> tuple[int, int]:
    """Tokens to compute and free blocks to take, once the references in `given_up` are gone."""
    hit = group.kv.find_hit(request)
    num_free_hits = sum(group.pool.ref_count(block) == given_up[block] for block in hit)
    num_tokens = request.num_tokens - len(hit) * group.kv.block_size
    return num_tokens, group.kv.blocks_for(request.num_tokens) - len(hit) + num_free_hits
