"""What is let in, and how long it may become. What can never fit never blocks the queue."""

from scheduler.messages import TOKEN_BYTES, BadRequest, NeverFits, QueueFull, SubmitRequest
from scheduler.policy import WaitingQueue
from scheduler.request import Request


def bad_request(message: SubmitRequest, *, max_model_len: int, policy: str) -> BadRequest | None:
    """What no scheduler of this configuration could serve."""
    num_bytes = len(message.prompt_token_ids)
    num_prompt_tokens = num_bytes // TOKEN_BYTES
    if num_bytes % TOKEN_BYTES or len(message.output_token_ids) % TOKEN_BYTES:
        return BadRequest("packed token ids must be a multiple of 4 bytes", "prompt")
    if not num_prompt_tokens:
        return BadRequest("the prompt is empty; it needs at least 1 token", "prompt")
    if num_prompt_tokens >= max_model_len:
        return BadRequest(
            f"the maximum context length is {max_model_len} tokens, and your prompt has"
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


def never_fits(
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    ignore_eos: bool,
    max_model_len: int,
    capacity_tokens: int,
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
    num_needed = min(num_prompt_tokens + max_tokens, max_model_len) - 1
    if ignore_eos and num_needed > capacity_tokens:
        return NeverFits(
            f"the prompt and max_tokens need {num_needed} tokens of KV cache under ignore_eos,"
            f" and the whole cache holds {capacity_tokens}; lower max_tokens or serve with more"
            " blocks",
            capacity_tokens,
        )
    return None


def max_total_tokens(request: Request, *, max_model_len: int, capacity_tokens: int) -> int:
    """The length at which the request ends, by its own wish, the model's, or the pool's."""
    wished = request.num_prompt_tokens + request.sampling.max_tokens
    return min(wished, max_model_len, capacity_tokens + 1)


def queue_full(
    new: list[Request], waiting: WaitingQueue, *, max_requests: int, max_tokens: int
) -> QueueFull | None:
    """Too much waits already. An empty queue takes any one call."""
    if not waiting:
        return None
    if len(waiting) + len(new) > max_requests:
        return QueueFull(
            f"{len(waiting)} requests are waiting, and yours adds {len(new)}, of at most"
            f" {max_requests} together; try again later"
        )
    num_tokens = sum(request.num_tokens for request in new)
    if waiting.num_tokens + num_tokens > max_tokens:
        return QueueFull(
            f"requests with {waiting.num_tokens} tokens are waiting, and yours has {num_tokens},"
            f" of at most {max_tokens} together; try again later"
        )
    return None
