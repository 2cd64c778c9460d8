"""What is wrong with a model directory is told in one sentence that names the culprit."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import ConfigError
from tests.support.models import REFUSED, make_model
from tests.support.thread_group import run_ranks
from worker.errors import WorkerError
from worker.models.checkpoint import Checkpoint
from worker.models.directory import find_model
from worker.models.errors import (
    BrokenModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from worker.models.registry import load_decoder


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of `config.json`; a value of `...` removes the field."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != ...}))


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def split_into_shards(directory: Path) -> list[str]:
    """Replace the one weight file by two and an index; their names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    path.unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return shards


def sentence(error: Exception) -> str:
    message = str(error)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 400
    return message


def loading_fails(directory: Path, kind: type[WorkerError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_decoder(directory, **{"dtype": "float32", **options})
    return sentence(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path / "model")


def test_a_sharded_checkpoint_loads_like_a_single_file(model: Path) -> None:
    whole = load_decoder(model, dtype="float32")
    split_into_shards(model)
    sharded = load_decoder(model, dtype="float32")
    ids_t = torch.arange(10)
    with torch.inference_mode():
        assert torch.equal(whole.embed(ids_t), sharded.embed(ids_t))
        hidden_tE = whole.embed(ids_t)
        assert torch.equal(whole.logits(hidden_tE), sharded.logits(hidden_tE))
    assert whole.spec.weight_bytes == sharded.spec.weight_bytes


def test_missing_shard(model: Path) -> None:
    _, second = split_into_shards(model)
    (model / second).unlink()
    message = loading_fails(model, BrokenModelError)
    assert "lacks 1 of 2 weight files" in message
    assert second in message


def test_index_that_names_a_file_elsewhere(model: Path) -> None:
    split_into_shards(model)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    assert "not a plain file name" in loading_fails(model, BrokenModelError)


def test_index_that_misplaces_a_tensor(model: Path) -> None:
    first, second = split_into_shards(model)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first, second))
    assert f"in {second}, which lacks it" in loading_fails(model, BrokenModelError)


@pytest.mark.parametrize("kept_bytes", [0, 5, 300, 50_000])
def test_truncated_safetensors(model: Path, kept_bytes: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    message = loading_fails(model, BrokenModelError)
    assert f"model.safetensors ({kept_bytes} bytes) is truncated" in message


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has neither" in loading_fails(model, BrokenModelError)


def test_pickle_weights_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = loading_fails(model, UnsupportedModelError)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


@pytest.mark.parametrize(
    "field",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    ],
)
def test_config_without_a_field(model: Path, field: str) -> None:
    edit_config(model, **{field: ...})
    assert f"has no field '{field}'" in loading_fails(model, BrokenModelError)


@pytest.mark.parametrize("value", ["64", 0, -1, 1.5, True, [64]])
def test_config_with_a_field_of_another_kind(model: Path, value: object) -> None:
    edit_config(model, hidden_size=value)
    assert "'hidden_size'" in loading_fails(model, BrokenModelError)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_config_that_is_no_json_object(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in loading_fails(model, BrokenModelError)


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "has no config.json" in loading_fails(model, BrokenModelError)


def test_vocabulary_mismatch(model: Path) -> None:
    edit_config(model, vocab_size=320)
    message = loading_fails(model, BrokenModelError)
    assert "embed_tokens.weight" in message
    assert "[301, 64]" in message
    assert "[320, 64]" in message


def test_vocabulary_mismatch_through_transformers(tmp_path: Path) -> None:
    directory = make_model("olmo2", tmp_path)
    edit_config(directory, vocab_size=320)
    message = loading_fails(directory, BrokenModelError)
    assert "[301, 64]" in message
    assert "[320, 64]" in message


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_missing_tensor(name: str, tmp_path: Path) -> None:
    directory = make_model(name, tmp_path)
    lost = "model.layers.1.self_attn.o_proj.weight"
    edit_weights(directory, lambda tensors: tensors.pop(lost))
    assert lost in loading_fails(directory, BrokenModelError)


def test_eight_bit_weights_are_refused(model: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_weights(model, quantize)
    assert "float8_e4m3fn" in loading_fails(model, UnsupportedModelError)


def test_quantized_models_are_refused(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized" in loading_fails(model, UnsupportedModelError)


@pytest.mark.parametrize("dtype", ["float64", "int8", "bf16", ""])
def test_dtype_that_does_not_exist_here(model: Path, dtype: str) -> None:
    assert f"{dtype!r}" in loading_fails(model, UnsupportedModelError, dtype=dtype)


def test_device_that_does_not_multiply(model: Path) -> None:
    message = loading_fails(model, UnsupportedModelError, device="cuda:63")
    assert "dtype 'float32' does not work on cuda:63" in message


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_that_cannot_be_paged(name: str, tmp_path: Path) -> None:
    loading_fails(make_model(name, tmp_path), UnsupportedModelError)


def test_architecture_that_nobody_knows(model: Path) -> None:
    edit_config(model, architectures=["MadeUpForCausalLM"], model_type="made_up")
    assert "knows no decoder MadeUpForCausalLM" in loading_fails(model, UnsupportedModelError)


def test_model_that_brings_its_own_code(model: Path) -> None:
    edit_config(
        model,
        architectures=["MadeUpForCausalLM"],
        model_type="made_up",
        auto_map={"AutoConfig": "configuration.MadeUp", "AutoModelForCausalLM": "modeling.MadeUp"},
    )
    (model / "configuration.py").write_text("raise SystemExit('ran foreign code')")
    loading_fails(model, UnsupportedModelError)


def test_ranks_that_do_not_divide_the_model(model: Path) -> None:
    with pytest.raises(ConfigError, match="set it to 1, 2 or 4"):
        run_ranks(3, lambda comm: load_decoder(model, comm=comm))
    with pytest.raises(ConfigError, match="3 layers"):
        load_decoder(model, num_stages=4)


def test_transformers_code_is_not_split(tmp_path: Path) -> None:
    directory = make_model("gemma2", tmp_path)
    message = loading_fails(directory, UnsupportedModelError, num_stages=2)
    assert "set tensor_parallel_size and pipeline_parallel_size to 1" in message


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "a/b/c", ""])
def test_name_that_is_no_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(name)
    sentence(caught.value)


def test_hub_without_network(tmp_path: Path) -> None:
    """In a process of its own, because the hub's address is read when its library is imported."""
    program = (
        "from worker.models.directory import find_model\n"
        "from worker.models.errors import ModelNotFoundError\n"
        "try: find_model('nobody/nothing')\n"
        "except ModelNotFoundError as error: print(error)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the hub cannot be reached and no copy is cached" in finished.stdout


def test_a_digest_tells_models_apart(model: Path, tmp_path: Path) -> None:
    same = make_model("llama", tmp_path / "same")
    other = make_model("qwen2", tmp_path / "other")
    digests = [load_decoder(path).spec.digest for path in (model, same, other)]
    assert digests[0] == digests[1] != digests[2]
    edit_weights(same, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert load_decoder(same).spec.digest != digests[0]


def test_a_checkpoint_keeps_two_files_mapped(model: Path) -> None:
    split_into_shards(model)
    with Checkpoint(model) as checkpoint:
        assert [path.name[:11] for path in checkpoint.files] == ["model-00001", "model-00002"]
        assert "model.norm.weight" in checkpoint
