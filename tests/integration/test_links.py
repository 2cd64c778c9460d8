"""What every link must do, whatever carries it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import zmq

from cluster.links import LinkKeys, ZmqPlanLinkOffer, ZmqWorkerLinkOffer
from cluster.ray_link import RayPlanLinkOffer, RayWorkerLinkOffer, start_mailbox
from scheduler.errors import LinkError
from scheduler.messages import (
    Heartbeat,
    Open,
    SamplingParams,
    SeqOutput,
    SeqRef,
    SeqWork,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerMessage,
    encode,
    pack_token_ids,
)
from scheduler.ports import PlanLink
from tests.support.engines import client_of, fake_spec, generate, request_of, status_of
from tests.support.fake_model import MAX_POSITIONS, run_solo
from worker.ports import WorkerLink

NUM_RANKS = 3
DEADLINE_SECONDS = 20.0
ZMTP_GREETING_BYTES = 64


@dataclass
class Group:
    scheduler: PlanLink
    ranks: list[WorkerLink]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.scheduler.close()

    def receive(self, count: int) -> list[WorkerMessage]:
        """Exactly `count` messages at the scheduler."""
        received: list[WorkerMessage] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(received) < count:
            assert time.monotonic() < deadline, f"{len(received)} of {count} messages came"
            received += self.scheduler.receive(0.1)
        assert not self.scheduler.receive(0.0), "more came than was sent"
        return received


def next_plan(rank: WorkerLink) -> StepPlan:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (plan := rank.receive(0.1)) is None:
        assert time.monotonic() < deadline, "no plan came"
    return plan


def zmq_group(host: str | None) -> Group:
    keys = LinkKeys.generate()
    scheduler = ZmqPlanLinkOffer(keys, NUM_RANKS, host).open()
    ranks: list[WorkerLink] = [
        ZmqWorkerLinkOffer(keys, rank, scheduler.address).open() for rank in range(NUM_RANKS)
    ]
    return Group(scheduler, ranks)


def ray_group() -> Group:
    mailbox = start_mailbox()
    scheduler = RayPlanLinkOffer(mailbox, NUM_RANKS).open()
    return Group(scheduler, [RayWorkerLinkOffer(mailbox, rank).open() for rank in range(NUM_RANKS)])


MAKERS: dict[str, Callable[[], Group]] = {
    "zmq-ipc": lambda: zmq_group(None),
    "zmq-tcp": lambda: zmq_group("127.0.0.1"),
    "ray": ray_group,
}


@pytest.fixture(params=list(MAKERS))
def group(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Group]:
    """A formed group: every rank has said that it is there."""
    made = MAKERS[request.param]()
    for number, rank in enumerate(made.ranks):
        rank.send(Heartbeat(epoch=1, rank=number, step_id=0))
    joined = made.receive(NUM_RANKS)
    assert {message.rank for message in joined if isinstance(message, Heartbeat)} == {0, 1, 2}
    yield made
    made.close()
    made.close()


def plan_of(step_id: int, num_tokens: int = 1) -> StepPlan:
    seq = SeqRef(f"r{step_id}", 1)
    opened = Open(
        seq=seq,
        token_ids=pack_token_ids(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=(1, 2, 3),
        num_computed=0,
        sampling=SamplingParams(max_tokens=5, seed=2**64 - 1, stop_token_ids=(1, 2)),
    )
    return StepPlan(1, step_id, (opened,), (SeqWork(seq, 0, num_tokens, sample=True),))


def test_every_rank_gets_every_plan_in_order(group: Group) -> None:
    plans = [plan_of(step_id, num_tokens=1 + step_id % 50) for step_id in range(200)]
    for plan in plans:
        group.scheduler.publish(plan)
    for rank in group.ranks:
        assert [next_plan(rank) for _ in plans] == plans
        assert rank.receive(0.0) is None


def test_messages_of_each_rank_arrive_once_and_in_order(group: Group) -> None:
    def talk(rank: int, link: WorkerLink) -> None:
        for step_id in range(100):
            outputs = (SeqOutput(SeqRef(f"rank {rank}", 1), (step_id,)),)
            link.send(StepResult(1, step_id, outputs, 0.5, 0.25))
        link.send(WorkerFault(1, 100, rank, "OSError", "no space left"))

    threads = [
        threading.Thread(target=talk, args=(rank, link)) for rank, link in enumerate(group.ranks)
    ]
    for thread in threads:
        thread.start()
    received = group.receive(NUM_RANKS * 101)
    for thread in threads:
        thread.join()
    for rank in range(NUM_RANKS):
        steps = [
            message.step_id
            for message in received
            if isinstance(message, StepResult)
            and message.outputs[0].seq.request_id == f"rank {rank}"
        ]
        assert steps == list(range(100))
    faults = [message for message in received if isinstance(message, WorkerFault)]
    assert sorted(fault.rank for fault in faults) == [0, 1, 2]


def test_a_plan_of_many_megabytes_arrives(group: Group) -> None:
    plan = plan_of(0, num_tokens=2_000_000)
    group.scheduler.publish(plan)
    assert [next_plan(rank) for rank in group.ranks] == [plan] * NUM_RANKS


def test_waking_ends_the_wait_of_either_end(group: Group) -> None:
    for receive, wake in (
        (group.scheduler.receive, group.scheduler.wake),
        (group.ranks[0].receive, group.ranks[0].wake),
    ):
        wake()  # also before anybody waits
        began = time.monotonic()
        assert not receive(30.0)
        timer = threading.Timer(0.2, wake)
        timer.start()
        assert not receive(30.0)
        timer.join()
        assert 0.2 <= time.monotonic() - began < 10


def test_without_news_an_end_waits_as_long_as_it_was_told(group: Group) -> None:
    for receive in (group.scheduler.receive, group.ranks[0].receive):
        began = time.monotonic()
        assert not receive(0.3)
        assert time.monotonic() - began >= 0.29


def test_waking_a_closed_end_does_nothing(group: Group) -> None:
    group.scheduler.close()
    group.scheduler.wake()
    group.ranks[0].close()
    group.ranks[0].wake()


def test_what_was_sent_before_closing_still_arrives(group: Group) -> None:
    fault = WorkerFault(1, 7, 2, "MirrorDriftError", "the plan and the mirror differ")
    group.ranks[2].send(fault)
    group.ranks[2].close()
    assert group.receive(1) == [fault]


# -- ZeroMQ alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_plan_for_a_rank_that_is_gone_raises(host: str | None) -> None:
    group = zmq_group(host)
    for rank, link in enumerate(group.ranks):
        link.send(Heartbeat(1, rank, 0))
    group.receive(NUM_RANKS)
    group.ranks[1].close()

    def publish_until_it_fails() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            group.scheduler.publish(plan_of(0))
            time.sleep(0.01)

    with pytest.raises(LinkError, match="worker 1"):
        publish_until_it_fails()
    group.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("knows", ["nothing", "the scheduler's public key", "all but the secret"])
def test_who_has_no_key_gets_nothing_and_is_not_heard(host: str | None, knows: str) -> None:
    keys = LinkKeys.generate()
    scheduler = ZmqPlanLinkOffer(keys, 1, host).open()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.routing_id = b"rank-0"
    if knows != "nothing":
        own_public, own_secret = zmq.curve_keypair()
        stranger.curve_serverkey = keys.scheduler_public
        stranger.curve_secretkey = own_secret
        is_pretending = knows == "all but the secret"
        stranger.curve_publickey = keys.worker_public if is_pretending else own_public
    stranger.connect(scheduler.address)
    stranger.send(b"\x01\x02\x03")
    try:
        assert not scheduler.receive(0.5)
        assert scheduler.num_bad_frames == 0, "it was let in"
        with pytest.raises(LinkError):
            scheduler.publish(plan_of(0))
        assert not stranger.poll(300)
        # The seat is still free for the one who has the key.
        rank = ZmqWorkerLinkOffer(keys, 0, scheduler.address).open()
        rank.send(Heartbeat(1, 0, 0))
        assert scheduler.receive(DEADLINE_SECONDS) == [Heartbeat(1, 0, 0)]
        rank.close()
    finally:
        context.destroy(linger=0)
        scheduler.close()


def test_a_stranger_at_the_step_path_of_a_running_engine_gets_nothing(app: str) -> None:
    """Neither as a plain socket nor as ZeroMQ without keys; and the engine does not mind."""
    prompt, sampling = [1, 2, 3], SamplingParams(max_tokens=60, seed=3)

    async def run() -> None:
        async with client_of(app, fake_spec("model.model=fake-20ms")) as client:
            place = (await status_of(app)).scheduler_place
            assert place is not None
            sockets = psutil.Process(place.process_id).net_connections("unix")
            (address,) = {end.laddr for end in sockets if "palimpsest-" in end.laddr}
            going = asyncio.create_task(generate(client, request_of(client, "r", prompt, sampling)))
            with socket.socket(socket.AF_UNIX) as plain, zmq.Context() as context:
                plain.settimeout(0.5)
                plain.connect(address.replace("@", "\0", 1))
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
                keyless = context.socket(zmq.DEALER)
                keyless.linger = 0
                keyless.routing_id = b"rank-0"
                keyless.connect(f"ipc://{address}")
                keyless.send(encode(Heartbeat(0, 0, 0)))
                assert not await asyncio.to_thread(keyless.poll, 500), "it was answered"
                said = await asyncio.to_thread(read_all, plain)
                assert len(said) <= ZMTP_GREETING_BYTES, "more than a protocol's greeting"
                keyless.close()
            assert not going.done(), "there were plans all the time"
            answer = await going
            solo = run_solo(tuple(prompt), sampling, MAX_POSITIONS)
            assert tuple(answer.token_ids) == solo.token_ids

    asyncio.run(run())


def read_all(stranger: socket.socket) -> bytes:
    """What comes until nothing has come for a while, or the other end closes."""
    said = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := stranger.recv(4096):
            said += data
    return said


def test_bad_frames_are_counted_and_dropped() -> None:
    keys = LinkKeys.generate()
    scheduler = ZmqPlanLinkOffer(keys, 1).open()
    rank = ZmqWorkerLinkOffer(keys, 0, scheduler.address).open()
    for frames in ([b"\xc1"], [b""], [b"a", b"b"], [b"\x93\x01\x02\x03"]):
        rank._socket.send_multipart(frames)
    rank.send(Heartbeat(1, 0, 3))
    received: list[WorkerMessage] = []
    while not received:
        received = scheduler.receive(1.0)
    assert received == [Heartbeat(1, 0, 3)]
    assert scheduler.num_bad_frames == 4
    scheduler._socket.send_multipart([b"rank-0", b"\xff not a plan"])
    scheduler.publish(plan_of(3))
    assert next_plan(rank) == plan_of(3)
    assert rank.num_bad_frames == 1
    rank.close()
    scheduler.close()


def test_a_frame_beyond_the_limit_is_refused_by_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.links.MAX_FRAME_BYTES", 1000)
    group = zmq_group(None)
    with pytest.raises(LinkError, match="1000"):
        group.scheduler.publish(plan_of(0, num_tokens=500))
    group.close()


def test_keys_are_not_shown() -> None:
    keys = LinkKeys.generate()
    for offer in (ZmqPlanLinkOffer(keys, 1), ZmqWorkerLinkOffer(keys, 0, "ipc://@x")):
        assert keys.worker_secret.decode() not in repr(offer)
        assert keys.scheduler_secret.decode() not in repr(offer)


def test_a_range_without_a_free_port_is_told() -> None:
    keys = LinkKeys.generate()
    first = ZmqPlanLinkOffer(keys, 1, "127.0.0.1", (20123, 20123)).open()
    with pytest.raises(LinkError, match="from 20123 to 20123"):
        ZmqPlanLinkOffer(keys, 1, "127.0.0.1", (20123, 20123)).open()
    first.close()
