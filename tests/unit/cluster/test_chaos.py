"""Chaos without a server: what the command line means, and what is made of what was seen."""

import pytest

from cluster.bench_client import Outcome
from cluster.chaos_client import SeenRecovery
from cluster.chaos_report import summarize
from cluster.chaos_run import ChaosRecord, Seen, not_ready_after, recovery_of
from cluster.chaos_schedule import Strike, schedule
from cluster.errors import CommandError

KILL = Strike(5.0, "kill", "worker 1")


def test_strikes_are_in_the_order_of_their_times() -> None:
    strikes = schedule(["worker:1@5", "supervisor@0.5"], ["scheduler@2+40", "replica:10@1e1+0.5"])
    assert strikes == [
        Strike(0.5, "kill", "supervisor"),
        Strike(2.0, "stall", "scheduler", 40.0),
        KILL,
        Strike(10.0, "stall", "replica 10", 0.5),
    ]
    assert [str(strike) for strike in strikes[1:3]] == [
        "stall scheduler for 40 s",
        "kill worker 1",
    ]


@pytest.mark.parametrize(
    ("kill", "stall", "words"),
    [
        (None, None, "There is nothing to do"),
        ("worker:1", None, "must be PROCESS@SECONDS"),
        ("worker:1@5+3", None, "must be PROCESS@SECONDS"),
        (None, "worker:1@5", "must be PROCESS@SECONDS+DURATION"),
        ("worker@5", None, "must name worker:0 or another number"),
        ("worker:@5", None, "must name worker:0 or another number"),
        ("worker:-1@5", None, "must name worker:0 or another number"),
        ("scheduler:0@5", None, "must name scheduler alone"),
        ("proxy@5", None, "proxy is no process"),
        ("scheduler@soon", None, "soon must be a number of seconds"),
        ("scheduler@-1", None, "-1 must be a number of seconds, at least 0"),
        ("scheduler@inf", None, "inf must be a number of seconds"),
        (None, "scheduler@1+0", "0 must be a number of seconds, at least 0.1"),
        (None, "scheduler@1+nan", "nan must be a number of seconds"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_words(
    kill: str | None, stall: str | None, words: str
) -> None:
    with pytest.raises(CommandError) as refused:
        schedule([kill] if kill else [], [stall] if stall else [])
    assert words in str(refused.value)


def recovery(replaced: str, noticed: float, joined: float) -> SeenRecovery:
    return SeenRecovery((replaced,), "a test", noticed, joined)


def test_a_recovery_belongs_to_the_strike_whose_process_it_replaced() -> None:
    earlier, other, mine = (
        recovery("worker 1", 90.0, 95.0),
        recovery("scheduler", 100.1, 104.0),
        recovery("worker 1", 100.2, 107.0),
    )
    assert recovery_of(KILL, 100.0, [earlier, other]) is None
    assert recovery_of(KILL, 100.0, [earlier, other, mine]) is mine
    # It was under way already, and took in what died meanwhile.
    assert recovery_of(KILL, 105.0, [earlier, other, mine]) is mine


@pytest.mark.parametrize(
    ("at", "gap"),
    [
        (0.0, (3.0, 7.0)),
        (4.0, (4.0, 7.0)),
        (7.5, (9.0, None)),
        (10.0, (10.0, None)),
    ],
)
def test_when_the_server_was_not_ready(at: float, gap: tuple[float, float | None]) -> None:
    states = [(-1.0, "ready"), (3.0, "recovering"), (4.0, "unreachable"), (7.0, "ready")]
    assert not_ready_after(at, [*states, (9.0, "recovering")]) == gap
    assert not_ready_after(8.0, states) is None


def outcome(text: str, *times: float, error: str | None = None, preemptions: int = 0) -> Outcome:
    return Outcome(times[0], list(times[1:]), text, error=error, preemptions=preemptions)


def test_the_report_counts_what_clients_saw() -> None:
    record = ChaosRecord(
        undisturbed=[outcome("one", 0.0, 0.1, 0.3), outcome("two", 0.0, 0.1, 0.2)],
        asked=[
            (0, outcome("one", 1.0, 1.1, 1.2)),
            (1, outcome("two", 1.0, 1.5, 6.5, 6.6, preemptions=1)),
            (0, outcome("won", 2.0, 2.1)),
            (1, outcome("tw", 2.0, 2.1, error="the stream broke off")),
            (1, outcome("two", 20.0, 29.0, 38.0)),
        ],
        seen=[
            Seen(KILL, 2.0, 0.1, 4.0, ("worker 1",)),
            Seen(Strike(9.0, "kill", "scheduler"), 9.0),
        ],
        duration_seconds=40.0,
    )
    report = summarize(record)
    assert (report.completed, report.failed, report.differing) == (4, 1, 1)
    assert report.interrupted == 1
    assert report.errors == {"the stream broke off": 1}
    assert (report.longest_pause_seconds, report.longest_first_token_seconds) == (9.0, 9.0)
    assert report.undisturbed_longest_pause_seconds == pytest.approx(0.2)
    assert [strike.longest_pause_seconds for strike in report.strikes] == [5.0, 0.0]
    assert [strike.noticed_seconds for strike in report.strikes] == [0.1, None]
    assert not report.is_clean
    assert summarize(ChaosRecord(record.undisturbed, record.asked[:2])).is_clean
