"""The one error of this package, and how its sentences are put together."""

from collections.abc import Iterable


class ConfigError(Exception):
    """Settings that cannot be used, told so that a user can act on it: one line per problem.

    Holds nothing but its message, so that it survives pickling. The values of secret settings
    never appear in it.
    """


def one_of(choices: Iterable[object]) -> str:
    """The choices as a phrase: "a", "a or b", "a, b or c"."""
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last
