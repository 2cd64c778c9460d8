"""The end of an application: its requests first, then its replicas, then its engine."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

_TICK_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 30.0


def drain(
    supervisors: Mapping[str, Any],
    reason: str,
    timeout_seconds: float | None,
    tell: Callable[[str], None],
) -> dict[str, int | None]:
    """Let applications take nothing new and finish what they have; see `Supervisor.drain`.

    `tell` hears how far it is. For each application how many requests had to be ended; None where
    it takes requests again, has failed or has gone. Who stops waiting does not stop the drain.
    """
    import ray

    calls = {app: one.drain.remote(reason, timeout_seconds) for app, one in supervisors.items()}
    pending = list(calls.values())
    while pending:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=_TICK_SECONDS)
        num_left = sum(_num_requests(supervisors[app]) for app in calls if calls[app] in pending)
        if num_left:
            tell(f"{num_left} {'requests are' if num_left > 1 else 'request is'} left")
    ended: dict[str, int | None] = {}
    for app, call in calls.items():
        try:
            ended[app] = ray.get(call)
        except ray.exceptions.RayActorError:
            ended[app] = None
    return ended


def _num_requests(supervisor: Any) -> int:
    import ray

    try:
        info = ray.get(supervisor.status.remote(), timeout=_ANSWER_SECONDS).info
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return 0
    return int(info.running_requests + info.waiting_requests)


def end(app: str, supervisor: Any, reason: str) -> None:
    """End an application now; what runs is told `reason`."""
    import ray
    from ray import serve

    with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        # First, because Serve waits for what runs.
        ray.get(supervisor.drain.remote(reason, 0.0), timeout=_ANSWER_SECONDS)
    # Then the replicas: those that lose their supervisor ask for a new one.
    with contextlib.suppress(Exception):  # Serve may have gone, which is what is wanted
        serve.delete(app)
    try:
        ray.get(supervisor.stop.remote(reason), timeout=_STOP_SECONDS)
    except ray.exceptions.RayActorError:
        pass  # its death is the answer
    except ray.exceptions.GetTimeoutError:
        ray.kill(supervisor)  # takes its workers with it
