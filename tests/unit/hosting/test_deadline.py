"""When a step has taken too long."""

from scheduler.deadline import StepDeadline


def test_the_first_step_has_a_limit_of_its_own() -> None:
    deadline = StepDeadline(30, first_seconds=600)
    assert deadline.overdue_seconds(1e9) is None
    deadline.published(100, 0.0)
    assert deadline.overdue_seconds(600.0) is None
    assert deadline.overdue_seconds(601.0) == 601.0


def test_the_limit_counts_from_when_the_step_became_the_oldest() -> None:
    deadline = StepDeadline(30, first_seconds=600)
    deadline.published(1, 0.0)
    deadline.published(1, 0.0)
    deadline.answered(100.0)
    assert deadline.overdue_seconds(130.0) is None
    assert deadline.overdue_seconds(130.5) == 30.5
    deadline.answered(130.6)
    assert deadline.overdue_seconds(1e9) is None


def test_slow_steps_in_general_get_more_in_proportion_to_their_tokens() -> None:
    deadline = StepDeadline(30, first_seconds=600)
    now = 0.0
    for _ in range(10):
        deadline.published(10, now)
        now += 5.0  # half a second a token
        deadline.answered(now)
    deadline.published(10, now)
    assert deadline.overdue_seconds(now + 100) is None  # 20 x 5 s
    assert deadline.overdue_seconds(now + 101) == 101
    deadline.answered(now + 101)
    deadline.published(100, now + 101)
    assert deadline.overdue_seconds(now + 1000) is None


def test_one_slow_step_does_not_move_the_limit() -> None:
    deadline = StepDeadline(30, first_seconds=600)
    for step in range(11):
        deadline.published(1, 100.0 * step)
        deadline.answered(100.0 * step + (90 if step == 5 else 0.01))
    deadline.published(1, 2000.0)
    assert deadline.overdue_seconds(2031.0) == 31.0


def test_a_step_of_updates_only_counts_for_no_speed() -> None:
    deadline = StepDeadline(30, first_seconds=600)
    for step in range(3):
        deadline.published(0, float(step))
        deadline.answered(step + 0.5)
    deadline.published(0, 10.0)
    assert deadline.overdue_seconds(39.0) is None
    assert deadline.overdue_seconds(41.0) == 31.0
