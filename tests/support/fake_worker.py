"""A worker group without a device: stages with mirrors of the block tables and a KV cache of cells.

A stage obeys plans as a real worker must (SEMANTICS 2.6): updates in order, then all writes
of the plan, then all reads. It trusts nothing: whatever it reads is compared with what its
mirror says should be there.
"""

from collections import deque
from collections.abc import Sequence

from scheduler.messages import (
    Close,
    Extend,
    Open,
    PromptLogprobs,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_token_ids,
)
from tests.support.fake_model import (
    START,
    UNWRITTEN,
    Cell,
    cells_of,
    describe_cell,
    next_cell,
    prompt_logprob_rows,
    sample_token,
    token_logprobs,
)


class WorkerFaultError(AssertionError):
    """A plan contradicts what the stage knows. A real worker would end its group."""


class WrongKvError(WorkerFaultError):
    """A sequence read KV that is not its own."""


class Mirror:
    """One open block table, as one stage sees it."""

    __slots__ = (
        "block_ids",
        "cells",
        "failed",
        "num_computed",
        "num_prompt_tokens",
        "sampling",
        "seq",
        "token_ids",
    )

    def __init__(self, opened: Open) -> None:
        self.seq: SeqRef = opened.seq
        token_ids = tuple(unpack_token_ids(opened.token_ids))
        self.token_ids: list[int] = list(token_ids)
        self.cells: list[Cell] = list(cells_of(token_ids))
        """What the KV of each known token must be."""
        self.block_ids: list[int] = list(opened.block_ids)
        self.num_computed = opened.num_computed
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.sampling: SamplingParams = opened.sampling
        self.failed = False

    def append(self, token_id: int) -> None:
        cells = self.cells
        previous = cells[-1] if cells else START
        cells.append(next_cell(previous, len(cells), token_id))
        self.token_ids.append(token_id)


Activations = list[int]
"""What one stage hands to the next: for each piece of work the sum of the cells it read."""


