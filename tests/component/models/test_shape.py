"""Whether ranks can divide a model, told without its weights: what loading it says too."""

from pathlib import Path

import pytest

from configs import ConfigError, ParallelConfig
from tests.support.models import make_model
from worker.errors import WorkerError
from worker.models.base import Solo
from worker.models.registry import load_decoder
from worker.models.shape import check_shape


def refusal_of_loading(model: Path, tp: int, pp: int) -> Exception | None:
    try:
        load_decoder(model, dtype="float32", comm=Solo(size=tp), num_stages=pp)
    except (ConfigError, WorkerError) as error:
        return error
    return None


@pytest.mark.parametrize(
    ("name", "tp", "pp", "fits"),
    [
        ("llama", 1, 1, True),
        ("llama", 2, 2, True),
        ("llama", 7, 1, False),
        ("llama", 1, 99, False),
        ("gpt2", 1, 1, True),
        ("gpt2", 1, 2, False),
    ],
)
def test_it_says_what_loading_says(tmp_path: Path, name: str, tp: int, pp: int, fits: bool) -> None:
    model = make_model(name, tmp_path / "model")
    refusal = refusal_of_loading(model, tp, pp)
    assert (refusal is None) == fits
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    if refusal is None:
        check_shape(model, parallel)
        return
    with pytest.raises(type(refusal)) as caught:
        check_shape(model, parallel)
    assert str(caught.value) == str(refusal)
