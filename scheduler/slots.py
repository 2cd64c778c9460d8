"""Slot preemption: which running requests make way for strictly more urgent ones.

Asked before the running requests are planned, so the answer has to foresee what they will
take: a victim is given up only if the urgent request is then admitted in this very step.
"""

from collections import Counter

from scheduler.group import WorkerGroup
from scheduler.policy import Policy, WaitingQueue
from scheduler.request import Request


def choose_slot_victims(
    group: WorkerGroup,
    waiting: WaitingQueue,
    policy: Policy,
    *,
    budget: int,
    chunk_limit: int,
    chunked: bool,
    pipelined: bool,
) -> list[Request]:
    """One victim for each urgent request, in the order of the queue; stops at the first
    request that is not urgent enough or would not get in. Changes nothing.

    `budget` is that of the step, `chunk_limit` that of one request, in tokens. If `pipelined`,
    who is in flight is not planned in this step. Equals never swap.
    """
    if waiting.peek().priority >= max(request.priority for request in group.running):
        return []  # what nearly every step finds
    remaining = sorted(group.running, key=policy.victim_key)
    work_tokens = {
        request.request_id: 0
        if pipelined and group.is_in_flight(request)
        else min(request.num_lacking, chunk_limit)
        for request in remaining
    }
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
        num_tokens = min(num_tokens, chunk_limit)
        spare_tokens = budget - promised_tokens - sum(work_tokens[r.request_id] for r in remaining)
        spare_blocks = (
            group.pool.num_free
            + _num_freed(group, given_up)
            - promised_blocks
            - sum(_growth(group, r, work_tokens[r.request_id]) for r in remaining)
        )
        if spare_blocks < num_blocks or spare_tokens < (1 if chunked else num_tokens):
            break
        victims.append(victim)
        promised_blocks += num_blocks
        promised_tokens += num_tokens  # all it wants: the next victim may leave it more
    return victims


def _growth(group: WorkerGroup, request: Request, num_tokens: int) -> int:
    """Blocks that a running request asks for to compute `num_tokens` more."""
    num_slots = request.num_computed + num_tokens
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
