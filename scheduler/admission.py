"""What is let in, and how long it may become. What can never fit never blocks the queue."""

from collections.abc import Collection
from typing import TypeAlias

from configs import ConfigError, ResolvedSchedulerConfig
from scheduler.messages import (
    TOKEN_BYTES,
    BadRequest,
    NeverFits,
    QueueFull,
    SamplingParams,
    SubmitRequest,
)
from scheduler.policy import WaitingQueue
from scheduler.request import Request

Refusal: TypeAlias = BadRequest | NeverFits | QueueFull

NAMES_OF_REFUSALS: dict[type, str] = {
    BadRequest: "bad_request",
    NeverFits: "never_fits",
    QueueFull: "queue_full",
}
"""As they are counted."""


class AdmissionRules:
    """The rules of one configuration. Holds no state."""

    def __init__(self, config: ResolvedSchedulerConfig, max_model_len: int) -> None:
        """Raises ConfigError where a request that fits could wait for ever."""
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is {config.max_num_batched_tokens}, and"
                f" without chunked prefill it must be at least the context length {max_model_len}:"
                " a preempted request could never get in again"
            )
        self._config = config
        self._max_model_len = max_model_len

    def refusal(
        self, messages: Collection[SubmitRequest], waiting: WaitingQueue, *, capacity_tokens: int
    ) -> Refusal | None:
        """Why these cannot be taken, all together; None if they can.

        A continuation was taken once already: it is turned away for its form alone.
        """
        for message in messages:
            bad = self._bad_request(message)
            if bad is not None:
                return bad
        new = [message for message in messages if message.usage_so_far is None]
        for message in new:
            too_large = self.never_fits(
                _num_prompt_tokens(message), message.sampling, capacity_tokens
            )
            if too_large is not None:
                return too_large
        return self._queue_full(new, waiting)

    def never_fits(
        self, num_prompt_tokens: int, sampling: SamplingParams, capacity_tokens: int
    ) -> NeverFits | None:
        """A pool of `capacity_tokens` slots cannot hold the request, now or ever.

        The last token of an output needs no slot. A request that may end early is cut to the pool
        instead (`max_total_tokens`), one that ignores end-of-sequence is refused.
        """
        if num_prompt_tokens > capacity_tokens:
            return NeverFits(
                f"the prompt has {num_prompt_tokens} tokens, and the whole KV cache holds"
                f" {capacity_tokens}; shorten the prompt or serve with more blocks",
                capacity_tokens,
            )
        num_needed = min(num_prompt_tokens + sampling.max_tokens, self._max_model_len) - 1
        if sampling.ignore_eos and num_needed > capacity_tokens:
            return NeverFits(
                f"the prompt and max_tokens need {num_needed} tokens of KV cache under ignore_eos,"
                f" and the whole cache holds {capacity_tokens}; lower max_tokens or serve with more"
                " blocks",
                capacity_tokens,
            )
        return None

    def max_total_tokens(self, request: Request, capacity_tokens: int) -> int:
        """The length at which it ends, by its own wish, the model's, or the pool's."""
        wished = request.num_prompt_tokens + request.sampling.max_tokens
        return min(wished, self._max_model_len, capacity_tokens + 1)

    def _bad_request(self, message: SubmitRequest) -> BadRequest | None:
        """What no scheduler of this configuration could serve."""
        num_bytes = len(message.prompt_token_ids)
        num_prompt_tokens = num_bytes // TOKEN_BYTES
        policy = self._config.policy
        if num_bytes % TOKEN_BYTES or len(message.output_token_ids) % TOKEN_BYTES:
            return BadRequest("packed token ids must be a multiple of 4 bytes", "prompt")
        if not num_prompt_tokens:
            return BadRequest("the prompt is empty; it needs at least 1 token", "prompt")
        if num_prompt_tokens >= self._max_model_len:
            return BadRequest(
                f"the maximum context length is {self._max_model_len} tokens, and your prompt has"
                f" {num_prompt_tokens}; leave room for at least 1 token of output",
                "prompt",
            )
        if message.sampling.max_tokens < 1:
            return BadRequest(
                f"max_tokens must be at least 1, not {message.sampling.max_tokens}", "max_tokens"
            )
        if message.priority and policy != "priority":
            return BadRequest(
                f"priority is {message.priority}, but the scheduling policy is {policy}, which"
                " ignores priorities; leave it out or start the server with the priority policy",
                "priority",
            )
        return None

    def _queue_full(self, new: list[SubmitRequest], waiting: WaitingQueue) -> QueueFull | None:
        """Too much waits already. An empty queue takes any one call."""
        if not waiting or not new:
            return None
        max_requests, max_tokens = (
            self._config.max_waiting_requests,
            self._config.max_waiting_tokens,
        )
        if len(waiting) + len(new) > max_requests:
            return QueueFull(
                f"{len(waiting)} requests are waiting, and yours adds {len(new)}, of at most"
                f" {max_requests} together; try again later"
            )
        num_tokens = sum(_num_prompt_tokens(message) for message in new)
        if waiting.num_tokens + num_tokens > max_tokens:
            return QueueFull(
                f"requests with {waiting.num_tokens} tokens are waiting, and yours has"
                f" {num_tokens}, of at most {max_tokens} together; try again later"
            )
        return None


def _num_prompt_tokens(message: SubmitRequest) -> int:
    return len(message.prompt_token_ids) // TOKEN_BYTES
