"""Ray Serve's own commands on a cluster that `ray start` has started: `serve run`, `serve build`
and `serve deploy`; and our `palimpsest stop` on it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.probe import Probe
from tests.support.leftovers import Leftovers, assert_nothing_left
from tests.support.models import make_stories_stand_in
from tests.support.served_model import ready_to_serve
from tests.support.serving import HOST, free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(400), pytest.mark.xdist_group("serve cli")]

START_SECONDS = 120.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.yaml"


def command(name: str, *arguments: object) -> list[str]:
    return [str(Path(sys.executable).with_name(name)), *map(str, arguments)]


def run(name: str, *arguments: object) -> str:
    """Its output; raises CalledProcessError."""
    done = subprocess.run(
        command(name, *arguments), capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@dataclass(frozen=True, slots=True)
class Head:
    address: str
    dashboard: str


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    before = Leftovers.now()
    # Short, because Ray puts sockets into it, whose paths have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port, dashboard_port = free_port(), free_port()
    output = folder / "head.out"
    options = {
        "node-ip-address": HOST,
        "port": port,
        "dashboard-host": HOST,
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": free_port(),
        "num-cpus": 4,
        "temp-dir": folder,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command("ray", "start", "--head", "--block", "--disable-usage-stats", *arguments),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "Ray runtime started" in output.read_text(), process)
        yield Head(f"{HOST}:{port}", f"http://{HOST}:{dashboard_port}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
    assert_nothing_left(before)


def wait_for(is_there: Any, process: "subprocess.Popen[bytes] | None" = None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_there():
        assert process is None or process.poll() is None, "the command has ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return ready_to_serve(make_stories_stand_in(folder / "stand-in"), folder)


def check_answers(port: int, model: Path) -> None:
    url = f"http://{HOST}:{port}"
    probe = Probe(url)
    wait_for(lambda: probe.state().is_ready)
    body = {"model": str(model), "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_run_build_deploy(head: Head, model: Path, tmp_path: Path) -> None:
    """In this order: Serve keeps the port that it was first told."""
    generated = tmp_path / "generated.yaml"
    run("serve", "build", "cluster.app:app", "-o", generated)
    (built,) = yaml.safe_load(generated.read_text())["applications"]
    assert built["import_path"] == "cluster.app:app"
    assert built["deployments"][0]["max_queued_requests"] == -1

    content = yaml.safe_load(EXAMPLE.read_text())
    port = content["http_options"]["port"] = free_port()
    (application,) = content["applications"]
    application["args"] |= {"model": str(model), "cache": {"num_blocks": 99}}
    config = tmp_path / "deploy.yaml"
    config.write_text(yaml.safe_dump(content))
    run("serve", "deploy", config, "-a", head.dashboard)
    check_answers(port, model)
    assert "of 98 with 16 tokens" in run("palimpsest", "status", "--address", head.address)
    assert "Ended: palimpsest." in run("palimpsest", "stop", "--address", head.address)

    arguments = ("cluster.app:build_app", f"model={model}", "cache.num_blocks=77")
    running = subprocess.Popen(
        command("serve", "run", *arguments, "--name", "run", "-a", head.address),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: Probe(f"http://{HOST}:{port}").state().is_ready, running)
        check_answers(port, model)
        assert "of 76 with 16 tokens" in run("palimpsest", "status", "--address", head.address)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
    assert "Ended: run." in run("palimpsest", "stop", "--address", head.address)
