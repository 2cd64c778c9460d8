"""The default model over HTTP, in float32: pools that are far too small, and every way to spread it
over processes, change no text."""

import pytest

from tests.support.asking import Answered, ask_all
from tests.support.http_jobs import jobs, the_other_way
from tests.support.serving import deployed
from worker.pull import pull

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NUM_CLIENTS = 32
SETTINGS = ("model.model=smollm2-135m", "model.dtype=float32")
TIGHT = "cache.num_blocks=41"
ANSWER_SECONDS = 300.0
WORK = jobs(NUM_CLIENTS, seed=5)


@pytest.fixture(scope="module")
def expected(port: int) -> list[tuple[object, ...]]:
    """From one worker with room for all."""
    pull("smollm2-135m")
    with deployed("large", port, *SETTINGS, "cache.num_blocks=2000") as app:
        answers = ask_all(app.url, WORK, timeout_seconds=ANSWER_SECONDS)
    assert not any(answer.preemption for answer in answers)
    return [answer.content for answer in answers]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 2), (1, 3)])
def test_a_squeezed_pool_changes_no_text(
    port: int, expected: list[tuple[object, ...]], tp: int, pp: int
) -> None:
    sizes = (f"parallel.tensor_parallel_size={tp}", f"parallel.pipeline_parallel_size={pp}")
    with deployed("squeezed", port, *SETTINGS, TIGHT, *sizes) as app:
        for work in (WORK, the_other_way(WORK)):
            answers = ask_all(app.url, work, timeout_seconds=ANSWER_SECONDS)
            assert [answer.content for answer in answers] == expected
            assert num_interrupted(answers) > NUM_CLIENTS // 4
        app.wait_idle()
        assert len(app.worker_pids()) == tp * pp


def num_interrupted(answers: list[Answered]) -> int:
    return sum(1 for answer in answers if answer.preemption)
