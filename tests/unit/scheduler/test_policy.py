"""Who is next and who is spared, and the queue that keeps the order: SEMANTICS 4.3, 5.1, 5.8."""

import random

import pytest

from scheduler.messages import InterruptionCause, SamplingParams, Usage
from scheduler.policy import Fcfs, Policy, Priority, WaitingQueue
from scheduler.request import Request
from tests.support.drive import request_of


def request(
    name: str,
    index: int,
    *,
    priority: int = 0,
    arrival: float | None = None,
    requeue_index: int = 0,
    was_interrupted: bool = False,
    continues: bool = False,
    num_tokens: int = 1,
) -> Request:
    made = Request.of(
        request_of(
            name,
            range(num_tokens),
            SamplingParams(max_tokens=1, seed=0),
            priority=priority,
            arrival=float(index) if arrival is None else arrival,
            usage_so_far=Usage(1, 0, 0) if continues else None,
        ),
        submit_index=index,
    )
    made.requeue_index = requeue_index
    if was_interrupted:
        made.causes[InterruptionCause.BLOCKS] = 1
    return made


def order(policy: Policy, *requests: Request) -> list[str]:
    queue = WaitingQueue(policy)
    for each in requests:
        queue.push(each)
    return [each.request_id for each in queue]


# -- fcfs -------------------------------------------------------------------------------


def test_fcfs_serves_in_the_order_of_submission_whatever_the_clocks_say() -> None:
    late = request("a", 0, arrival=9.0)
    assert order(Fcfs(), request("b", 1, arrival=1.0), late) == ["a", "b"]


def test_fcfs_puts_who_was_preempted_last_to_the_front() -> None:
    assert order(
        Fcfs(),
        request("new", 0),
        request("first preempted", 1, requeue_index=-1),
        request("then preempted", 2, requeue_index=-2),
    ) == ["then preempted", "first preempted", "new"]


def test_fcfs_serves_continuations_by_arrival_and_before_the_new() -> None:
    assert order(
        Fcfs(),
        request("new", 0, arrival=1.0),
        request("late", 1, arrival=6.0, continues=True),
        request("early", 2, arrival=5.0, continues=True),
    ) == ["early", "late", "new"]


def test_fcfs_spares_who_was_admitted_first() -> None:
    a, b = request("a", 0), request("b", 1)
    a.admission_index, b.admission_index = 2, 1
    assert max([a, b], key=Fcfs().victim_key) is a


# -- priority ---------------------------------------------------------------------------


def test_smaller_priority_goes_first_then_earlier_arrival_then_earlier_submission() -> None:
    assert order(
        Priority(resume_first=True),
        request("late", 0, arrival=3.0),
        request("second", 2, arrival=1.0),
        request("first", 1, arrival=1.0),
        request("urgent", 3, priority=-1),
        request("patient", 4, priority=1, arrival=0.0),
    ) == ["urgent", "first", "second", "late", "patient"]


@pytest.mark.parametrize(("resume_first", "first"), [(True, "preempted"), (False, "new")])
def test_resume_first_puts_who_has_run_before_its_equals(resume_first: bool, first: str) -> None:
    names = order(
        Priority(resume_first=resume_first),
        request("new", 0, arrival=1.0),
        request("preempted", 1, arrival=2.0, was_interrupted=True),
    )
    assert names[0] == first


def test_resume_first_does_not_outrank_priority() -> None:
    assert order(
        Priority(resume_first=True),
        request("preempted", 0, priority=1, was_interrupted=True),
        request("urgent", 1, priority=0),
    ) == ["urgent", "preempted"]


def test_priority_preempts_the_least_urgent_and_of_these_the_latest() -> None:
    key = Priority(resume_first=True).victim_key
    urgent, early, late = request("u", 2), request("e", 0, priority=5), request("l", 1, priority=5)
    assert sorted([late, urgent, early], key=key) == [urgent, early, late]


# -- the queue --------------------------------------------------------------------------


def test_queue_counts_its_requests_and_their_tokens() -> None:
    queue = WaitingQueue(Fcfs())
    a, b = request("a", 0, num_tokens=5), request("b", 1, num_tokens=7, was_interrupted=True)
    queue.push(a)
    queue.push(b)
    assert (len(queue), queue.num_tokens, queue.num_interrupted) == (2, 12, 1)
    queue.remove(a)
    assert (len(queue), queue.num_tokens, queue.num_interrupted) == (1, 7, 1)
    assert a not in queue
    assert b in queue


def test_peek_skips_who_left_from_the_middle() -> None:
    queue = WaitingQueue(Fcfs())
    a, b, c = (request(name, i) for i, name in enumerate("abc"))
    for each in (a, b, c):
        queue.push(each)
    queue.remove(a)
    queue.remove(b)
    assert queue.peek() is c


def test_peek_into_an_empty_queue_is_an_error() -> None:
    queue = WaitingQueue(Fcfs())
    with pytest.raises(IndexError):
        queue.peek()
    queue.push(a := request("a", 0))
    queue.remove(a)
    with pytest.raises(IndexError):
        queue.peek()


def test_removing_who_does_not_wait_is_an_error() -> None:
    with pytest.raises(KeyError):
        WaitingQueue(Fcfs()).remove(request("a", 0))


def test_request_that_comes_back_stands_in_the_queue_once_at_its_new_place() -> None:
    queue = WaitingQueue(Fcfs())
    a, b = request("a", 0), request("b", 1)
    queue.push(a)
    queue.push(b)
    queue.remove(b)
    b.requeue_index = -1
    queue.push(b)
    assert list(queue) == [b, a]
    assert len(queue) == 2


def test_looking_through_the_queue_does_not_change_it() -> None:
    queue = WaitingQueue(Fcfs())
    for i in range(5):
        queue.push(request(f"r{i}", i))
    assert list(queue) == list(queue)
    assert len(queue) == 5


def test_queue_agrees_with_a_sorted_list_over_random_changes() -> None:
    rng = random.Random(11)
    queue = WaitingQueue(policy := Priority(resume_first=True))
    waiting: list[Request] = []
    for index in range(1000):
        if waiting and rng.random() < 0.48:
            leaving = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(leaving)
        else:
            arriving = request(f"r{index}", index, priority=rng.randrange(3))
            waiting.append(arriving)
            queue.push(arriving)
        waiting.sort(key=policy.waiting_key)
        assert len(queue) == len(waiting)
        assert not waiting or queue.peek() is waiting[0]
    assert list(queue) == waiting


def test_queue_does_not_keep_those_who_left() -> None:
    """Ends from outside leave holes; a long-lived queue must not fill with them."""
    queue = WaitingQueue(Fcfs())
    queue.push(request("stays", 0))
    for i in range(1, 1000):
        queue.push(leaving := request(f"r{i}", i))
        queue.remove(leaving)
    assert len(queue._heap) < 100
