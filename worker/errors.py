"""Everything that can go wrong in a worker, as one visible tree.

All of them survive pickling: the message is the only state that matters to a reader far away.
"""


class WorkerError(Exception):
    """Base of all errors raised by `worker/`."""


class MirrorDriftError(WorkerError):
    """A plan contradicts what this worker knows of a sequence.

    The state of the worker is undefined afterwards; only a new epoch helps.
    """


class CacheTooSmallError(WorkerError):
    """The memory granted does not hold one sequence of full length."""


class DeviceError(WorkerError):
    """The device is missing, or cannot do what was asked of it."""


class GroupBrokenError(WorkerError):
    """A rank of the group died, was told to stop, or did not answer in time."""


class BackendUnavailableError(WorkerError):
    """An optional part is not installed, or does not run here."""
