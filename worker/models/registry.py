"""From a model directory to one shard of a running decoder."""

from pathlib import Path

import torch

from worker.models.base import Communicator, Decoder, Solo
from worker.models.checkpoint import Checkpoint
from worker.models.config import NotNativeError, read_decoder_config
from worker.models.errors import UnsupportedModelError
from worker.models.fields import Fields, read_architecture
from worker.models.llama_weights import load_llama

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def load_decoder(
    directory: Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    comm: Communicator | None = None,
    stage: int = 0,
    num_stages: int = 1,
) -> Decoder:
    """The shard of tensor rank `comm.rank` (None: a group of one) in pipeline stage `stage`.

    `dtype` "auto" takes what `config.json` names, else float32. Raises ModelError.
    """
    fields = Fields.read(directory / "config.json")
    architecture = read_architecture(fields)
    if fields.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{directory} holds quantized weights; only float32, bfloat16 and float16 are read."
        )
    target = torch.device(device)
    resolved = resolve_dtype(fields, dtype, target)
    try:
        config = read_decoder_config(fields, architecture)
    except NotNativeError:
        from worker.models.transformers_decoder import load_with_transformers

        num_ranks = num_stages * (comm.size if comm else 1)
        return load_with_transformers(directory, dtype=resolved, device=target, num_ranks=num_ranks)
    with Checkpoint(directory) as checkpoint:
        return load_llama(
            checkpoint,
            config,
            dtype=resolved,
            device=target,
            comm=comm or Solo(),
            stage=stage,
            num_stages=num_stages,
        )


def resolve_dtype(fields: Fields, dtype: str, device: torch.device) -> torch.dtype:
    """The dtype to run in; raises UnsupportedModelError where the device cannot multiply in it."""
    name = dtype
    if dtype == "auto":
        name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    resolved = _DTYPES.get(name)
    if resolved is None:
        raise UnsupportedModelError(
            f"dtype {name!r} cannot be run; use one of {', '.join(_DTYPES)}."
        )
    try:
        square = torch.ones(2, 2, dtype=resolved, device=device)
        square @ square
    except (RuntimeError, AssertionError) as error:  # the latter where torch lacks the device
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UnsupportedModelError(
            f"dtype {name!r} does not work on {device} ({reason}); use another dtype or device."
        ) from error
    return resolved
