"""Small random models of many architectures, written as Hugging Face directories."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 301
MAX_POSITION = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for the layers to matter beside the residual stream.
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
_MIXED_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

# Each is the name of a configuration class in transformers and what it adds to the sizes above.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-rope-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-rope-yarn": ("LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "llama-rope-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-biases-tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "mistral-window-one-layer": ("MistralConfig", {"sliding_window": 7, "num_hidden_layers": 1}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "num_key_value_heads": 1}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
}
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": _MIXED_WINDOWS}),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    ),
    "gpt-neox": ("GPTNeoXConfig", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {}),
    "mamba": ("MambaConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 2, "layer_types": None}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
MODELS = NATIVE | THROUGH_TRANSFORMERS | REFUSED


def make_model(name: str, directory: Path) -> Path:
    """Write the seeded random model `name` in float32 to `directory`, and return that."""
    class_name, additions = MODELS[name]
    return _save(getattr(transformers, class_name)(**{**_SIZES, **additions}), directory)


def make_stories_stand_in(directory: Path) -> Path:
    """A random model with the shape of stories260K."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return _save(config, directory)


def make_smollm2_stand_in(directory: Path) -> Path:
    """A small random model whose heads, MLP and layers divide as those of SmolLM2-135M do: by 3
    over tensor-parallel ranks, by 2, 3 and 6 over pipeline stages."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=72,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return _save(config, directory)


def _save(config: Any, directory: Path) -> Path:
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases of 0 and norms of 1 would hide a mistake
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
    return directory


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without the progress bars and the advice on configurations made up for tests."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
