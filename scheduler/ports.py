"""What the scheduler needs from outside, as it sees it. Who provides it is not its business."""

from typing import Protocol

from scheduler.messages import StepPlan, WorkerMessage


class PlanLink(Protocol):
    """The scheduler's end of the way to one worker group, for one epoch.

    Reliable and in order for each rank, or it raises LinkError; after that only another link
    helps. All methods but `wake` are called from one thread.
    """

    @property
    def address(self) -> str:
        """Where the workers find this link."""
        ...

    def publish(self, plan: StepPlan) -> None:
        """Send `plan` to every rank. Does not wait for anybody to receive it."""
        ...

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        """All that has arrived; waits for the first message.

        Empty after `timeout_seconds`, or when somebody called `wake` since the last call.
        """
        ...

    def wake(self) -> None:
        """Let the `receive` that is waiting, or the next one, return at once.

        From any thread, and at any time: on a closed link it does nothing.
        """
        ...

    def close(self) -> None:
        """Free everything. Safe to call again; nothing else may be called afterwards."""
        ...


class PlanLinkOffer(Protocol):
    """A link that can be opened, once, in the process of the scheduler. Survives pickling."""

    def open(self) -> PlanLink: ...
