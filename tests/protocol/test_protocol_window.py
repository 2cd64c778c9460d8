"""Several steps in flight keep all pipeline stages busy."""

from tests.support.sleeping_workers import steps_per_second

STAGE_SECONDS = 0.04
NUM_TRIES = 4


def test_four_steps_in_flight_are_worth_two_and_a_half_of_one() -> None:
    # Sleep dominates. A machine with much else to do wakes the threads late, and more so the
    # more of them there are, so the best of a few tries counts.
    ratios = []
    for _ in range(NUM_TRIES):
        one = steps_per_second(1, stage_seconds=STAGE_SECONDS, num_steps=12)
        four = steps_per_second(4, stage_seconds=STAGE_SECONDS, num_steps=36)
        ratios.append(four / one)
        if ratios[-1] >= 2.5:
            break
    assert max(ratios) >= 2.5, ratios
