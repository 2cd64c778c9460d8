"""Errors of the command line, and of the way to the engine."""


class CommandError(Exception):
    """A command that cannot do what was asked, for a reason that its user can change.

    The command line prints the message, one sentence with the number that was exceeded and what
    to change, and ends with exit code 2 and no traceback. Raise it (or a subclass) for bad
    arguments and bad input files, never for a fault of ours.
    """


class EngineError(Exception):
    """Base of what can go wrong between an ingress replica and the engine."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests now; the message says why. Try again later."""


class EngineLostError(EngineError):
    """The scheduler that was being talked to is gone, with everything it had accepted."""


class EngineReplacedError(EngineLostError):
    """It is gone, and none will come in its place for who was its client."""


class EngineStartError(EngineError):
    """The engine cannot start; the message says what to change."""


class EngineBusyError(EngineError):
    """What was asked for cannot be done while requests run; the message says how much they hold."""


class ResizeError(EngineError):
    """The engine has, or has again, the shape that it had before; the message says why."""
