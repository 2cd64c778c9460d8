"""Pipeline stages on three nodes: the network is the only way between them, and nodes die."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import HOSTS
from tests.support.references import stories_directory


@pytest.fixture(scope="module")
def said(test_data_dir: Path | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine of one worker and one over three nodes said, over HTTP."""
    model = stories_directory(test_data_dir, tmp_path_factory.mktemp("nodes"))
    return told_by("several_nodes", str(model))


def told_by(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module of `tests.support` prints in a process of its own."""
    command = [sys.executable, "-m", f"tests.support.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.full
@pytest.mark.timeout(300)
def test_three_nodes_say_what_one_worker_says(said: dict[str, Any]) -> None:
    alone, three = said["alone"], said["three"]
    assert three["contents"] == alone["contents"]
    assert len(three["contents"]) == 8
    assert three["preemptions"] > 0
    assert three["held_blocks"] == 0

    scheduler, *ranks = three["hosts"]
    assert sorted(ranks) == sorted(HOSTS)
    assert len(set(three["node_ids"][1:])) == len(HOSTS)
    # Nothing between them but TCP: the scheduler listens for plans, and rank 0 so that ranks find
    # each other, each on its own address alone.
    assert three["local_sockets"] == 0
    assert three["listening"] == sorted({scheduler, ranks[0]})
    if len(set(alone["hosts"])) == 1:
        assert alone["local_sockets"] > 0
        assert alone["listening"] == []
    assert said["left"] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how",
    [
        "join",
        pytest.param("spare", marks=pytest.mark.full),
        pytest.param("fewer", marks=pytest.mark.full),
    ],
)
def test_a_node_dies_under_streams(how: str, test_data_dir: Path | None, tmp_path: Path) -> None:
    """No request fails and no text changes: the module that runs here compares them."""
    model = stories_directory(test_data_dir, tmp_path / "stories")
    seen = told_by("lost_nodes", str(model), how)
    assert set(seen["causes"]) == {"worker_lost"}
    assert seen["held_blocks"] == 0
    assert seen["left"] == []
    stay = [host for host in seen["hosts_before"] if host != seen["victim"]]
    if how == "fewer":
        assert sorted(seen["hosts_after"]) == sorted(stay)
    else:
        rank = seen["hosts_before"].index(seen["victim"])
        assert seen["replaced"] == [f"worker {rank}"]
        assert seen["hosts_after"].pop(rank) not in seen["hosts_before"]
        assert seen["hosts_after"] == stay
    if how == "spare":
        return
    ready, reason = seen["ready"], seen["status_reason"]
    assert (ready["code"], ready["status"]) == (503, "recovering")
    for text in (ready["reason"], reason):
        assert "waiting for 1 of 3 machines or shares of one, each with 1 CPU" in text
        assert "the cluster has 2, of which 0 are free" in text
    assert seen["num_told"] == 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_node_of_the_supervisor_dies_and_clients_elsewhere_go_on() -> None:
    seen = told_by("lost_home")
    assert seen["hosts_before"][0] == HOSTS[1]
    assert set(seen["hosts_after"]) == {HOSTS[0]}
    assert seen["shape"] == "TP 2 x PP 1", "what it was resized to is known elsewhere"
    assert seen["causes"] == ["scheduler_lost"]
    assert seen["left"] == []
