"""How a replica learns that Ray Serve is stopping it, while its requests still run."""

from collections.abc import Callable


def on_shutdown(callback: Callable[[], object]) -> None:
    """Call `callback`, in whatever thread, when Serve begins to stop the replica of this process.

    Serve itself tells a replica only after the last of its requests, and when these take too long
    it kills the process: their streams would end without a word.
    """
    from ray.serve._private.replica import Replica

    shut_down = Replica._perform_graceful_shutdown

    async def tell_and_shut_down(replica: Replica) -> None:
        callback()
        await shut_down(replica)

    Replica._perform_graceful_shutdown = tell_and_shut_down
