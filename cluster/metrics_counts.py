"""What one ingress replica counts: what its clients were promised, and what they got when."""

from scheduler.histogram import Histogram
from scheduler.messages import Counts
from scheduler.metrics import frozen

ABORT, ERROR = "abort", "error"
FINISH_REASONS = ("stop", "length", ABORT, ERROR)
REFUSALS = ("bad_request", "never_fits", "queue_full", "queue_share", "unavailable")
ERROR_STATUSES = (400, 401, 404, 405, 413, 429, 500, 503)
"""All that the API answers with."""


class ReplicaCounts:
    """Counts since the replica began. For one event loop."""

    def __init__(self) -> None:
        self._version = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._refused = dict.fromkeys(REFUSALS, 0)
        self._http_errors = dict.fromkeys(ERROR_STATUSES, 0)
        self._first_token_seconds = Histogram.of_seconds()
        self._inter_token_seconds = Histogram.of_seconds()
        self._e2e_seconds = Histogram.of_seconds()
        self._prompt_lengths = {reason: Histogram.of_tokens() for reason in FINISH_REASONS}
        self._output_lengths = {reason: Histogram.of_tokens() for reason in FINISH_REASONS}

    def accepted(self, num_prompt_tokens: int) -> None:
        """The engine has taken a request, whose prompts have so many tokens. Several choices of
        one prompt count it once, as in `usage`."""
        self._prompt_tokens += num_prompt_tokens

    def refused(self, reason: str) -> None:
        """One of `REFUSALS`."""
        self._refused[reason] += 1

    def answered(self, status: int) -> None:
        """A request to the API has an answer; counted if it is an error."""
        if status in self._http_errors:
            self._http_errors[status] += 1

    def copy(self) -> Counts:
        """All of it, as it is now."""
        self._version += 1
        return Counts(
            self._version,
            {
                "prompt_tokens_total": {"": self._prompt_tokens},
                "generation_tokens_total": {"": self._output_tokens},
                "requests_total": dict(self._finished),
                "admission_rejections_total": dict(self._refused),
                "http_errors_total": {str(s): count for s, count in self._http_errors.items()},
            },
            {
                "time_to_first_token_seconds": {"": frozen(self._first_token_seconds)},
                "inter_token_latency_seconds": {"": frozen(self._inter_token_seconds)},
                "e2e_request_latency_seconds": {"": frozen(self._e2e_seconds)},
                "request_prompt_tokens": {r: frozen(h) for r, h in self._prompt_lengths.items()},
                "request_generation_tokens": {
                    r: frozen(h) for r, h in self._output_lengths.items()
                },
            },
        )

    def got_tokens(
        self, num_tokens: int, *, first_seconds: float | None, gap_seconds: float
    ) -> None:
        """`num_tokens` at once; `first_seconds` after the arrival if none came before, else
        `gap_seconds` after the last."""
        self._output_tokens += num_tokens
        if first_seconds is not None:
            self._first_token_seconds.observe(first_seconds)
        # Tokens that come together have shared the wait.
        num_gaps = num_tokens - (first_seconds is not None)
        if num_gaps:
            self._inter_token_seconds.observe(gap_seconds / num_tokens, num_gaps)

    def ended(
        self, reason: str, num_prompt_tokens: int, num_output_tokens: int, e2e_seconds: float
    ) -> None:
        """One sequence has ended, for one of `FINISH_REASONS`."""
        self._finished[reason] += 1
        self._prompt_lengths[reason].observe(num_prompt_tokens)
        self._output_lengths[reason].observe(num_output_tokens)
        if reason not in (ABORT, ERROR):
            self._e2e_seconds.observe(e2e_seconds)


class SequenceCounts:
    """Books one sequence: its tokens as they come, and its end, once."""

    __slots__ = ("_arrived", "_counts", "_has_ended", "_last", "_num_output", "_num_prompt")

    def __init__(
        self, counts: ReplicaCounts, num_prompt_tokens: int, arrived_seconds: float
    ) -> None:
        """`arrived_seconds` is when its request arrived, on the clock of all later calls."""
        self._counts = counts
        self._num_prompt = num_prompt_tokens
        self._num_output = 0
        self._arrived = self._last = arrived_seconds
        self._has_ended = False

    def has_output(self, num_output_tokens: int, now_seconds: float) -> None:
        """Its output has `num_output_tokens` by now, all of which count for the client."""
        num_new = num_output_tokens - self._num_output
        if num_new <= 0 or self._has_ended:
            return
        is_first = not self._num_output
        self._counts.got_tokens(
            num_new,
            first_seconds=now_seconds - self._arrived if is_first else None,
            gap_seconds=0.0 if is_first else now_seconds - self._last,
        )
        self._num_output = num_output_tokens
        self._last = now_seconds

    def ended(self, reason: str, now_seconds: float) -> None:
        """Only the first end counts."""
        if not self._has_ended:
            self._has_ended = True
            self._counts.ended(
                reason, self._num_prompt, self._num_output, now_seconds - self._arrived
            )
