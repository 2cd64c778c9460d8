"""The server as a whole: real HTTP, Ray Serve, a scheduler and workers with a small real model.

Two applications over the same model share the cluster: one has room for everybody, in the other
requests preempt each other all the time.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from tests.support.asking import CHAT, COMPLETIONS, ask, ask_all, with_client
from tests.support.engines import counted_between
from tests.support.events import Stream
from tests.support.faulty_rank import FAILING_SEED, LOADER, slowed
from tests.support.http_jobs import OPENINGS, jobs, the_other_way
from tests.support.serving import App, deployed, session_logs

# Starting two engines may take longer than any of the tests.
pytestmark = pytest.mark.timeout(func_only=True)

NUM_CLIENTS = 32
TIGHT_BLOCKS = 41
CANARY, API_KEY = "canary-7f3e91", "key-b81c44"


@pytest.fixture(scope="module")
def tight(port: int, model: Path) -> Iterator[App]:
    overrides = (f"model.model={model}", f"cache.num_blocks={TIGHT_BLOCKS}")
    with deployed("tight", port, *overrides) as app:
        yield app


@pytest.fixture
def apps(roomy: App, tight: App) -> Iterator[tuple[App, App]]:
    """Both, which must be idle again at the end of the test."""
    yield roomy, tight
    roomy.wait_idle()
    tight.wait_idle()


def test_clients_get_the_same_text_from_a_pool_that_is_far_too_small(
    apps: tuple[App, App],
) -> None:
    """CASES 1, 3 and 7; and what is streamed by one pool is not by the other."""
    roomy, tight = apps
    work = jobs(NUM_CLIENTS, seed=1)
    undisturbed = ask_all(roomy.url, work)
    squeezed = ask_all(tight.url, the_other_way(work))
    assert [answer.content for answer in squeezed] == [a.content for a in undisturbed]
    assert not any(answer.preemption for answer in undisturbed)
    preemptions = [answer.preemption for answer in squeezed if answer.preemption]
    assert len(preemptions) > NUM_CLIENTS // 4
    for preemption in preemptions:
        assert preemption["count"] == sum(preemption["causes"].values())
        assert set(preemption["causes"]) == {"blocks"}
    counted = sum(preemption["count"] for preemption in preemptions)
    assert tight.counters().preemptions["blocks"] >= counted


def test_the_official_client(apps: tuple[App, App]) -> None:
    roomy, _ = apps
    with OpenAI(base_url=f"{roomy.url}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
        assert client.models.retrieve(name).id == name
        whole = client.completions.create(
            model=name, prompt=OPENINGS[0], max_tokens=40, temperature=0
        )
        chunks = client.completions.create(
            model=name, prompt=OPENINGS[0], max_tokens=40, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert len(whole.choices[0].text) > 20
        assert whole._request_id


def test_what_outgrows_the_whole_pool(apps: tuple[App, App]) -> None:
    """CASES 5: it is cut to the pool, or refused where it may not end early."""
    _, tight = apps
    capacity_tokens = (TIGHT_BLOCKS - 1) * 16
    body = {"prompt": OPENINGS[0], "max_tokens": 1500, "temperature": 0, "logit_bias": {"2": -100}}
    with httpx.Client(base_url=tight.url, timeout=60) as client:
        answer = client.post(COMPLETIONS, json=body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == capacity_tokens + 1
        refused = client.post(COMPLETIONS, json={**body, "ignore_eos": True})
        assert refused.status_code == 400
        assert f"the whole cache holds {capacity_tokens}" in refused.json()["error"]["message"]
        assert client.post(COMPLETIONS, json={**body, "max_tokens": 5}).status_code == 200


async def open_at(app: App, num_requests: int) -> None:
    """Returns when the engine has so many."""
    while (await asyncio.to_thread(app.counters)).open_requests < num_requests:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(apps: tuple[App, App], stream: bool) -> None:
    _, tight = apps
    body = {"prompt": OPENINGS[1], "max_tokens": 600, "ignore_eos": True, "stream": stream}

    async def leave(client: httpx.AsyncClient) -> None:
        asking = [asyncio.create_task(ask(client, COMPLETIONS, body)) for _ in range(6)]
        await open_at(tight, 6)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    with_client(tight.url, leave)
    tight.wait_idle()


def test_every_request_is_counted_once(apps: tuple[App, App]) -> None:
    """CASES 29: ten that end, and ten whose clients leave while they run or wait."""
    _, tight = apps
    before = tight.counters().finished
    body = {"prompt": OPENINGS[2], "temperature": 0, "ignore_eos": True}

    async def run(client: httpx.AsyncClient) -> None:
        leaving = [
            asyncio.create_task(ask(client, COMPLETIONS, {**body, "max_tokens": 600}))
            for _ in range(10)
        ]
        await open_at(tight, 10)
        for task in leaving:
            task.cancel()
        staying = [ask(client, COMPLETIONS, {**body, "max_tokens": 20}) for _ in range(10)]
        await asyncio.gather(*staying)
        await asyncio.gather(*leaving, return_exceptions=True)

    with_client(tight.url, run)
    tight.wait_idle()
    counters = tight.counters()
    finished = {
        reason: count - before.get(reason, 0) for reason, count in counters.finished.items()
    }
    assert {reason: count for reason, count in finished.items() if count} == {
        "length": 10,
        "abort": 10,
    }


def test_two_applications_do_not_disturb_each_other(apps: tuple[App, App]) -> None:
    """The same requests, alone and beside a busy neighbour: equal texts and equal counters."""
    roomy, tight = apps
    work = [
        (COMPLETIONS, {"prompt": f"{text} {OPENINGS[number]}", "max_tokens": 25, "temperature": 0})
        for number, text in enumerate(("It was late.", "It was warm.", "It was fun."))
    ]

    def run_one_by_one() -> tuple[list[tuple[object, ...]], dict[str, Any]]:
        before = roomy.counters()
        answers = [ask_all(roomy.url, [job])[0].content for job in work]
        roomy.wait_idle()
        return answers, counted_between(before, roomy.counters())

    run_one_by_one()  # from now on all of these prompts are cached
    alone = run_one_by_one()
    assert alone[1]["hits_tokens"] > 0
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(ask_all, tight.url, jobs(NUM_CLIENTS // 2, seed=2))
        assert run_one_by_one() == alone
        neighbour.result()


def test_a_redeploy_cuts_no_stream(roomy: App, model: Path) -> None:
    """Streams that began before it and end after it, while the next replica answers already."""
    body = {"prompt": OPENINGS[3], "temperature": 0, "ignore_eos": True, "max_tokens": 1200}
    expected = ask_all(roomy.url, [(COMPLETIONS, body)])[0].content
    with ThreadPoolExecutor(2) as pool:
        with slowed(model):
            streams = pool.submit(ask_all, roomy.url, [(COMPLETIONS, {**body, "stream": True})] * 3)
            while roomy.counters().open_requests < 3:
                time.sleep(0.05)
            # Serve calls it done when the old replica is gone, which waits for its streams.
            redeploying = pool.submit(roomy.redeploy, server={"max_queue_seconds": 555.0})
            while roomy.replica_states() != {"RUNNING": 1, "STOPPING": 1}:
                assert not redeploying.done()
                time.sleep(0.05)
            answers = ask_all(roomy.url, [(COMPLETIONS, {**body, "max_tokens": 5})])
            assert answers[0].usage["completion_tokens"] == 5
            assert not streams.done()
        assert [answer.content for answer in streams.result()] == [expected] * 3
        redeploying.result()
    roomy.wait_idle()


@pytest.mark.full
def test_a_redeploy_with_another_engine_cuts_no_stream(port: int, model: Path) -> None:
    """The old engine finishes what it has; then the new one takes over."""
    with deployed("replaced", port, f"model.model={model}", "cache.num_blocks=500") as app:
        body = {"prompt": OPENINGS[3], "temperature": 0, "ignore_eos": True}
        work = [(COMPLETIONS, {**body, "stream": True, "max_tokens": 400})] * 8
        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(ask_all, app.url, work)
            while app.counters().held_blocks == 0:
                time.sleep(0.05)
            (old_worker,) = app.worker_pids()
            app.redeploy(cache={"num_blocks": 600})
            answers = streams.result()
        assert {answer.usage["completion_tokens"] for answer in answers} == {400}
        assert len({answer.texts[0] for answer in answers}) == 1
        app.wait_ready()
        (answer,) = ask_all(app.url, [(COMPLETIONS, {**body, "max_tokens": 5})])
        assert answer.usage["completion_tokens"] == 5
        assert app.status().info.num_blocks == 600
        assert app.worker_pids() != [old_worker]


def test_what_clients_send_and_get_is_in_no_log(port: int, model: Path) -> None:
    """Through success, mistakes, a failure, a client that leaves, preemption, and the deaths of a
    worker and of the scheduler."""
    overrides = (f"model.model={model}", "cache.num_blocks=13", "cache.block_size=8")
    headers = {"authorization": f"Bearer {API_KEY}"}
    with deployed(
        "canary", port, *overrides, environ={"PALIMPSEST_API_KEYS": API_KEY}, loader=LOADER
    ) as app:
        body = {
            "prompt": CANARY,
            "temperature": 0,
            "max_tokens": 60,
            "cache_salt": f"salt-{CANARY}",
        }
        (answer,) = ask_all(app.url, [(COMPLETIONS, body)], headers=headers)
        said = answer.texts[0].strip()[:30]
        work = [(COMPLETIONS, {**body, "stream": True})] * 4
        squeezed = ask_all(app.url, work, headers=headers)
        assert any(answer.preemption for answer in squeezed)
        with httpx.Client(base_url=app.url, timeout=30, headers=headers) as client:

            def status_of(path: str, **fields: Any) -> int:
                return client.post(path, json=fields).status_code

            assert status_of(COMPLETIONS, **body | {"temperature": 9}) == 400
            assert status_of(COMPLETIONS, **body | {"prompt": CANARY * 900}) == 400
            assert status_of(CHAT, messages=[{"role": CANARY}]) == 400
            assert status_of(COMPLETIONS, **body | {"seed": FAILING_SEED}) == 500
            unknown = {"authorization": f"Bearer {CANARY}"}
            assert client.post(COMPLETIONS, json=body, headers=unknown).status_code == 401
            endless = {**body, "ignore_eos": True, "max_tokens": 80, "n": 8}
            with pytest.raises(httpx.ReadTimeout):
                client.post(COMPLETIONS, json=endless, timeout=0.2)
            with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                for pid in (*app.worker_pids(), app.scheduler_pid()):
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.5)
                assert Stream().read(["", *lines]).finishes
    logs = {path: path.read_bytes() for path in session_logs()}
    for told_by in (b"KV cache: 13 blocks", b"engine is ready"):
        assert any(told_by in content for content in logs.values()), "logs are elsewhere"
    token_ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(CANARY).ids
    as_list = ", ".join(str(token_id) for token_id in token_ids[-4:])
    for secret in (CANARY, API_KEY, said, as_list):
        for path, content in logs.items():
            assert secret.encode() not in content, f"{secret!r} is in {path.name}"
