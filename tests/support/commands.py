"""The command `palimpsest`, as a person calls it on the Ray cluster of this process."""

import subprocess
import sys

import ray

COMMAND = "from cluster.cli import main; main()"


def palimpsest(*arguments: str, timeout_seconds: float = 60) -> subprocess.CompletedProcess[str]:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", COMMAND, *arguments, "--address", address]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
