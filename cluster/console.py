"""What commands that take a while tell their user: one line for each thing done."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console


class Progress:
    """On a terminal the current step has a spinner and a line of detail; in a log file each
    change is a line."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._began_seconds = time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began_seconds

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:
        """Do one thing; what is called with a text tells how far it is."""
        said = ""

        def tell(detail: str) -> None:
            nonlocal said
            if detail == said:
                return
            said = detail
            if self.console.is_terminal:
                status.update(f"{what} … [dim]{detail}[/]")
            else:
                self.say(f"  {detail}")

        with self.console.status(f"{what} …") as status:
            if not self.console.is_terminal:
                self.say(f"{what} …")
            yield tell
        if self.console.is_terminal:
            self.console.print(f"[green]✓[/] {what} [dim]({self.elapsed_seconds:.0f} s)[/]")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)
