"""`palimpsest status` and `palimpsest stop`, as a person calls them."""

import asyncio
import json
import subprocess
import sys

import pytest

from cluster.errors import CommandError
from cluster.serve_command import serve
from cluster.supervisor import existing_supervisors
from scheduler.messages import SamplingParams
from tests.support.commands import COMMAND, palimpsest
from tests.support.engines import client_of, fake_spec, generate, request_of


def test_status_and_stop(app: str) -> None:
    async def run() -> None:
        async with client_of(app, fake_spec("cache.num_blocks=20")) as client:
            request = request_of(client, "r", [1, 2, 3], SamplingParams(40, seed=1))
            await generate(client, request)
            asked = await asyncio.to_thread(palimpsest, "status", "--json")
            told = await asyncio.to_thread(palimpsest, "status")
        (found,) = json.loads(asked.stdout)
        assert found["app"] == app
        assert found["model"] == "fake"
        assert found["engine"]["state"] == "ready"
        assert found["engine"]["num_blocks"] == 20
        assert len(found["places"]) == 1
        assert found["shape"] == {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        counters = found["counters"]
        assert counters["finished"] == {"length": 1}
        assert (counters["held_blocks"], counters["evictable_blocks"]) == (0, 2)
        assert counters["scheduled_prompt_tokens"] == 3
        assert found["timings"]["execute"]["median_ms"] > 0
        for words in (
            f"{app} (fake) is ready",
            "TP 1 x PP 1",
            "worker 0",
            "supervisor",
            "2 evictable, 17 scratch, of 19",
        ):
            assert words in told.stdout

    asyncio.run(run())
    unknown = palimpsest("stop", "--name", "unknown")
    assert unknown.returncode == 2
    assert "No application unknown runs" in unknown.stderr
    stopped = palimpsest("stop", "--name", app)
    assert stopped.returncode == 0, stopped.stderr
    assert f"Ended: {app}." in stopped.stdout
    assert app not in existing_supervisors()


def test_without_a_cluster_the_sentence_says_what_to_do() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", COMMAND, "status", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert asked.returncode == 2
    assert "There is no Ray cluster to join at 127.0.0.1:1" in asked.stderr
    assert "Traceback" not in asked.stderr


@pytest.mark.parametrize("prefix", ["foo", "/foo/", "/a{b}", ""])
def test_a_route_prefix_that_is_none_is_refused_before_anything_starts(prefix: str) -> None:
    with pytest.raises(CommandError, match="must begin with a slash"):
        serve(route_prefix=prefix)
