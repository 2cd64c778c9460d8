"""What is to be done to which process when, in the words of the command line."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cluster.errors import CommandError

Action: TypeAlias = Literal["kill", "stall"]

_KINDS = {"worker": True, "replica": True, "scheduler": False, "supervisor": False}
"""Of processes, and whether there are several, which have numbers."""
_KILL = re.compile(r"(?P<process>[^@]+)@(?P<at>[^+]+)")
_STALL = re.compile(_KILL.pattern + r"\+(?P<seconds>.+)")
_FORMS = {
    "kill": "PROCESS@SECONDS, as in worker:1@5",
    "stall": "PROCESS@SECONDS+DURATION, as in worker:0@5+10",
}


@dataclass(frozen=True, slots=True)
class Strike:
    at_seconds: float
    """After the beginning of the load."""
    action: Action
    process: str
    """As `AppStatus.processes` names it: `worker 1`, `scheduler`."""
    seconds: float = 0.0
    """How long it is stalled."""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.action == "stall" else ""
        return f"{self.action} {self.process}{lasting}"


def schedule(kills: Sequence[str], stalls: Sequence[str]) -> list[Strike]:
    """All strikes in their order. Raises CommandError for what cannot be understood."""
    if not kills and not stalls:
        raise CommandError(
            f"There is nothing to do: name what to strike with --kill {_FORMS['kill']}, or "
            f"--stall {_FORMS['stall']}."
        )
    strikes = [_strike("kill", text) for text in kills]
    strikes += [_strike("stall", text) for text in stalls]
    return sorted(strikes, key=lambda strike: strike.at_seconds)


def _strike(action: Action, text: str) -> Strike:
    found = (_STALL if action == "stall" else _KILL).fullmatch(text)
    if found is None:
        raise CommandError(f"--{action} is {text!r}, but must be {_FORMS[action]}.")
    at_seconds = _number(action, text, found["at"], least=0)
    seconds = _number(action, text, found["seconds"], least=0.1) if action == "stall" else 0.0
    return Strike(at_seconds, action, _process(action, text, found["process"]), seconds)


def _process(action: Action, text: str, name: str) -> str:
    kind, _, number = name.partition(":")
    if kind not in _KINDS:
        raise CommandError(
            f"--{action} is {text!r}, but {kind} is no process: there are worker:0 and so on, "
            f"replica:0 and so on, scheduler and supervisor."
        )
    if _KINDS[kind] != number.isdecimal() or (number and not _KINDS[kind]):
        form = f"{kind}:0 or another number" if _KINDS[kind] else f"{kind} alone"
        raise CommandError(f"--{action} is {text!r}, but must name {form}.")
    return f"{kind} {int(number)}" if number else kind


def _number(action: Action, option: str, text: str, *, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise CommandError(
            f"--{action} is {option!r}, but {text} must be a number of seconds, at least {least:g}."
        )
    return value