class Stage:
    """One pipeline stage: its mirrors and its KV of every block."""

    def __init__(self, index: int, num_stages: int, num_blocks: int, block_size: int) -> None:
        self.index = index
        self.is_last = index == num_stages - 1
        self.samples_locally = num_stages == 1
        """With one stage the sampled ids are appended here, with more the next plan brings them."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv: list[list[Cell]] = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.mirrors: dict[str, Mirror] = {}
        self.epoch: int | None = None
        self.next_step_id = 0
        self.poisoned: set[str] = set()
        """Requests whose next output is an error."""
        self.reports_nothing = False
        """Whether work that yields nothing is reported too, as an empty output."""

    def execute(
        self, plan: StepPlan, received: Activations | None
    ) -> tuple[Activations, tuple[SeqOutput, ...]]:
        """Obey one plan. `received` is None on the first stage; only the last one has outputs.

        Raises WorkerFaultError where the plan and the stage disagree.
        """
        self._check_order(plan)
        for update in plan.updates:
            match update:
                case Open():
                    self._open(update)
                case Extend():
                    self._extend(update)
                case Close():
                    self._close(update)
        mirrors = [self._write(work) for work in plan.work]
        activations = [
            self._read(work, mirror) for work, mirror in zip(plan.work, mirrors, strict=True)
        ]
        if received is not None:
            activations = self._combine(received, activations)
        if not self.is_last:
            return activations, ()
        outputs = []
        for work, mirror, digest in zip(plan.work, mirrors, activations, strict=True):
            output = self._output(work, mirror, digest)
            if output is not None:
                outputs.append(output)
        return activations, tuple(outputs)

    def _check_order(self, plan: StepPlan) -> None:
        if self.epoch is None:
            self.epoch = plan.epoch
        if plan.epoch != self.epoch or plan.step_id != self.next_step_id:
            raise WorkerFaultError(
                f"stage {self.index} expects step {self.next_step_id} of epoch {self.epoch}, "
                f"got step {plan.step_id} of epoch {plan.epoch}"
            )
        self.next_step_id += 1

    # Block tables

    def _open(self, opened: Open) -> None:
        request_id = opened.seq.request_id
        if request_id in self.mirrors:
            raise WorkerFaultError(f"stage {self.index}: {opened.seq} is opened while it is open")
        mirror = self.mirrors[request_id] = Mirror(opened)
        self._check_blocks(mirror, opened.block_ids)
        if not 0 <= mirror.num_computed < len(mirror.token_ids):
            raise WorkerFaultError(
                f"stage {self.index}: {opened.seq} opens with {mirror.num_computed} computed "
                f"of {len(mirror.token_ids)} tokens"
            )

    def _extend(self, extended: Extend) -> None:
        mirror = self._mirror(extended.seq)
        if self.samples_locally and extended.token_ids:
            raise WorkerFaultError(f"{extended.seq}: ids were sent that this stage sampled itself")
        for token_id in extended.token_ids:
            mirror.append(token_id)
        mirror.block_ids.extend(extended.block_ids)
        self._check_blocks(mirror, extended.block_ids)

    def _close(self, closed: Close) -> None:
        self._mirror(closed.seq)
        del self.mirrors[closed.seq.request_id]
        self.poisoned.discard(closed.seq.request_id)

    def _mirror(self, seq: SeqRef) -> Mirror:
        mirror = self.mirrors.get(seq.request_id)
        if mirror is None:
            raise WorkerFaultError(f"stage {self.index}: {seq} is not open")
        if mirror.seq.attempt != seq.attempt:
            raise WorkerFaultError(
                f"stage {self.index}: {seq} is meant, attempt {mirror.seq.attempt} is open"
            )
        return mirror

    def _check_blocks(self, mirror: Mirror, added: Sequence[int]) -> None:
        for block_id in added:
            if not 0 < block_id < self.num_blocks:
                raise WorkerFaultError(
                    f"stage {self.index}: {mirror.seq} got block {block_id} of {self.num_blocks}"
                )
        if added and len(set(mirror.block_ids)) != len(mirror.block_ids):
            raise WorkerFaultError(
                f"stage {self.index}: {mirror.seq} holds a block twice: {mirror.block_ids}"
            )

    # Work

    def _write(self, work: SeqWork) -> Mirror:
        """Store the cells of the work's positions; the caller reads afterwards."""
        mirror = self._mirror(work.seq)
        start = work.start
        end = start + work.num_tokens
        if start != mirror.num_computed or work.num_tokens < 1:
            raise WorkerFaultError(
                f"stage {self.index}: {work} but the mirror has {mirror.num_computed} computed"
            )
        mirror.num_computed = end
        num_known = len(mirror.cells)
        if end > num_known:
            if mirror.failed:
                return mirror
            raise WorkerFaultError(
                f"stage {self.index}: {work} but only {num_known} tokens are known"
            )
        if work.sample and end != num_known:
            raise WorkerFaultError(f"stage {self.index}: {work} samples before token {num_known}")
        block_size = self.block_size
        if end > len(mirror.block_ids) * block_size:
            raise WorkerFaultError(
                f"stage {self.index}: {work} needs more than the {len(mirror.block_ids)} blocks "
                f"of its table"
            )
        position = start
        while position < end:
            index, offset = divmod(position, block_size)
            stop = min(end, position - offset + block_size)
            block = self.kv[mirror.block_ids[index]]
            block[offset : offset + stop - position] = mirror.cells[position:stop]
            position = stop
        return mirror

    def _read(self, work: SeqWork, mirror: Mirror) -> int:
        """The sum of all cells up to the work's end; raises WrongKvError where one is not right."""
        end = work.start + work.num_tokens
        if end > len(mirror.cells):
            return 0
        kv = self.kv
        read: list[Cell] = []
        for block_id in mirror.block_ids[: -(-end // self.block_size)]:
            read += kv[block_id]
        del read[end:]
        if read != mirror.cells[:end]:
            self._raise_wrong_kv(work, mirror, read)
        return sum(read)

    def _raise_wrong_kv(self, work: SeqWork, mirror: Mirror, read: Sequence[Cell]) -> None:
        position = next(i for i, cell in enumerate(read) if cell != mirror.cells[i])
        block_id = mirror.block_ids[position // self.block_size]
        raise WrongKvError(
            f"stage {self.index}, {work}: position {position} (block {block_id}) should hold "
            f"{describe_cell(mirror.cells[position])}, holds {describe_cell(read[position])}"
        )

    def _combine(self, received: Activations, own: Activations) -> Activations:
        """Own sums where both stages read alike; else something else, which gives wrong text."""
        if len(received) != len(own):
            raise WorkerFaultError(
                f"stage {self.index} got activations of {len(received)} sequences for {len(own)}"
            )
        if received == own:
            return own
        return [
            mine if mine == theirs else mine * 3 + theirs
            for mine, theirs in zip(own, received, strict=True)
        ]

    def _output(self, work: SeqWork, mirror: Mirror, digest: int) -> SeqOutput | None:
        seq = work.seq
        end = work.start + work.num_tokens
        if mirror.failed or seq.request_id in self.poisoned:
            self.poisoned.discard(seq.request_id)
            mirror.failed = True
            return SeqOutput(seq, (), error="the sampler found no finite probability")
        sampling = mirror.sampling
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None:
            first = work.start + 1
            last = min(end + 1, mirror.num_prompt_tokens)
            if first < last:
                rows = prompt_logprob_rows(
                    mirror.cells, mirror.token_ids, first, last, sampling.prompt_logprobs
                )
                prompt_logprobs = PromptLogprobs(first, rows)
        if not work.sample:
            if prompt_logprobs is None and not self.reports_nothing:
                return None
            return SeqOutput(seq, (), prompt_logprobs=prompt_logprobs)
        token_id = sample_token(digest, end, mirror.num_prompt_tokens, sampling)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (token_logprobs(mirror.cells[-1], token_id, sampling.logprobs),)
        if self.samples_locally:
            mirror.append(token_id)
        return SeqOutput(seq, (token_id,), logprobs, prompt_logprobs)


class FakeWorkerGroup:
    """Stages in a row, each with its own queue of plans; whoever drives them picks the order.

    A stage takes the next plan of its queue once the stage before it is through with it, so
    several plans are really on their way at once. Results appear in `results` in step order.
    """

    def __init__(self, num_stages: int, num_blocks: int, block_size: int) -> None:
        self.stages = [
            Stage(index, num_stages, num_blocks, block_size) for index in range(num_stages)
        ]
        self.queues: list[deque[StepPlan]] = [deque() for _ in range(num_stages)]
        self.results: deque[StepResult] = deque()
        self._received: list[deque[Activations]] = [deque() for _ in range(num_stages)]

    def publish(self, plan: StepPlan) -> None:
        for queue in self.queues:
            queue.append(plan)

    def ready(self) -> list[int]:
        """The stages that could work now."""
        return [
            index
            for index, queue in enumerate(self.queues)
            if queue and (index == 0 or self._received[index])
        ]

    def advance(self, index: int) -> None:
        """Let stage `index`, which must be ready, obey its next plan."""
        plan = self.queues[index].popleft()
        received = self._received[index].popleft() if index else None
        activations, outputs = self.stages[index].execute(plan, received)
        if index + 1 < len(self.stages):
            self._received[index + 1].append(activations)
        else:
            self.results.append(StepResult(plan.epoch, plan.step_id, outputs))

    def poison(self, request_id: str) -> None:
        """Let the next output of this request be an error."""
        self.stages[-1].poisoned.add(request_id)

    def report_all_work(self, yes: bool) -> None:
        self.stages[-1].reports_nothing = yes
