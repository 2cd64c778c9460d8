"""Pipeline stages on three nodes: the network is the only way between them."""

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
    command = [sys.executable, "-m", "tests.support.several_nodes", str(model)]
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
