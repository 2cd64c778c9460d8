"""Whether a group of workers can divide a model, told from its `config.json` alone. No torch."""

from pathlib import Path

from configs.ranks import ModelShape, check_divides, world_size
from configs.sections import ParallelConfig
from worker.models.config import DecoderConfig, NotNativeError, read_decoder_config
from worker.models.errors import UnsupportedModelError
from worker.models.fields import Fields, read_architecture


def shape_of(config: DecoderConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        mlp_size=config.intermediate_size,
    )


def check_shape(directory: Path, parallel: ParallelConfig) -> None:
    """Raises ConfigError, naming the sizes that would work, or ModelError, if the model cannot be
    divided."""
    fields = Fields.read(directory / "config.json")
    architecture = read_architecture(fields)
    try:
        config = read_decoder_config(fields, architecture)
    except NotNativeError:
        refuse_several_ranks(architecture, world_size(parallel))
    else:
        check_divides(parallel, shape_of(config))


def refuse_several_ranks(architecture: str, num_ranks: int) -> None:
    """Raises UnsupportedModelError for more than one rank, tensor and pipeline ranks alike."""
    if num_ranks > 1:
        raise UnsupportedModelError(
            f"{architecture} runs through transformers' own code, which is not split over ranks; "
            f"set tensor_parallel_size and pipeline_parallel_size to 1."
        )
