"""What every plan must obey, judged from the messages alone."""

from collections import Counter, deque

from scheduler.messages import Close, CloseReason, Extend, Open, StepPlan
from tests.support.ledger import Ledger, MismatchError
from tests.support.workload import EpisodeConfig


class PlanRules:
    """Watches the plans of one epoch."""

    def __init__(self, config: EpisodeConfig, ledger: Ledger, num_blocks: int) -> None:
        self._budget = config.scheduler.max_num_batched_tokens
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._threshold = config.scheduler.long_prefill_token_threshold
        self._num_stages = config.num_stages
        self._block_size = config.block_size
        self._ledger = ledger
        self._open: dict[str, int] = {}
        """Request ids with an open table, and their attempt."""
        self._salts: list[str | None] = [None] * num_blocks
        """Whose text a block was last given out for."""
        self._in_flight: deque[frozenset[str]] = deque()

    def on_plan(self, plan: StepPlan) -> None:
        """Raises MismatchError if the plan breaks a rule. To be called before the ledger."""
        closed: Counter[CloseReason] = Counter()
        num_open = len(self._open)
        opened = {u.seq.request_id: u for u in plan.updates if isinstance(u, Open)}
        for update in plan.updates:
            match update:
                case Open():
                    self._open[update.seq.request_id] = update.seq.attempt
                    num_hit_blocks = update.num_computed // self._block_size
                    if update.num_computed % self._block_size:
                        raise MismatchError(f"a hit of {update.num_computed} ends within a block")
                    self._give_out(update.seq.request_id, update.block_ids[num_hit_blocks:])
                case Extend():
                    self._give_out(update.seq.request_id, update.block_ids)
                case Close():
                    closed[update.reason] += 1
                    self._open.pop(update.seq.request_id, None)
        for update in opened.values():
            # What it hits may have been given out in this very plan.
            self._check_salt(update)
        names = frozenset(work.seq.request_id for work in plan.work)
        if len(names) != len(plan.work):
            raise MismatchError("a request is planned twice in one step")
        if sum(work.num_tokens for work in plan.work) > self._budget:
            raise MismatchError(f"more than {self._budget} tokens in one step")
        if len(self._open) > self._max_num_seqs:
            raise MismatchError(
                f"{len(self._open)} tables are open, of at most {self._max_num_seqs}"
            )
        if self._threshold and len(plan.work) > 1:
            longest = max(work.num_tokens for work in plan.work)
            if longest > self._threshold:
                raise MismatchError(f"{longest} tokens of one request, threshold {self._threshold}")
        if self._num_stages > 1:
            for others in self._in_flight:
                if not names.isdisjoint(others):
                    raise MismatchError(f"{set(names & others)} are in two plans in flight")
            num_running = num_open - closed[CloseReason.FINISHED] - closed[CloseReason.ABORTED]
            num_decodes = sum(
                work.num_tokens == 1 and work.sample and work.seq.request_id not in opened
                for work in plan.work
            )
            if num_decodes > -(-num_running // self._num_stages):
                raise MismatchError(f"{num_decodes} of {num_running} requests decode in one step")
        self._in_flight.append(names)

    def on_result(self) -> None:
        """The oldest plan was answered."""
        self._in_flight.popleft()

    def _check_salt(self, opened: Open) -> None:
        salt = self._salt_of(opened.seq.request_id)
        for block_id in opened.block_ids[: opened.num_computed // self._block_size]:
            if self._salts[block_id] != salt:
                raise MismatchError(
                    f"{opened.seq} with salt {salt!r} hits block {block_id}, which was filled "
                    f"under salt {self._salts[block_id]!r}"
                )

    def _give_out(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        salt = self._salt_of(request_id)
        for block_id in block_ids:
            self._salts[block_id] = salt

    def _salt_of(self, request_id: str) -> str:
        tracked = self._ledger.live.get(request_id)
        if tracked is None:
            raise MismatchError(f"blocks for {request_id}, which does not live")
        return tracked.job.message.cache_salt
