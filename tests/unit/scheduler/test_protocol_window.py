"""Several steps in flight keep all pipeline stages busy."""

from tests.support.sleeping_workers import steps_per_second


def test_four_steps_in_flight_are_worth_two_and_a_half_of_one() -> None:
    # Sleep dominates: each stage takes 20 ms, so what else the machine does matters little.
    one = steps_per_second(1, num_steps=30)
    four = steps_per_second(4, num_steps=60)
    assert four >= 2.5 * one
