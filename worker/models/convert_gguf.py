"""Turn a GGUF file into a directory of safetensors, tokenizer and chat template.

A program of its own, so that whoever asks for a conversion needs neither torch in its process
nor the memory of the whole model: `python -m worker.models.convert_gguf FILE DIRECTORY DTYPE`.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, directory: Path, dtype: str) -> None:
    """Write the dequantized model of `gguf` to `directory`, which is made."""
    decoder = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    decoder.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
