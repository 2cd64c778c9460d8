"""A small real model: as a directory that can be served, and as a worker in this process."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.sampling import SamplingDefaults
from cluster.text import TextCodec
from configs import CacheConfig, Config, resolve
from tests.support.http_server import HttpServer, ServedModel, http_server
from tests.support.tokenizers import byte_level
from worker.rank import Rank

# Plain, and of few tokens: the small model knows no chats.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def ready_to_serve(model: Path, folder: Path) -> Path:
    """A copy of a model directory, with a template for conversations, and with a tokenizer if it
    is a stand-in that has none."""
    copy = Path(shutil.copytree(model, folder / "model"))
    for path in copy.iterdir():
        path.chmod(0o644)
    if not (copy / "tokenizer.json").exists():
        byte_level().save(str(copy / "tokenizer.json"))
    (copy / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return copy


@contextmanager
def model_server(
    directory: Path, config: Config | None = None, **options: Any
) -> Iterator[HttpServer]:
    """An HTTP server over one rank of the model in `directory`, all in this process.

    `config` must name `cache.num_blocks`; `options` go to `http_server`.
    """
    config = config or Config(cache=CacheConfig(num_blocks=1000))
    rank = Rank(resolve(config, "cpu"), 0)
    rank.load(directory)
    report = rank.join(0, None)
    model = ServedModel(
        worker=rank,
        tokenizer=Tokenizer.from_file(str(directory / "tokenizer.json")),
        make_codec=lambda executor: TextCodec.load(directory, executor),
        vocab_size=report.vocab_size,
        defaults=SamplingDefaults.read(directory),
    )
    options |= {"num_blocks": report.num_blocks, "max_model_len": report.max_model_len}
    try:
        with http_server(config, model, **options) as server:
            yield server
    finally:
        rank.leave()
