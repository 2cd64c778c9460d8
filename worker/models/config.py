"""The settings of the native decoder, read from a Hugging Face `config.json`. No torch.

Llama, Mistral, Qwen2, Qwen3, SmolLM3 and what is built like them differ in a handful of
settings; each architecture is one function from the file's fields to these settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from typing import Any

from worker.models.errors import BrokenModelError, UnsupportedModelError
from worker.models.fields import Fields


class NotNativeError(UnsupportedModelError):
    """The native decoder lacks this; the message says what. transformers may have it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; lengths in tokens. Absent values are unused by `kind`."""

    kind: str
    """default, linear, llama3 or yarn."""
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Scales both cosine and sine."""
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One Llama-like decoder as a whole, before it is split over ranks."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer; see `ModelSpec.windows`."""
    rotated: tuple[bool, ...]
    """Per layer: whether positions are rotated into q and k at all."""
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head of q and k, before the rotation."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Where an architecture departs from Llama."""

    qkv_bias: Callable[[Fields], bool] = lambda fields: fields.flag("attention_bias", False)
    output_bias: Callable[[Fields], bool] = lambda fields: fields.flag("attention_bias", False)
    mlp_bias: Callable[[Fields], bool] = lambda fields: fields.flag("mlp_bias", False)
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda _, layers: (None,) * layers
    rotated: Callable[[Fields, int], tuple[bool, ...]] = lambda _, layers: (True,) * layers
    qk_norm: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    """What transformers assumes where `config.json` is silent and Llama's value differs."""


def _mistral_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """All layers alike; a file without the field means 4096, an explicit null means none."""
    if "sliding_window" in fields and fields.get("sliding_window") is None:
        return (None,) * num_layers
    return (fields.positive("sliding_window", 4096),) * num_layers


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.positive("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28)
    return _typed_windows(fields, num_layers, window) or tuple(
        window if layer >= first else None for layer in range(num_layers)
    )


def _smollm3_rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` holds 1 where a layer does rotate."""
    marks = fields.integers("no_rope_layers")
    if marks:
        return tuple(bool(mark) for mark in marks[:num_layers])
    interval = fields.positive("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _smollm3_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False) or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.positive("sliding_window")
    return _typed_windows(fields, num_layers, window) or tuple(
        None if rotated else window for rotated in _smollm3_rotated(fields, num_layers)
    )


def _typed_windows(fields: Fields, num_layers: int, window: int) -> tuple[int | None, ...]:
    """The windows that `layer_types` spells out; empty where the file does not."""
    types = fields.texts("layer_types")
    if types and len(types) != num_layers:
        raise BrokenModelError(
            f"{fields.where} has {len(types)} 'layer_types' for {num_layers} hidden layers."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _always(fields: Fields) -> bool:
    return True


def _never(fields: Fields) -> bool:
    return False


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(
        qkv_bias=_never, output_bias=_never, mlp_bias=_never, windows=_mistral_windows
    ),
    "Qwen2ForCausalLM": _Family(
        qkv_bias=_always, output_bias=_never, mlp_bias=_never, windows=_qwen_windows
    ),
    "Qwen3ForCausalLM": _Family(
        mlp_bias=_never, windows=_qwen_windows, qk_norm=True, defaults={"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": _Family(
        windows=_smollm3_windows,
        rotated=_smollm3_rotated,
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
        },
    ),
}

NATIVE_ARCHITECTURES = tuple(_FAMILIES)


def read_decoder_config(fields: Fields, architecture: str) -> DecoderConfig:
    """The decoder that `fields` describe.

    Raises NotNativeError for what only transformers can run, BrokenModelError for a bad field.
    """
    family = _FAMILIES.get(architecture)
    if family is None:
        raise NotNativeError(f"{architecture} is not one of {', '.join(NATIVE_ARCHITECTURES)}.")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise NotNativeError(f"{fields.where} asks for the activation {activation!r}.")
    num_layers = fields.positive("num_hidden_layers")
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    kv_default = family.defaults.get("num_key_value_heads", num_heads)
    num_kv_heads = fields.positive("num_key_value_heads", kv_default)
    if num_heads % num_kv_heads:
        raise BrokenModelError(
            f"{fields.where} has {num_heads} attention heads, which {num_kv_heads} KV heads "
            f"do not divide."
        )
    head_dim = family.defaults.get("head_dim", hidden_size // num_heads)
    rope, max_position = _read_rope(fields, family.defaults.get("rope_theta", 10_000.0))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.positive("head_dim", head_dim),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        windows=family.windows(fields, num_layers),
        rotated=family.rotated(fields, num_layers),
        tied_embeddings=fields.flag(
            "tie_word_embeddings", family.defaults.get("tie_word_embeddings", False)
        ),
        qkv_bias=family.qkv_bias(fields),
        output_bias=family.output_bias(fields),
        mlp_bias=family.mlp_bias(fields),
        qk_norm=family.qk_norm,
    )


def _read_rope(fields: Fields, default_theta: float) -> tuple[RopeConfig, int]:
    """The rotation and the number of positions it is good for.

    Two spellings exist: everything in `rope_parameters`, or `rope_theta` beside an optional
    `rope_scaling`. The length-dependent kinds change with the longest sequence of a batch,
    so they are used within the trained length only, where they are the unscaled rotation.
    """
    max_position = fields.positive("max_position_embeddings")
    scaling = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    theta = fields.number("rope_theta", default_theta)
    if scaling is None:
        return RopeConfig("default", theta), max_position
    theta = scaling.number("rope_theta", theta)
    if scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1:
        raise NotNativeError(f"{fields.where} rotates only a part of each head.")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    match kind:
        case "default":
            return RopeConfig(kind, theta), max_position
        case "dynamic":
            trained = scaling.positive("original_max_position_embeddings", max_position)
            return RopeConfig("default", theta), trained
        case "linear":
            return RopeConfig(kind, theta, factor=scaling.number("factor")), max_position
        case "llama3":
            return (
                RopeConfig(
                    kind,
                    theta,
                    factor=scaling.number("factor"),
                    original_max_position=scaling.positive("original_max_position_embeddings"),
                    low_freq_factor=scaling.number("low_freq_factor"),
                    high_freq_factor=scaling.number("high_freq_factor"),
                ),
                max_position,
            )
        case "yarn":
            return _read_yarn(scaling, theta, max_position), max_position
    raise NotNativeError(f"{fields.where} asks for the rotary embedding {kind!r}.")


def _read_yarn(scaling: Fields, theta: float, max_position: int) -> RopeConfig:
    trained = scaling.positive("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / trained)

    def temperature(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0

    mscale = scaling.number("mscale", 0.0)
    mscale_all = scaling.number("mscale_all_dim", 0.0)
    implied = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else None
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position=trained,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        attention_factor=scaling.number("attention_factor", implied or temperature(1.0)),
        truncate=scaling.flag("truncate", True),
    )
