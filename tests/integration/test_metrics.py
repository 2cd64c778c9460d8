"""One set of metrics from several ingress replicas, behind Serve's own load balancing."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.asking import ask_all
from tests.support.faults import replica_pids
from tests.support.metrics import Scrape, scrape
from tests.support.serving import App, deployed

NUM_SCRAPES = 50
NAME = "stories"


@pytest.fixture(scope="module")
def app(port: int, model: Path) -> Iterator[App]:
    overrides = (
        f"model.model={model}",
        f"model.served_model_name={NAME}",
        "cache.num_blocks=61",
        "server.num_replicas=2",
    )
    with deployed("two", port, *overrides) as app:
        yield app


@pytest.mark.full
def test_no_counter_falls_whichever_replica_is_asked(app: App) -> None:
    pids = replica_pids(app)
    assert len(pids) == 2
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    work = [("/v1/completions", {**body, "seed": number}) for number in range(48)]

    def scrape_often() -> list[Scrape]:
        return [scrape(app.url, NAME) for _ in range(NUM_SCRAPES // 2)]

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, app.url, work)
        scrapes = scrape_often()
        usages = [answer.usage for answer in answers.result()]
    # What another replica has counted may take half a second to be in the sum.
    time.sleep(1)
    scrapes += scrape_often()
    for before, after in pairwise(scrapes):
        assert not after.fallen_since(before)
    last = scrapes[-1]
    assert last.by_label("requests_total")["length"] == len(work)
    told = sum(usage["completion_tokens"] for usage in usages)
    assert last.value("generation_tokens_total") == told == 48 * 60
    assert last.value("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert last.by_label("preemptions_total")["blocks"] > 0
    assert last.value("requests_running") == 0

    os.kill(pids[0], signal.SIGKILL)
    while len(now := replica_pids(app)) < 2 or pids[0] in now:
        time.sleep(0.1)
    after_death = scrape(app.url, NAME)
    assert not after_death.fallen_since(last)
    assert after_death.value("generation_tokens_total") == told
