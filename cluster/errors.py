"""Errors of the command line."""


class CommandError(Exception):
    """A command that cannot do what was asked, for a reason that its user can change.

    The command line prints the message, one sentence with the number that was exceeded and what
    to change, and ends with exit code 2 and no traceback. Raise it (or a subclass) for bad
    arguments and bad input files, never for a fault of ours.
    """
