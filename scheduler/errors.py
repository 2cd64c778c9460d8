"""Everything that can go wrong in the scheduler, as one visible tree.

All of them survive pickling: the message is the only state that matters to a reader far away.
"""


class SchedulerError(Exception):
    """Base of all errors raised by `scheduler/`."""


class OutOfBlocksError(SchedulerError):
    """More blocks were asked for than are free. Nothing was changed."""


class CacheInUseError(SchedulerError):
    """The prefix cache cannot be reset while requests hold blocks. Nothing was changed."""


class ProtocolError(SchedulerError):
    """A message contradicts what was agreed: a gap in step ids, a result nobody asked for."""


class IllegalMoveError(SchedulerError):
    """A request was moved between two states that no rule connects; carries its story."""


class BrokenInvariantError(SchedulerError):
    """State that must hold after every step does not. Always a bug of ours."""


class LinkError(SchedulerError):
    """A rank cannot be reached, or a message could not be carried; the link is of no more use."""


class GroupLostError(SchedulerError):
    """The worker group cannot go on in this epoch; the message says who reported what."""


class LoopOverError(SchedulerError):
    """The step loop has been stopped; nobody is left to do what was asked."""


class CoreCrashedError(SchedulerError):
    """The core raised what it must not; its process is about to end."""

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        """`request_ids`: what it was working on, as far as that is known."""
        super().__init__(message, request_ids)
        self.request_ids = request_ids

    def __str__(self) -> str:
        return str(self.args[0])
