"""A prompt as the engine gets it, and as its client may get it back."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str = ""
    """As it was sent, or else what the token ids say; only where it is part of the answer."""
    offsets: Sequence[int] = ()
    """Per token: how many characters of `text` are whole before it. Only with `text`."""

    def last(self, num_tokens: int) -> "Prompt":
        """The end of the prompt, `num_tokens` long; all of it if it is shorter."""
        dropped = len(self.token_ids) - num_tokens
        if dropped <= 0:
            return self
        start = self.offsets[dropped] if self.offsets else 0
        return Prompt(
            self.token_ids[dropped:],
            self.text[start:],
            [offset - start for offset in self.offsets[dropped:]],
        )
