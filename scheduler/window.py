"""The plans that are out: made, published, and not yet answered."""

from scheduler.errors import ProtocolError


class Window:
    """Step ids of one epoch: consecutive from 0, answered in order, at most `limit` out."""

    __slots__ = ("limit", "next_result_id", "next_step_id")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.next_step_id = 0
        self.next_result_id = 0

    @property
    def num_in_flight(self) -> int:
        return self.next_step_id - self.next_result_id

    @property
    def is_full(self) -> bool:
        return self.num_in_flight >= self.limit

    def is_in_flight(self, step_id: int) -> bool:
        return step_id >= self.next_result_id

    def publish(self) -> int:
        """The id of the plan that goes out now."""
        step_id = self.next_step_id
        self.next_step_id += 1
        return step_id

    def answer(self, step_id: int) -> None:
        """Raises ProtocolError, with nothing changed, if another result is due."""
        if step_id != self.next_result_id or not self.num_in_flight:
            raise ProtocolError(
                f"result of step {step_id}, expected that of step {self.next_result_id}"
                f" ({self.num_in_flight} in flight)"
            )
        self.next_result_id += 1
