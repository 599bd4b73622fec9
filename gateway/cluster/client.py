"""Connection of the gateway to one process of a worker: socket, liveness, streams.

A link is used once. After it is lost, the registry creates a new one. Everything runs on the event loop, and nothing
here awaits. ZMQ_FD is edge-triggered, so the socket is read until it is empty whenever the loop reports it, and EVENTS
is checked after every send.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared import sockets
from shared.errors import UnavailableError, WireError, WorkerLostError
from shared.log import get_logger
from shared.messages import (
    PROTOCOL_VERSION,
    Bundle,
    BundleRequest,
    Cancel,
    GatewayMessage,
    Hello,
    Output,
    Ping,
    Pong,
    Steps,
    Submit,
    Welcome,
    WorkerFacts,
    WorkerStats,
    decode_worker_message,
    encode_message,
)

MAX_FRAMES_PER_TURN = 256
"""Frames read before other callbacks of the loop run."""
REFRESH_SECONDS = 0.05
"""Seconds after the end of the last stream at which the worker is pinged once more, so that its gauges soon show that
it is idle.
"""
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_MAX_RECENT = 4096
_MAX_UNANSWERED = 64
_MAX_DELAYED_CANCELS = 65_536

log = get_logger("gateway.cluster")


@dataclass(frozen=True)
class Liveness:
    """Intervals in seconds: between pings, until a worker without a pong is not ready, and until it is lost."""

    ping_interval: float = 1.0
    not_ready_after: float = 5.0
    lost_after: float = 15.0


@dataclass(slots=True)
class LinkCounters:
    """Errors on the links of a gateway. Each counted message was dropped, except those after a gap.

    Attributes:
        malformed: Messages that cannot be decoded, have a wrong number of frames, or are unexpected.
        wrong_epoch: Messages of another process of the worker.
        repeated: Step messages whose number was already received.
        sequence_gaps: Gaps in the numbers of step messages; each failed the streams of a link.
        unknown_ids: Outputs of requests that this gateway does not have, or no longer.
        send_failures: Messages that were not sent because the queue to the worker was full.
    """

    malformed: int = 0
    wrong_epoch: int = 0
    repeated: int = 0
    sequence_gaps: int = 0
    unknown_ids: int = 0
    send_failures: int = 0

    @property
    def wire_errors(self) -> int:
        """Messages that were dropped as faulty, and gaps where messages were missing."""
        return self.malformed + self.wrong_epoch + self.repeated + self.sequence_gaps


class Stream(Protocol):
    """Consumer of the outputs of one submitted request. Neither method may raise or block."""

    def on_output(self, output: Output) -> None:
        """Handle an output of the request."""

    def on_lost(self, error: WorkerLostError) -> None:
        """Handle the loss of the link. Called once; the link then forgets the stream."""


@dataclass(slots=True)
class _Submission:
    stream: Stream
    num_choices: int
    waiting_tokens: int


class WorkerLink:
    """DEALER socket connected to one worker.

    Args:
        endpoint: ZeroMQ endpoint of the worker.
        gateway_id: Identity of this gateway on the socket.
        liveness: Intervals of the pings.
        counters: Counters of errors, which links may share.
        on_lost: Called once when the link is lost, after its streams were notified.
        on_bundle: Called with each text bundle that arrives.
        on_welcome: Called when the worker has introduced itself; `facts` is set from then on.

    Attributes:
        foreign_sequences: Choices of other gateways in the worker's last report.
        foreign_tokens: Waiting prompt tokens of other gateways in that report.
        lost_reason: Reason of the loss, for logs; empty while the link is alive.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        gateway_id: str,
        *,
        liveness: Liveness,
        counters: LinkCounters,
        on_welcome: Callable[[WorkerLink], None],
        on_bundle: Callable[[WorkerLink, Bundle], None],
        on_lost: Callable[[WorkerLink], None],
    ) -> None:
        self.endpoint = endpoint
        parsed = sockets.parse_endpoint(endpoint)
        self.name = endpoint if parsed is None else str(parsed[0])
        self.epoch = "" if parsed is None else parsed[1]
        self.facts: WorkerFacts | None = None
        self.stats = WorkerStats()
        self.counters = counters
        self._context = context
        self._gateway_id = gateway_id
        self._liveness = liveness
        self._on_welcome, self._on_bundle, self._on_lost = on_welcome, on_bundle, on_lost
        self._submissions: dict[str, _Submission] = {}
        self._num_sequences = 0
        self._waiting_tokens = 0
        # Requests that ended on this side. Late outputs for them are expected.
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._delayed_cancels: list[Cancel] = []
        self._sequence = 0
        self._nonce = 0
        # By nonce: this gateway's sequences and waiting tokens that the worker knew when it was pinged.
        self._unanswered: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.foreign_sequences = 0
        self.foreign_tokens = 0
        self._last_pong = time.monotonic()
        self.lost_reason = ""
        self._loop: asyncio.AbstractEventLoop
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._fds: list[int] = []
        self._tick_handle: asyncio.TimerHandle | None = None
        self._drain_scheduled = False
        self._inside_message = False
        self._refresh_scheduled = False

    @property
    def lost(self) -> bool:
        """True if the link is lost."""
        return self.lost_reason != ""

    @property
    def ready(self) -> bool:
        """True if the worker recently answered a ping through its engine loop."""
        return not self.lost and self.facts is not None and self._silent_seconds() <= self._liveness.not_ready_after

    @property
    def num_sequences(self) -> int:
        """Number of this gateway's choices at the worker, or the number that the worker reported if it is larger."""
        return max(self._num_sequences, self.stats.num_running + self.stats.num_waiting)

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens without an output yet, or the number that the worker reported if it is larger."""
        return max(self._waiting_tokens, self.stats.num_waiting_tokens)

    @property
    def page_size(self) -> int:
        """Tokens per page of the worker's KV cache."""
        return self.facts.page_size if self.facts is not None else 1

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the worker runs at a time."""
        return self.facts.max_num_seqs if self.facts is not None else 0

    def start(self) -> None:
        """Connect and send the hello message; the rest follows on the running loop.

        Raises:
            ConfigurationError: The endpoint is invalid.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = sockets.make_dealer(self._context, self.endpoint, self._gateway_id.encode())
        self._monitor = self._socket.get_monitor_socket(_LOST_EVENTS)
        for socket, callback in ((self._socket, self._drain), (self._monitor, self._drain_monitor)):
            fd = int(socket.getsockopt(zmq.FD))
            self._loop.add_reader(fd, callback)
            self._fds.append(fd)
        self._send(Hello(version=PROTOCOL_VERSION, gateway_id=self._gateway_id))
        self._tick_handle = self._loop.call_later(self._liveness.ping_interval, self._tick)
        # The sockets signal nothing until a first read found them empty.
        self._schedule_drain()
        self._drain_monitor()

    def close(self) -> None:
        """Give the worker up immediately and fail its streams. Idempotent."""
        self._lose("closed")

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost_reason = reason
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(0)
        if self._monitor is not None:
            self._monitor.close(0)
        self._fail_streams("The worker that ran this request was lost.", cancel=False)
        self._on_lost(self)

    def _fail_streams(self, message: str, *, cancel: bool) -> None:
        submissions = {request_id: self._remove(request_id) for request_id in list(self._submissions)}
        for request_id, submission in submissions.items():
            if cancel:
                self._cancel(Cancel(request_id))
            if submission is not None:
                submission.stream.on_lost(WorkerLostError(message))

    def submit(self, message: Submit, stream: Stream) -> None:
        """Send a request. Its outputs go to `stream` until `forget`.

        Raises:
            UnavailableError: The request cannot be sent.
        """
        if self.lost:
            raise UnavailableError("The worker was lost.")
        if not self._send(message):
            raise UnavailableError("The worker's queue is full.")
        self._submissions[message.request_id] = _Submission(stream, message.num_choices, len(message.token_ids))
        self._num_sequences += message.num_choices
        self._waiting_tokens += len(message.token_ids)

    def cancel_choice(self, request_id: str, choice: int) -> None:
        """End one choice at the worker. Outputs of the other choices still arrive."""
        self._cancel(Cancel(request_id, choice))

    def forget(self, request_id: str, *, cancel: bool) -> None:
        """End a stream on this side and, with `cancel`, at the worker. Unknown ids are ignored."""
        if self._remove(request_id) is not None and cancel:
            self._cancel(Cancel(request_id))

    def request_bundle(self, bundle_hash: str) -> bool:
        """Request a text bundle; return False if the message could not be sent."""
        return self._send(BundleRequest(bundle_hash))

    def _cancel(self, message: Cancel) -> None:
        if self.lost or self._send(message):
            return
        # The queue is full. A later tick tries again, so that the worker does not continue a request that nobody reads.
        if len(self._delayed_cancels) < _MAX_DELAYED_CANCELS:
            self._delayed_cancels.append(message)

    def _remove(self, request_id: str) -> _Submission | None:
        submission = self._submissions.pop(request_id, None)
        if submission is not None:
            self._num_sequences -= submission.num_choices
            self._waiting_tokens -= submission.waiting_tokens
            self._remember(request_id)
            if not self._submissions:
                self.refresh()
        return submission

    def refresh(self) -> None:
        """Request a report soon, because the last one may be out of date."""
        if not self._refresh_scheduled and not self.lost:
            self._refresh_scheduled = True
            self._loop.call_later(REFRESH_SECONDS, self._refresh)

    def _refresh(self) -> None:
        self._refresh_scheduled = False
        if not self.lost:
            self._ping()

    def _remember(self, request_id: str) -> None:
        self._recent[request_id] = None
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def _send(self, message: GatewayMessage) -> bool:
        if self._socket is None or self.lost:
            return False
        try:
            self._socket.send(encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counters.send_failures += 1
            return False
        finally:
            self._schedule_drain()
        return True

    def _schedule_drain(self) -> None:
        """Check EVENTS again after a send, which may have consumed the edge of an incoming message."""
        if not self._drain_scheduled and self._events() & zmq.POLLIN:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _events(self) -> int:
        return 0 if self._socket is None or self.lost else int(self._socket.getsockopt(zmq.EVENTS))

    def _drain(self) -> None:
        """Read until the socket is empty or MAX_FRAMES_PER_TURN frames were read."""
        self._drain_scheduled = False
        for _ in range(MAX_FRAMES_PER_TURN):
            if self.lost or self._socket is None:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_first = not self._inside_message
            self._inside_message = bool(self._socket.getsockopt(zmq.RCVMORE))
            if is_first and not self._inside_message:
                self._on_frame(frame)
            elif is_first:
                # Valid messages have one frame. Skip the rest of this one.
                self.counters.malformed += 1
            # Usually this message was the only one. Checking is faster than catching an exception.
            if not self._events() & zmq.POLLIN:
                return
        self._schedule_drain()

    def _drain_monitor(self) -> None:
        while not self.lost and self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] & _LOST_EVENTS:
                self._read_to_the_end()
                self._lose("disconnected")

    def _read_to_the_end(self) -> None:
        """Read what the worker sent before it ended."""
        for _ in range(2 * sockets.HIGH_WATER_MARK // MAX_FRAMES_PER_TURN):
            if self.lost or not self._events() & zmq.POLLIN:
                return
            self._drain()

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = decode_worker_message(frame)
        except WireError:
            self.counters.malformed += 1
            return
        if isinstance(message, Steps | Pong) and (self.facts is None or message.epoch != self.epoch):
            # Before Welcome the message is left over; later it shows that the worker was restarted.
            self.counters.wrong_epoch += 1
            if self.facts is not None:
                self._lose("it was restarted")
        elif isinstance(message, Steps):
            self._on_steps(message)
        elif isinstance(message, Pong):
            self._on_pong(message)
        elif isinstance(message, Welcome):
            self._on_hello_answer(message)
        else:
            self._on_bundle(self, message)

    def _on_hello_answer(self, message: Welcome) -> None:
        if self.facts is not None:
            self.counters.malformed += 1
            return
        if message.version != PROTOCOL_VERSION:
            self.counters.malformed += 1
            self._lose(f"it speaks protocol version {message.version}, not {PROTOCOL_VERSION}")
            return
        if self.epoch and message.epoch != self.epoch:
            self.counters.wrong_epoch += 1
            self._lose("it is not the process that its socket's name announces")
            return
        self.epoch = message.epoch
        self.facts = message.facts
        self._last_pong = time.monotonic()
        self._ping()
        self._on_welcome(self)

    def _on_steps(self, message: Steps) -> None:
        expected = self._sequence + 1
        if message.sequence < expected:
            self.counters.repeated += 1
            return
        self._sequence = message.sequence
        if message.sequence > expected:
            self.counters.sequence_gaps += 1
            log.error("messages_lost", worker=self.name, expected=expected, got=message.sequence)
            self._fail_streams(
                "Messages of the worker that ran this request were lost. Send the request again.", cancel=True
            )
        for output in message.outputs:
            submission = self._submissions.get(output.request_id)
            if submission is None:
                self._on_unknown(output)
                continue
            self._waiting_tokens -= submission.waiting_tokens
            submission.waiting_tokens = 0
            submission.stream.on_output(output)

    def _on_unknown(self, output: Output) -> None:
        if output.request_id in self._recent:
            return
        self.counters.unknown_ids += 1
        if output.finish is None and 0 < len(output.request_id) <= 128:
            # The worker runs a request that nobody here waits for: cancel it.
            self._remember(output.request_id)
            self._cancel(Cancel(output.request_id))

    def _on_pong(self, message: Pong) -> None:
        if message.nonce not in self._unanswered:
            self.counters.malformed += 1
            return
        own_sequences, own_tokens = self._unanswered.pop(message.nonce)
        self._last_pong = time.monotonic()
        self.stats = stats = message.stats
        # Requests that ended meanwhile make these figures too low, never too high, so no request is refused because of
        # finished ones.
        self.foreign_sequences = max(0, stats.num_running + stats.num_waiting - own_sequences)
        self.foreign_tokens = max(0, stats.num_waiting_tokens - own_tokens)

    def _ping(self) -> None:
        self._nonce += 1
        self._unanswered[self._nonce] = self._num_sequences, self._waiting_tokens
        if len(self._unanswered) > _MAX_UNANSWERED:
            self._unanswered.popitem(last=False)
        self._send(Ping(self._nonce))

    def _tick(self) -> None:
        if self.facts is not None and self._silent_seconds() > self._liveness.lost_after:
            # This event loop may have been busy itself, with pongs unread.
            self._read_to_the_end()
        if self.lost:
            return
        if self.facts is not None:
            silent = self._silent_seconds()
            if silent > self._liveness.lost_after:
                self._lose(f"silent for {silent:.1f} s")
                return
            self._ping()
        cancels, self._delayed_cancels = self._delayed_cancels, []
        for message in cancels:
            self._cancel(message)
        self._tick_handle = self._loop.call_later(self._liveness.ping_interval, self._tick)

    def _silent_seconds(self) -> float:
        return time.monotonic() - self._last_pong
