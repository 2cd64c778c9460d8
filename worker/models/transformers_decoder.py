"""Any other decoder: transformers' own modeling code, with attention replaced by ours.

The flat batch goes through the model as one row of t tokens with their own positions and no
cache; its attention layers call the function registered here, which hands q, k and v to the
executor's `Attend`. That is right only if attention is the one place where tokens meet, so a
model is probed once when it is loaded, and refused where it is built otherwise.

Shape letters as in `worker.models.base`; 1 is transformers' batch dimension.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

from worker.models.base import Attend, ModelSpec
from worker.models.checkpoint import Checkpoint, digest
from worker.models.errors import BrokenModelError, UnsupportedModelError
from worker.models.faster_modules import exchange_linears
from worker.models.fields import Fields, read_architecture
from worker.models.probe import NotANumberError, probe
from worker.models.shape import refuse_several_ranks

_log = logging.getLogger(__name__)

_ATTENTION = "palimpsest_paged"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_FOREIGN_PARTS = ("vision_config", "audio_config", "encoder_config")


class _Link:
    """Between a model's attention modules and the `Attend` of the step that is running."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        """Per layer, what the configuration declares; some models mask but do not pass it."""
        self.attend: Attend | None = None


def _paged_attention(
    module: nn.Module,
    query_1HtD: Tensor,
    key_1GtD: Tensor,
    value_1GtD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns the output as [1, t, H, D], and no weights."""
    foreign = [name for name in ("s_aux", "sinks", "position_bias") if others.get(name) is not None]
    if foreign or is_causal is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {foreign[0] if foreign else 'no causal mask'}, "
            f"which paged attention lacks here."
        )
    link, layer = module.palimpsest_link, module.layer_idx
    attended_tHD = link.attend(
        layer,
        query_1HtD[0].transpose(0, 1),
        key_1GtD[0].transpose(0, 1),
        value_1GtD[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window or link.windows[layer],
        softcap=softcap,
    )
    return attended_tHD.unsqueeze(0), None


AttentionInterface.register(_ATTENTION, _paged_attention)


class _Given(nn.Module):
    """Stands in for the base model, so that the head runs by itself on rows that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.output_type: type[ModelOutput] = ModelOutput
        """What the base model returns; the head may look for fields of it."""
        self.hidden_1sE: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return self.output_type(last_hidden_state=self.hidden_1sE)


class TransformersDecoder:
    """A whole model on one rank; implements `worker.models.base.Decoder`."""

    def __init__(self, model: Any, digest_: str, *, exchange: bool) -> None:
        """Takes `model` apart into base and head, and probes it. Raises ModelError.

        With `exchange`, its linear layers take the fastest form for the CPU.
        """
        config = model.config.get_text_config(decoder=True)
        windows = _declared_windows(config)
        dtype, device = model.dtype, model.device
        held_bytes = exchange_linears(model) if exchange else 0
        self._base = getattr(model, model.base_model_prefix)
        self._embedding = self._base.get_input_embeddings()
        self._head = model
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)
        self._link = _Link(windows)
        for module in self.modules():
            if hasattr(module, "layer_idx"):
                module.palimpsest_link = self._link
        shape = probe(self, len(windows), device, type(model).__name__)
        weights = {*self._base.parameters(), *model.parameters(), *self._base.buffers()}
        self._spec = ModelSpec(
            architecture=type(model).__name__,
            dtype=dtype,
            num_layers=len(windows),
            first_layer=0,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_position=_max_position(config),
            windows=shape.windows,
            is_first_stage=True,
            is_last_stage=True,
            weight_bytes=held_bytes + sum(weight.nbytes for weight in weights),
            digest=digest_,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def modules(self) -> Iterator[nn.Module]:
        """All modules of base and head."""
        yield from self._base.modules()
        yield from self._head.modules()

    def embed(self, token_ids_t: Tensor) -> Tensor:
        hidden_tE: Tensor = self._embedding(token_ids_t)
        return hidden_tE

    def layers(self, hidden_tE: Tensor, position_ids_t: Tensor, attend: Attend) -> Tensor:
        """Includes the final norm, which transformers counts to the base model."""
        self._link.attend = attend
        try:
            output = self._base(
                inputs_embeds=hidden_tE.unsqueeze(0),
                position_ids=position_ids_t.long().unsqueeze(0),
                use_cache=False,
            )
        finally:
            self._link.attend = None
        self._given.output_type = type(output)
        return output.last_hidden_state.squeeze(0)

    def logits(self, hidden_sE: Tensor) -> Tensor:
        self._given.hidden_1sE = hidden_sE.unsqueeze(0)
        try:
            logits_1sV: Tensor = self._head(
                inputs_embeds=self._given.hidden_1sE, use_cache=False
            ).logits
        finally:
            self._given.hidden_1sE = None
        return logits_1sV.squeeze(0).float()


def load_with_transformers(
    directory: Path, *, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> TransformersDecoder:
    """Load and probe the model of `directory`. Raises ModelError.

    `num_ranks` counts tensor and pipeline ranks alike; more than one is refused.
    """
    architecture = read_architecture(Fields.read(directory / "config.json"))
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} knows no decoder {architecture}, and code "
            f"that comes with a model is never run."
        )
    _refuse_what_is_no_plain_decoder(directory)
    refuse_several_ranks(architecture, num_ranks)
    with Checkpoint(directory):
        pass  # Its errors say more than those of transformers: missing shards, pickle weights.
    _log.info("%s runs through transformers' own code", architecture)
    if device.type == "cpu":
        try:
            return TransformersDecoder(_load(directory, dtype), digest(directory), exchange=True)
        except (NotANumberError, AttributeError, AssertionError, RuntimeError) as error:
            _log.info("%s needs its linear layers as they are: %s", architecture, error)
    return TransformersDecoder(
        _load(directory, dtype).to(device), digest(directory), exchange=False
    )


