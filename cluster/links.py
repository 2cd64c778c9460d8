"""Plans to the workers and results back over ZeroMQ: 0.2 ms there and back for three ranks.

The scheduler binds one ROUTER socket for each epoch, every rank connects a DEALER whose routing
id is its rank. What is sent to a rank that is not connected raises instead of vanishing
(ROUTER_MANDATORY), nothing is ever dropped for being too much (no high-water mark: the window
of steps bounds it), and each rank sees the order of publishing.

What crosses is msgpack of the closed message set, encrypted and authenticated by CURVE with keys
that live as long as the epoch. A frame that is none of ours is counted and dropped.
"""

import contextlib
import ipaddress
import logging
import os
import secrets
import threading
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from scheduler.errors import LinkError
from scheduler.messages import (
    StepPlan,
    WorkerMessage,
    decode,
    decode_worker_message,
    encode,
)

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 << 20
"""Twice the largest plan that can occur: all prompts of a step in full."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 10_000
_LINGER_MS = 100  # a scheduler that has closed its end would be waited for in vain


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """CURVE keys of one epoch, z85. Whoever holds `worker_secret` may speak as a worker."""

    scheduler_public: bytes
    scheduler_secret: bytes = field(repr=False)
    worker_public: bytes
    worker_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "LinkKeys":
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class ZmqPlanLinkOffer:
    """Opens the scheduler's end. `host` None: all ranks are on the scheduler's machine."""

    keys: LinkKeys
    num_ranks: int
    host: str | None = None
    ports: tuple[int, int] = (20000, 29999)
    """The first and the last that may be bound; read with a `host` only."""

    def open(self) -> "ZmqPlanLink":
        """Raises LinkError if no port of the range is free."""
        return ZmqPlanLink(self)


@dataclass(frozen=True, slots=True)
class ZmqWorkerLinkOffer:
    """Opens the end of `rank`."""

    keys: LinkKeys
    rank: int
    address: str

    def open(self) -> "ZmqWorkerLink":
        return ZmqWorkerLink(self)


class ZmqPlanLink:
    """The scheduler's end: a `scheduler.ports.PlanLink`."""

    def __init__(self, offer: ZmqPlanLinkOffer) -> None:
        self._ranks = [_routing_id(rank) for rank in range(offer.num_ranks)]
        self.num_bad_frames = 0
        self._waker = _Waker()
        self._context = zmq.Context()
        # Who does not hold the workers' secret key is refused before it can say anything.
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", _OnlyTheWorkers(offer.keys.worker_public))
        self._socket = socket = self._context.socket(zmq.ROUTER)
        _configure(socket, is_remote=offer.host is not None)
        socket.router_mandatory = True
        socket.curve_server = True
        socket.curve_secretkey = offer.keys.scheduler_secret
        socket.curve_publickey = offer.keys.scheduler_public
        try:
            self.address = _bind(socket, offer.host, offer.ports)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._waker.file_descriptor, zmq.POLLIN)

    def publish(self, plan: StepPlan) -> None:
        data = encode(plan)
        if len(data) > MAX_FRAME_BYTES:
            raise LinkError(
                f"step {plan.step_id} has {len(data)} bytes, and a frame holds {MAX_FRAME_BYTES}"
            )
        for rank, routing_id in enumerate(self._ranks):
            try:
                self._socket.send_multipart((routing_id, data), zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise LinkError(
                    f"step {plan.step_id} cannot be sent to worker {rank}: {error}"
                ) from error

    def receive(self, timeout_seconds: float) -> list[WorkerMessage]:
        messages: list[WorkerMessage] = []
        for ready, _ in self._poller.poll(int(timeout_seconds * 1e3)):
            if ready == self._waker.file_descriptor:
                self._waker.clear()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return messages
            message = self._decode(frames)
            if message is not None:
                messages.append(message)

    def _decode(self, frames: list[bytes]) -> WorkerMessage | None:
        try:
            routing_id, data = frames
            message = decode_worker_message(data)
        except ValueError as error:  # msgspec's errors are ValueErrors too
            self.num_bad_frames += 1
            logger.warning("dropped a bad frame, number %d: %s", self.num_bad_frames, error)
            return None
        return message if routing_id in self._ranks else None

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        if self._context.closed:
            return
        self._socket.close(linger=0)
        self._guard.stop()
        self._context.term()
        self._waker.close()


class ZmqWorkerLink:
    """A rank's end: a `worker.ports.WorkerLink`."""

    def __init__(self, offer: ZmqWorkerLinkOffer) -> None:
        self.num_bad_frames = 0
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        _configure(socket, is_remote=not offer.address.startswith("ipc:"))
        socket.routing_id = _routing_id(offer.rank)
        socket.curve_serverkey = offer.keys.scheduler_public
        socket.curve_publickey = offer.keys.worker_public
        socket.curve_secretkey = offer.keys.worker_secret
        socket.connect(offer.address)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._waker.file_descriptor, zmq.POLLIN)

    def receive(self, timeout_seconds: float) -> StepPlan | None:
        with contextlib.suppress(zmq.Again):
            return self._decode(self._socket.recv(zmq.DONTWAIT))
        ready = dict(self._poller.poll(int(timeout_seconds * 1e3)))
        if self._waker.file_descriptor in ready:
            self._waker.clear()
        if self._socket in ready:
            return self._decode(self._socket.recv())
        return None

    def _decode(self, data: bytes) -> StepPlan | None:
        try:
            return decode(data, StepPlan)
        except msgspec.DecodeError as error:
            # The gap in the step ids that follows is what ends the epoch.
            self.num_bad_frames += 1
            logger.warning("dropped a bad frame, number %d: %s", self.num_bad_frames, error)
            return None

    def send(self, message: WorkerMessage) -> None:
        self._socket.send(encode(message))

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        if self._context.closed:
            return
        self._socket.close(linger=_LINGER_MS)
        self._context.term()
        self._waker.close()


