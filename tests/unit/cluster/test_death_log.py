"""When an engine that keeps dying is given up."""

from cluster.death_log import MAX_DEATHS, WINDOW_SECONDS, DeathLog


def test_deaths_without_a_step_in_between_add_up() -> None:
    log = DeathLog()
    for number in range(MAX_DEATHS):
        assert not log.is_hopeless
        log.died(float(number), after_progress=False)
    assert log.is_hopeless


def test_a_step_in_between_begins_anew() -> None:
    log = DeathLog()
    for number in range(4 * MAX_DEATHS):
        log.died(float(number), after_progress=number % 4 == 0)
        assert not log.is_hopeless


def test_deaths_long_ago_do_not_count() -> None:
    log = DeathLog()
    for number in range(3 * MAX_DEATHS):
        log.died(number * WINDOW_SECONDS / (MAX_DEATHS - 2), after_progress=False)
        assert not log.is_hopeless


def test_a_single_death_is_mended_at_once_and_more_of_them_with_growing_pauses() -> None:
    log = DeathLog()
    pauses = []
    for number in range(MAX_DEATHS):
        log.died(float(number), after_progress=False)
        pauses.append(log.pause_seconds)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]
    log.died(10.0, after_progress=True)
    assert log.pause_seconds == 0.0
