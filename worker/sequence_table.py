"""The worker's mirror of the scheduler's block tables, and the only reader of plan updates.

    row of one sequence    |<-- num_computed -->|<- known, not computed ->|
    token_ids              [0 ................. | ............ num_tokens)
    block_ids              [0 .......................... num_blocks) of `block_size` slots each

`num_computed <= num_tokens`, and a piece of work needs `start + n <= num_blocks * block_size`.
Tokens and blocks of all sequences lie in two growing matrices, so that a flat batch is index
arithmetic on rows. A row belongs to one open sequence; closed rows are used again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.messages import Close, Extend, Open, SeqRef, SeqWork, Update
from worker.errors import MirrorDriftError

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_FIRST_ROWS = 16
_FIRST_TOKENS = 512
_FIRST_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one plan as vectors, one entry per piece; s pieces."""

    seqs: tuple[SeqRef, ...]
    row_s: Int64s
    start_s: Int64s
    num_tokens_s: Int64s
    sample_s: Bools


class SequenceTable:
    """Block tables and token ids of all open sequences.

    Any contradiction raises `MirrorDriftError`; the table is in an undefined state afterwards.
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._num_pool_blocks = num_blocks
        self._block_size = block_size
        self.vocab_size = vocab_size
        self._rows: dict[str, tuple[int, int]] = {}  # request id -> (attempt, row)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self.token_ids: Int32s = np.zeros((_FIRST_ROWS, _FIRST_TOKENS), np.int32)
        self.block_ids: Int32s = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int32)
        self.num_tokens: Int64s = np.zeros(_FIRST_ROWS, np.int64)
        self.num_prompt_tokens: Int64s = np.zeros(_FIRST_ROWS, np.int64)
        self.num_computed: Int64s = np.zeros(_FIRST_ROWS, np.int64)
        self.num_blocks: Int64s = np.zeros(_FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        """Number of open sequences."""
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        """Rows there are now; grows, never shrinks. Row numbers are below it."""
        return len(self.num_tokens)

    def row(self, seq: SeqRef) -> int:
        """The row of an open sequence."""
        entry = self._rows.get(seq.request_id)
        if entry is None or entry[0] != seq.attempt:
            opened = "is not open" if entry is None else f"is open as attempt {entry[0]}"
            raise MirrorDriftError(f"{_name(seq)}: the plan means it, but the request {opened}")
        return entry[1]

    def apply(self, updates: Iterable[Update]) -> list[tuple[int, Open]]:
        """Apply the updates of one plan in order.

        Returns what was opened and is still open, with its row.
        """
        opened: dict[int, Open] = {}
        for update in updates:
            match update:
                case Extend():
                    self._extend(update)
                case Open():
                    opened[self._open(update)] = update
                case Close():
                    opened.pop(self._close(update), None)
        return list(opened.items())

    def work(self, pieces: Sequence[SeqWork]) -> Work:
        """The pieces as vectors, after checking each against the mirror. Changes nothing."""
        seqs = tuple(piece.seq for piece in pieces)
        count = len(pieces)
        work = Work(
            seqs,
            np.fromiter((self.row(seq) for seq in seqs), np.int64, count),
            np.fromiter((piece.start for piece in pieces), np.int64, count),
            np.fromiter((piece.num_tokens for piece in pieces), np.int64, count),
            np.fromiter((piece.sample for piece in pieces), np.bool_, count),
        )
        self._check(work)
        return work

    def advance(self, work: Work) -> None:
        """Book `work` as computed."""
        self.num_computed[work.row_s] = work.start_s + work.num_tokens_s

    def append(self, row_k: Int64s, token_id_k: Int64s) -> None:
        """Append one token to each of k rows, which must differ."""
        if not len(row_k):
            return
        end_k = self.num_tokens[row_k]
        self._reserve_tokens(int(end_k.max()) + 1)
        self.token_ids[row_k, end_k] = token_id_k
        self.num_tokens[row_k] = end_k + 1

    def _check(self, work: Work) -> None:
        computed_s, known_s = self.num_computed[work.row_s], self.num_tokens[work.row_s]
        end_s = work.start_s + work.num_tokens_s
        capacity_s = self.num_blocks[work.row_s] * self._block_size
        twice = len(set(work.row_s.tolist())) != len(work.row_s)
        bad_s = (
            (work.start_s != computed_s)
            | (work.num_tokens_s < 1)
            | (end_s > known_s)
            | (end_s > capacity_s)
            | (work.sample_s & (end_s != known_s))
        )
        if twice:
            raise MirrorDriftError("the plan holds two pieces of work for one sequence")
        if bad_s.any():
            s = int(bad_s.argmax())
            raise MirrorDriftError(
                f"{_name(work.seqs[s])}: the plan computes [{work.start_s[s]}, {end_s[s]})"
                f"{' and samples' if work.sample_s[s] else ''}, but here {computed_s[s]} tokens "
                f"are computed, {known_s[s]} known, and its blocks hold {capacity_s[s]}"
            )

    def _open(self, update: Open) -> int:
        seq = update.seq
        if seq.request_id in self._rows:
            attempt, _ = self._rows[seq.request_id]
            raise MirrorDriftError(f"{_name(seq)}: opened while attempt {attempt} is open")
        token_ids = np.frombuffer(update.token_ids, "<i4")
        known, blocks = len(token_ids), len(update.block_ids)
        if not 1 <= update.num_prompt_tokens <= known:
            raise MirrorDriftError(
                f"{_name(seq)}: opened with {update.num_prompt_tokens} prompt tokens of {known}"
            )
        if not 0 <= update.num_computed < known:
            raise MirrorDriftError(
                f"{_name(seq)}: opened with {update.num_computed} of {known} tokens computed; "
                "the last one never is"
            )
        if update.num_computed > blocks * self._block_size:
            raise MirrorDriftError(
                f"{_name(seq)}: opened with {update.num_computed} computed tokens in "
                f"{blocks} blocks of {self._block_size}"
            )
        self._check_token_ids(seq, token_ids)
        row = self._take_row()
        self._rows[seq.request_id] = (seq.attempt, row)
        self._reserve_tokens(known)
        self.token_ids[row, :known] = token_ids
        self.num_tokens[row] = known
        self.num_prompt_tokens[row] = update.num_prompt_tokens
        self.num_computed[row] = update.num_computed
        self.num_blocks[row] = 0
        self._append_blocks(seq, row, update.block_ids)
        return row

    def _extend(self, update: Extend) -> None:
        row = self.row(update.seq)
        if update.block_ids:
            self._append_blocks(update.seq, row, update.block_ids)
        if update.token_ids:
            token_ids = np.array(update.token_ids, np.int32)
            self._check_token_ids(update.seq, token_ids)
            start = int(self.num_tokens[row])
            self._reserve_tokens(start + len(token_ids))
            self.token_ids[row, start : start + len(token_ids)] = token_ids
            self.num_tokens[row] = start + len(token_ids)

    def _close(self, update: Close) -> int:
        row = self.row(update.seq)
        del self._rows[update.seq.request_id]
        self._free_rows.append(row)
        return row

    def _append_blocks(self, seq: SeqRef, row: int, block_ids: tuple[int, ...]) -> None:
        new = np.array(block_ids, np.int64)
        if len(new) and not 1 <= new.min() <= new.max() < self._num_pool_blocks:
            raise MirrorDriftError(
                f"{_name(seq)}: block ids {new.min()}..{new.max()}, "
                f"but this pool holds 1..{self._num_pool_blocks - 1}"
            )
        start = int(self.num_blocks[row])
        self._reserve_blocks(start + len(new))
        self.block_ids[row, start : start + len(new)] = new
        self.num_blocks[row] = start + len(new)

    def _check_token_ids(self, seq: SeqRef, token_ids: Int32s) -> None:
        if not 0 <= token_ids.min() <= token_ids.max() < self.vocab_size:
            raise MirrorDriftError(
                f"{_name(seq)}: a token id outside of the vocabulary (0..{self.vocab_size - 1})"
            )

    def _take_row(self) -> int:
        if not self._free_rows:
            rows = self.num_rows
            self.token_ids = _grown(self.token_ids, rows=2 * rows)
            self.block_ids = _grown(self.block_ids, rows=2 * rows)
            for name in ("num_tokens", "num_prompt_tokens", "num_computed", "num_blocks"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(rows, np.int64)]))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _reserve_tokens(self, tokens: int) -> None:
        if tokens > self.token_ids.shape[1]:
            self.token_ids = _grown(self.token_ids, columns=tokens)

    def _reserve_blocks(self, blocks: int) -> None:
        if blocks > self.block_ids.shape[1]:
            self.block_ids = _grown(self.block_ids, columns=blocks)


def _grown(matrix: Int32s, *, rows: int = 0, columns: int = 0) -> Int32s:
    """A copy with at least this many rows and columns; columns at least double."""
    old_rows, old_columns = matrix.shape
    if columns > old_columns:
        columns = max(columns, 2 * old_columns)
    grown = np.zeros((max(rows, old_rows), max(columns, old_columns)), np.int32)
    grown[:old_rows, :old_columns] = matrix
    return grown


def _name(seq: SeqRef) -> str:
    return f"request {seq.request_id} attempt {seq.attempt}"
