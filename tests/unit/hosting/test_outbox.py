"""A batch is given until it is acknowledged, and then never again."""

import random

from scheduler.messages import TokenBatch, TokenDelta
from scheduler.outbox import Outbox


def batch_of(number: int) -> TokenBatch:
    return TokenBatch(number, (TokenDelta("r", (number,)),))


def test_nothing_to_give() -> None:
    outbox = Outbox()
    assert outbox.take(0) == (0, ())
    assert outbox.is_empty


def test_what_comes_before_a_poll_is_one_batch() -> None:
    outbox = Outbox()
    outbox.put(batch_of(1))
    outbox.put(batch_of(2))
    assert outbox.take(0) == (1, (batch_of(1), batch_of(2)))


def test_a_repeated_poll_gets_the_same_batch_whatever_has_come_since() -> None:
    outbox = Outbox()
    outbox.put(batch_of(1))
    first = outbox.take(0)
    outbox.put(batch_of(2))
    assert outbox.take(0) == first
    assert not outbox.is_empty
    assert outbox.take(1) == (2, (batch_of(2),))
    assert outbox.take(2) == (2, ())
    assert outbox.is_empty


def test_a_client_that_loses_answers_gets_everything_once_and_in_order() -> None:
    rng = random.Random(3)
    outbox = Outbox()
    received: list[int] = []
    last = sent = 0
    while len(received) < 500:
        while rng.random() < 0.6:
            sent += 1
            outbox.put(batch_of(sent))
        number, batches = outbox.take(last)
        if rng.random() < 0.3:
            continue  # the answer was lost on its way
        assert number in (last, last + 1)
        last = number
        received += [delta.token_ids[0] for batch in batches for delta in batch.deltas]
    assert received == list(range(1, len(received) + 1))