def _load(directory: Path, dtype: torch.dtype) -> Any:
    try:
        with _silence():
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # told below, with names and sizes
                output_loading_info=True,
            )
    except (ValueError, RuntimeError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {directory}: {_first_line(error)}."
        ) from error
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise BrokenModelError(
            f"{name} in {directory} has shape {list(stored)}, but config.json implies "
            f"{list(expected)}."
        )
    for name in sorted(info["missing_keys"]):
        raise BrokenModelError(f"The weights in {directory} lack the tensor {name}.")
    return model.eval().requires_grad_(False)


@contextmanager
def _silence() -> Iterator[None]:
    """Without transformers' progress bar and load report; what matters is raised."""
    verbosity, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _refuse_what_is_no_plain_decoder(directory: Path) -> None:
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError) as error:
        raise BrokenModelError(
            f"transformers cannot read the config.json in {directory}: {_first_line(error)}."
        ) from error
    reason = None
    foreign = [name for name in _FOREIGN_PARTS if getattr(config, name, None) is not None]
    if config.is_encoder_decoder:
        reason = "it has an encoder"
    elif foreign:
        reason = f"it takes more than text ({foreign[0]})"
    elif getattr(config, "use_bidirectional_attention", False):
        reason = "its attention is not causal"
    elif getattr(config, "attention_chunk_size", None) is not None:
        reason = "it attends in chunks (attention_chunk_size)"
    if reason:
        raise UnsupportedModelError(
            f"{directory} is no decoder-only language model that can be served: {reason}."
        )


def _declared_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, from `layer_types` where the configuration has them."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {unknown[0]!r}; only full and sliding "
            f"attention can be paged."
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)


def _max_position(config: Any) -> int:
    """Where frequencies change with the longest sequence of a batch, only the trained length.

    Longer contexts would make a request's result depend on its batch mates.
    """
    longest: int = config.max_position_embeddings
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        trained: int = parameters.get("original_max_position_embeddings") or longest
        if trained < longest:
            _log.warning(
                "The %s rotary embedding depends on the longest sequence of a batch; the context "
                "is limited to the %d tokens where it does not",
                parameters["rope_type"],
                trained,
            )
        return min(longest, trained)
    return longest


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
