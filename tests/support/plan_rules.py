"""What every plan must obey, judged from the messages alone."""

from collections import deque

from scheduler.block_pool import BlockPool
from scheduler.messages import Close, CloseReason, Extend, Open, SeqWork, StepPlan
from scheduler.prefix_cache import BlockHash
from tests.support.episode_config import EpisodeConfig
from tests.support.ledger import Ledger, MismatchError


class PlanRules:
    """Watches the plans of one epoch."""

    def __init__(self, config: EpisodeConfig, ledger: Ledger, num_blocks: int) -> None:
        self._budget = config.scheduler.max_num_batched_tokens
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._threshold = config.scheduler.long_prefill_token_threshold
        self._num_stages = config.num_stages
        self._block_size = config.block_size
        self._ledger = ledger
        self._tables: dict[str, list[int]] = {}
        """The open ones, by request id."""
        self._num_filled = [0] * num_blocks
        """Slots that work of published plans fills, since the block was last given out."""
        self._found_as: list[BlockHash | None] = [None] * num_blocks
        """The hash that it has carried since."""
        self._salts: list[str | None] = [None] * num_blocks
        """Whose text a block was last given out for."""
        self._in_flight: deque[frozenset[str]] = deque()

    def on_plan(self, plan: StepPlan) -> None:
        """Raises MismatchError if the plan breaks a rule. To be called before the ledger."""
        opened = {u.seq.request_id: u for u in plan.updates if isinstance(u, Open)}
        closed = [u for u in plan.updates if isinstance(u, Close)]
        num_running = len(self._tables) - sum(u.reason is not CloseReason.PREEMPTED for u in closed)
        for update in plan.updates:
            match update:
                case Open():
                    self._open(update)
                case Extend():
                    self._give_out(update.seq.request_id, update.block_ids)
                case Close():
                    del self._tables[update.seq.request_id]
        for update in opened.values():
            # What it hits may have been given out in this very plan.
            self._check_salt(update)
        self._check_work(plan)
        names = frozenset(work.seq.request_id for work in plan.work)
        if self._num_stages > 1:
            num_decodes = sum(
                work.num_tokens == 1 and work.sample and work.seq.request_id not in opened
                for work in plan.work
            )
            self._check_pipeline(names, num_decodes, num_running)
        self._in_flight.append(names)
        for work in plan.work:
            self._fill(self._tables[work.seq.request_id], work)

    def on_result(self) -> None:
        """The oldest plan was answered."""
        self._in_flight.popleft()

    def check_findable(self, pool: BlockPool) -> None:
        """A block can be found only under what plans that went out fill it with (SEMANTICS 2.5)."""
        for block_id, num_filled in enumerate(self._num_filled):
            block_hash = pool.hash_of(block_id)
            if block_hash is None or block_hash == self._found_as[block_id]:
                continue
            if self._found_as[block_id] is not None or num_filled < self._block_size:
                raise MismatchError(
                    f"block {block_id} can be found, but no plan that went out fills it"
                )
            self._found_as[block_id] = block_hash

    def _check_work(self, plan: StepPlan) -> None:
        work = plan.work
        if len({piece.seq.request_id for piece in work}) != len(work):
            raise MismatchError("a request is planned twice in one step")
        if sum(piece.num_tokens for piece in work) > self._budget:
            raise MismatchError(f"more than {self._budget} tokens in one step")
        if len(self._tables) > self._max_num_seqs:
            raise MismatchError(
                f"{len(self._tables)} tables are open, of at most {self._max_num_seqs}"
            )
        if self._threshold and len(work) > 1:
            longest = max(piece.num_tokens for piece in work)
            if longest > self._threshold:
                raise MismatchError(f"{longest} tokens of one request, threshold {self._threshold}")

    def _check_pipeline(self, names: frozenset[str], num_decodes: int, num_running: int) -> None:
        for others in self._in_flight:
            if not names.isdisjoint(others):
                raise MismatchError(f"{set(names & others)} are in two plans in flight")
        if num_decodes > -(-num_running // self._num_stages):
            raise MismatchError(f"{num_decodes} of {num_running} requests decode in one step")

    def _open(self, opened: Open) -> None:
        num_hit_blocks, rest = divmod(opened.num_computed, self._block_size)
        if rest:
            raise MismatchError(f"a hit of {opened.num_computed} ends within a block")
        self._tables[opened.seq.request_id] = list(opened.block_ids[:num_hit_blocks])
        self._give_out(opened.seq.request_id, opened.block_ids[num_hit_blocks:])

    def _give_out(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        salt = self._salt_of(request_id)
        self._tables[request_id].extend(block_ids)
        for block_id in block_ids:
            self._salts[block_id] = salt
            self._num_filled[block_id] = 0
            self._found_as[block_id] = None

    def _fill(self, table: list[int], work: SeqWork) -> None:
        block_size = self._block_size
        end = work.start + work.num_tokens
        for index in range(work.start // block_size, -(-end // block_size)):
            self._num_filled[table[index]] = min(block_size, end - index * block_size)

    def _check_salt(self, opened: Open) -> None:
        salt = self._salt_of(opened.seq.request_id)
        for block_id in opened.block_ids[: opened.num_computed // self._block_size]:
            if self._salts[block_id] != salt:
                raise MismatchError(
                    f"{opened.seq} with salt {salt!r} hits block {block_id}, which was filled "
                    f"under salt {self._salts[block_id]!r}"
                )

    def _salt_of(self, request_id: str) -> str:
        tracked = self._ledger.live.get(request_id)
        if tracked is None:
            raise MismatchError(f"blocks for {request_id}, which does not live")
        return tracked.job.message.cache_salt
