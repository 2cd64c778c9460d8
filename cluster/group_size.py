"""From what the ranks of a group say of themselves to what they can do together."""

import logging
from collections.abc import Sequence

from cluster.errors import EngineStartError
from configs import Device, ResolvedConfig, resolve
from scheduler.group import GroupSize, Pipeline
from scheduler.messages import WorkerHello

logger = logging.getLogger(__name__)


def group_size(hellos: Sequence[WorkerHello], config: ResolvedConfig, device: Device) -> GroupSize:
    """What all ranks can do together.

    Raises EngineStartError if they did not load the same model, or if not even one block fits,
    and ConfigError for settings that do not go with the model's context length.
    """
    digests = {hello.model_digest for hello in hellos}
    if len(digests) > 1:
        raise EngineStartError(
            f"the workers loaded {len(digests)} different models under the name "
            f"{config.model.model}: give all machines the same files"
        )
    hello = hellos[0]
    # Whether settings go together can depend on the context length, known only now.
    resolve(config, device, model_context_tokens=hello.max_model_len)
    if hello.num_blocks < 2:
        raise EngineStartError(
            f"the memory granted to each worker holds {hello.num_blocks} KV blocks, and at least 2 "
            f"are needed: raise cache.kv_cache_memory or cache.gpu_memory_utilization"
        )
    capacity_tokens = (hello.num_blocks - 1) * config.cache.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB on worker 0) hold %d tokens: %.2f requests of "
        "the full length of %d at once",
        hello.num_blocks,
        config.cache.block_size,
        hello.num_blocks * hello.block_bytes / 2**30,
        capacity_tokens,
        capacity_tokens / hello.max_model_len,
        hello.max_model_len,
    )
    pipeline = Pipeline(config.parallel.pipeline_parallel_size, config.scheduler.steps_in_flight)
    return GroupSize(len(hellos), hello.num_blocks, hello.max_model_len, hello.vocab_size, pipeline)
