"""The plans that are out: consecutive ids, answered in order."""

import pytest

from scheduler.errors import ProtocolError
from scheduler.window import Window


def test_step_ids_start_at_0_and_are_consecutive() -> None:
    window = Window(3)
    assert [window.publish() for _ in range(3)] == [0, 1, 2]


def test_window_is_full_when_its_limit_is_in_flight() -> None:
    window = Window(2)
    is_full = []
    for event in (window.publish, window.publish, lambda: window.answer(0)):
        event()
        is_full.append(window.is_full)
    assert is_full == [False, True, False]
    assert window.num_in_flight == 1


def test_step_is_in_flight_until_it_is_answered() -> None:
    window = Window(2)
    window.publish()
    window.publish()
    window.answer(0)
    assert not window.is_in_flight(0)
    assert window.is_in_flight(1)
    assert not window.is_in_flight(-1)


@pytest.mark.parametrize("step_id", [0, 2, 3, -1])
def test_result_out_of_order_is_refused_and_changes_nothing(step_id: int) -> None:
    window = Window(3)
    window.publish()
    window.publish()
    window.publish()
    window.answer(0)
    with pytest.raises(ProtocolError, match=f"result of step {step_id}, expected that of step 1"):
        window.answer(step_id)
    window.answer(1)


def test_result_that_nobody_waits_for_is_refused() -> None:
    window = Window(1)
    with pytest.raises(ProtocolError, match="0 in flight"):
        window.answer(0)
    window.publish()
    window.answer(0)
    with pytest.raises(ProtocolError, match="result of step 0"):
        window.answer(0)
