"""Killing and stalling processes of an application on purpose, wherever in the cluster they run."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.chaos_schedule import Action
from cluster.errors import EngineUnavailableError
from cluster.operations import Struck, UnknownProcessError
from cluster.ray_errors import sentence
from cluster.supervisor import existing_supervisors
from cluster.supervisor_view import AppStatus, Place

_RAY_TITLE = "ray::"
_ANSWER_SECONDS = 10.0


class RayOperations:
    """Finds processes through the supervisor, and signals them from their own machine."""

    def __init__(self, app: str) -> None:
        self._app = app

    async def status(self) -> AppStatus:
        try:
            supervisors = await asyncio.to_thread(existing_supervisors)
            async with asyncio.timeout(_ANSWER_SECONDS):
                status = await supervisors[self._app].status.remote()
        except (KeyError, TimeoutError, ray.exceptions.RayError) as error:
            raise EngineUnavailableError(
                f"the supervisor of {self._app} does not answer, or is not there yet"
            ) from error
        assert isinstance(status, AppStatus)
        return status

    async def strike(self, process: str, action: Action, seconds: float) -> Struck:
        processes = (await self.status()).processes
        if process not in processes:
            raise UnknownProcessError(f"{process} is unknown; there are {', '.join(processes)}")
        place = processes[process]
        # No CPU: the machine may have none to spare, and a signal takes none.
        on_its_machine = ray.remote(num_cpus=0, max_retries=0)(_strike).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        )
        try:
            struck_seconds = await on_its_machine.remote(place, action, seconds)
        except ray.exceptions.RayError as error:
            raise EngineUnavailableError(
                f"{process} could not be struck: {sentence(error)}"
            ) from error
        return Struck(place.process_id, struck_seconds)


def _strike(place: Place, action: Action, seconds: float) -> float:
    process = psutil.Process(place.process_id)
    if not process.cmdline()[0].startswith(_RAY_TITLE):
        raise ProcessLookupError(f"process {place.process_id} is another one by now")
    struck_seconds = time.time()
    if action == "kill":
        os.kill(place.process_id, signal.SIGKILL)
        return struck_seconds
    os.kill(place.process_id, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have been replaced meanwhile
            process.resume()  # the same one: psutil knows it by its start time
    return struck_seconds
