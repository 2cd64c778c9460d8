"""What a rank needs from outside, as it sees it."""

from typing import Protocol

from scheduler.messages import StepPlan, WorkerMessage


class WorkerLink(Protocol):
    """A rank's end of the way to its scheduler, for one epoch.

    All methods but `wake` are called from one thread.
    """

    def receive(self, timeout_seconds: float) -> StepPlan | None:
        """The next plan, in the order of publishing.

        None after `timeout_seconds`, or when somebody called `wake` since the last call.
        """
        ...

    def send(self, message: WorkerMessage) -> None:
        """Does not wait for anybody to receive it."""
        ...

    def wake(self) -> None:
        """Let the `receive` that is waiting, or the next one, return at once.

        From any thread, and at any time: on a closed link it does nothing.
        """
        ...

    def close(self) -> None:
        """Free everything; what was sent is still delivered. Safe to call again."""
        ...


class WorkerLinkOffer(Protocol):
    """A rank's end that can be opened, once, in the process of the rank. Survives pickling."""

    def open(self) -> WorkerLink: ...