class _OnlyTheWorkers:
    """Tells the authenticator whose public keys are welcome."""

    def __init__(self, worker_public: bytes) -> None:
        self._worker_public = worker_public

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._worker_public)


class _Waker:
    """A file descriptor that becomes readable when some thread says so."""

    def __init__(self) -> None:
        self.file_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The number of a closed descriptor soon belongs to something else.
        self._open = threading.Lock()
        self._is_open = True

    def wake(self) -> None:
        with self._open:
            if self._is_open:
                os.eventfd_write(self.file_descriptor, 1)

    def clear(self) -> None:
        os.eventfd_read(self.file_descriptor)

    def close(self) -> None:
        with self._open:
            self._is_open = False
            os.close(self.file_descriptor)


def _routing_id(rank: int) -> bytes:
    return b"rank-%d" % rank  # an id must not begin with a zero byte


def _configure(socket: "zmq.Socket[bytes]", *, is_remote: bool) -> None:
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    if is_remote:
        # A machine that vanished without a word is noticed within ten seconds.
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS


def _bind(socket: "zmq.Socket[bytes]", host: str | None, ports: tuple[int, int]) -> str:
    if host is None:
        # The abstract namespace of Linux: no file that a killed process would leave behind.
        address = f"ipc://@palimpsest-{secrets.token_hex(8)}"
        socket.bind(address)
        return address
    first, last = ports
    if ipaddress.ip_address(host).version == 6:
        socket.ipv6 = True
        host = f"[{host}]"
    try:
        port = socket.bind_to_random_port(f"tcp://{host}", first, last + 1, max_tries=200)
    except zmq.ZMQBindError as error:
        raise LinkError(
            f"no free port on {host} for the link to the workers, from {first} to {last}"
        ) from error
    return f"tcp://{host}:{port}"
