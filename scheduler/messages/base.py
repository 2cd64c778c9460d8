"""What every message is."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages. They form trees, never cycles, so the collector can skip them.

    Unknown fields are refused, not skipped: nobody shall send what nobody reads, and skipping
    follows the nesting of what a stranger sent as deep as it goes.
    """
