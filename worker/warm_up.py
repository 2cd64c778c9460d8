"""What the first request would wait for otherwise: kernels are compiled."""

from collections.abc import Iterator

from scheduler.messages import (
    Close,
    CloseReason,
    Extend,
    Open,
    SamplingParams,
    SeqRef,
    SeqWork,
    StepPlan,
    pack_token_ids,
)
from worker.kv_cache import CacheSize

_NUM_PROMPT_TOKENS = 32
_SEQ = SeqRef("warm-up", 0)
_SAMPLING = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, seed=0)


def warm_up_plans(epoch: int, size: CacheSize, *, num_stages: int) -> Iterator[StepPlan]:
    """One request of two tokens, for an executor that has done nothing: its prompt, its second
    token, its end. None of it in a pool that is too small."""
    num_tokens = min(_NUM_PROMPT_TOKENS, (size.num_blocks - 1) * size.block_size - 1)
    if num_tokens < 1:
        return
    num_blocks = -(-(num_tokens + 1) // size.block_size)
    opened = Open(
        _SEQ,
        pack_token_ids([0] * num_tokens),
        num_prompt_tokens=num_tokens,
        block_ids=tuple(range(1, num_blocks + 1)),
        num_computed=0,
        sampling=_SAMPLING,
    )
    yield StepPlan(epoch, 0, (opened,), (SeqWork(_SEQ, 0, num_tokens, sample=True),))
    # With several stages the scheduler tells what was sampled.
    told = (Extend(_SEQ, (0,), ()),) if num_stages > 1 else ()
    yield StepPlan(epoch, 1, told, (SeqWork(_SEQ, num_tokens, 1, sample=True),))
    yield StepPlan(epoch, 2, (Close(_SEQ, CloseReason.FINISHED),), ())
