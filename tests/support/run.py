"""Runs of the fake world: a row of episodes from one seed, and how to repeat one that failed."""

import random
from collections import Counter
from dataclasses import dataclass, field

from scheduler.messages import (
    TOKEN_BYTES,
    Close,
    Extend,
    Open,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
)
from tests.support.episode_config import Ranges
from tests.support.world import Bug, Episode


def _tell(event: object) -> str:
    """One line on what happened: `r7/0#2` is the second attempt of request r7/0."""
    match event:
        case StepPlan():
            parts = [_tell(part) for part in (*event.updates, *event.work)]
            return f"plan {event.epoch}.{event.step_id}: " + ", ".join(parts)
        case StepResult():
            parts = [_tell(output) for output in event.outputs]
            return f"result {event.epoch}.{event.step_id}: " + ", ".join(parts)
        case Open():
            num_tokens = len(event.token_ids) // TOKEN_BYTES
            return f"open {_tell(event.seq)} {event.num_computed}/{num_tokens} in {event.block_ids}"
        case Extend():
            return f"extend {_tell(event.seq)} {event.token_ids} {event.block_ids}"
        case Close():
            return f"close {_tell(event.seq)} {event.reason}"
        case SeqWork():
            end = event.start + event.num_tokens
            return f"{_tell(event.seq)}[{event.start}:{end}]{'+' if event.sample else ''}"
        case SeqOutput():
            return f"{_tell(event.seq)} {event.error or event.token_ids}"
        case SeqRef():
            return f"{event.request_id}#{event.attempt}"
        case _:
            return str(event)


@dataclass(slots=True)
class Report:
    """What a run went through without finding anything wrong."""

    num_episodes: int = 0
    num_steps: int = 0
    """Plans made."""
    seen: Counter[str] = field(default_factory=Counter)


class WorldFailureError(AssertionError):
    """Something in the world is not as it must be; tells where, and how to see it again."""

    def __init__(self, episode: Episode, command: str, num_steps: int) -> None:
        self.num_steps = num_steps
        """Plans made in the run until it was found."""
        events = "\n".join(f"{now:9.3f}  {_tell(event)}" for now, event in episode.events)
        super().__init__(
            f"after {num_steps} steps, {episode.num_steps} of them in this episode:\n{events}\n"
            f"  {episode.config}\nsee it again: {command}"
        )


def run(
    seed: int,
    ranges: Ranges,
    num_steps: int,
    *,
    bug: Bug | None = None,
    bug_name: str = "",
    check_invariants: bool = True,
    first_episode: int = 0,
) -> Report:
    """Episodes until `num_steps` plans were made; raises WorldFailureError at the first fault.

    Episode i depends on (`seed`, `ranges`, i) alone, so that a failing one can be run by itself.
    """
    report = Report()
    while report.num_steps < num_steps:
        index = first_episode + report.num_episodes
        rng = random.Random(f"{seed}/{ranges.name}/{index}")
        episode = Episode(rng, ranges, bug=bug, check_invariants=check_invariants)
        try:
            with (bug or Bug()).installed(episode.config):
                episode.run()
        except Exception as error:
            command = (
                f"python -m tests.support --seed {seed} --ranges {ranges.name} --episode {index}"
            )
            if bug_name:
                command += f" --bug {bug_name}"
            if not check_invariants:
                command += " --no-invariants"
            raise WorldFailureError(
                episode, command, report.num_steps + episode.num_steps
            ) from error
        report.num_episodes += 1
        report.num_steps += episode.num_steps
        report.seen += episode.ledger.seen
    return report
