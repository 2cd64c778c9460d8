"""What clients see over HTTP between the loss of a worker group and the next one."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from cluster.http_settings import HttpSettings
from tests.support.asking import COMPLETIONS, body_of, whole
from tests.support.events import Stream
from tests.support.http_server import http_server

NUM_COMMENTS = 3
TEXT = " ".join(f"word{number}" for number in range(40))
REASON = "worker 1 is lost: its process died"


def test_a_stream_stands_still_with_comments_and_goes_on() -> None:
    settings = HttpSettings(keep_alive_seconds=0.05)
    with (
        http_server(settings=settings, step_seconds=0.01) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        ThreadPoolExecutor() as others,
    ):
        body = body_of(COMPLETIONS, TEXT)
        expected = whole(client, COMPLETIONS, body)
        told = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", COMPLETIONS, json=told) as answer:
            lines = answer.iter_lines()
            read = [next(lines)]
            server.run(lambda: server.engine.lose_group(REASON))
            while client.get("/ready").status_code == 200:
                time.sleep(0.005)
            said = {"status": "recovering", "reason": REASON}
            assert client.get("/ready").json() == said
            health = client.get("/health")
            assert (health.status_code, health.json()) == (200, said)
            waiting = others.submit(client.post, COMPLETIONS, json=body)
            while sum(line.startswith(":") for line in read) < NUM_COMMENTS:
                read.append(next(lines))
            assert not waiting.done()
            server.run(server.engine.next_group)
            stream = Stream().read([*read, *lines])
        assert stream.usage is not None
        assert stream.usage.pop("preemption")["causes"] == {"worker_lost": 1}
        stream.assert_same_as(expected)
        assert waiting.result().json()["choices"] == expected["choices"]
        assert client.get("/ready").status_code == 200
        server.wait_idle()
