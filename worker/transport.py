"""ROUTER socket of the worker: conversion of frames to messages and back, and the connected gateways.

It knows gateways, leases and sequence numbers, and no requests. Malformed messages are counted and dropped. One thread
uses it, except for `wake`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zmq

from shared import messages, sockets
from shared.errors import WireError
from shared.log import get_logger
from worker.stats import Counters

LEASE_SECONDS = 10.0
"""Seconds of silence after which a gateway (which pings every second) and its requests are dropped."""

LONGEST_PASS_SECONDS = 2.0
"""Largest time between two checks of the leases that counts as silence.

After a longer one (a long step, a SIGSTOP), messages of the gateways may still be unread, some of them in the kernel.
"""

MAX_MESSAGES_PER_PASS = 512
"""Messages read before the engine computes the next step, so that a flood cannot prevent it."""

_FLUSH_MS = 500


class BrokenSubmit(msgspec.Struct, tag="submit", frozen=True):
    """Readable part of a Submit that violates a limit: enough to tell its gateway that it has ended."""

    request_id: messages.RequestId
    choice: Annotated[int, msgspec.Meta(ge=0, lt=messages.MAX_CHOICES)] = 0
    num_choices: Annotated[int, msgspec.Meta(ge=1, le=messages.MAX_CHOICES)] = 1


_broken_submit_decoder = msgspec.msgpack.Decoder(BrokenSubmit)

log = get_logger("worker.transport")


@dataclass(slots=True)
class _Gateway:
    sequence: int
    last_heard: float


class Transport:
    """One bound socket.

    Args:
        endpoint: Endpoint that `start` binds.
        epoch: Epoch of this worker process, part of every Steps message.
        counters: Counters of dropped messages and gateways.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self, endpoint: str, epoch: str, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.endpoint = endpoint
        self.epoch = epoch
        self._counters = counters
        self._clock = clock
        self._gateways: dict[bytes, _Gateway] = {}
        self._lost: list[bytes] = []
        self._last_look = clock()
        self._socket: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self) -> None:
        """Bind the socket. Raises ConfigurationError if that is not possible."""
        self._socket = sockets.make_router(zmq.Context(), self.endpoint)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def close(self) -> None:
        """Send queued messages for at most half a second, and unbind. Idempotent."""
        if self._socket is not None:
            context = self._socket.context
            self._socket.close(_FLUSH_MS)
            context.term()
            self._socket = None
        # A late `wake` must not write to a reused descriptor.
        fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)
        if self.endpoint.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(self.endpoint.removeprefix("ipc://"))

    def wake(self) -> None:
        """End a `wait`. Signal handlers and other threads may call this."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: already closed
            os.eventfd_write(self._wake_fd, 1)

    def wait(self, seconds: float) -> None:
        """Return when a message has arrived, after `wake`, or after the time."""
        # A poller of the socket checks for messages before it sleeps. The descriptor alone does not suffice: it signals
        # a message once, and sending may have consumed the signal.
        for source, _ in self._poller.poll(int(seconds * 1000)):
            if source == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)

    def receive(self) -> list[tuple[bytes, messages.GatewayMessage | BrokenSubmit]]:
        """Return received messages with the sender's identity; at most MAX_MESSAGES_PER_PASS."""
        received: list[tuple[bytes, messages.GatewayMessage | BrokenSubmit]] = []
        if self._socket is None:
            return received
        now = self._clock()
        for _ in range(MAX_MESSAGES_PER_PASS):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append((identity, _decode(frames)))
            except WireError:
                self._counters.malformed_messages_total += 1
                continue
            gateway = self._gateways.get(identity)
            if gateway is not None:
                gateway.last_heard = now
        return received

    def welcome(self, identity: bytes, message: messages.WorkerMessage) -> None:
        """Register a gateway, with step numbers from 1, and answer its Hello."""
        self.forget(identity)
        self._gateways[identity] = _Gateway(0, self._clock())
        self.send(identity, message)

    def forget(self, identity: bytes) -> None:
        """Unregister a gateway. It will not be reported as lost: the caller handles its requests."""
        self._gateways.pop(identity, None)
        self._lost = [who for who in self._lost if who != identity]

    def knows(self, identity: bytes) -> bool:
        """Return True if the gateway has sent a hello and has not been dropped since."""
        return identity in self._gateways

    @property
    def num_gateways(self) -> int:
        """Number of connected gateways."""
        return len(self._gateways)

    def take_lost(self) -> list[bytes]:
        """Return the gateways dropped since the last call: silent past their lease, or unable to receive messages."""
        now = self._clock()
        unseen = now - self._last_look - LONGEST_PASS_SECONDS
        self._last_look = now
        if unseen > 0:
            for gateway in self._gateways.values():
                gateway.last_heard += unseen
        limit = now - LEASE_SECONDS
        for identity in [who for who, gateway in self._gateways.items() if gateway.last_heard < limit]:
            self._give_up(identity, "silent")
        lost, self._lost = self._lost, []
        return lost

    def _give_up(self, identity: bytes, reason: str) -> None:
        if self._gateways.pop(identity, None) is not None:
            self._lost.append(identity)
            self._counters.gateways_dropped_total += 1
            log.warning("gateway_dropped", gateway=identity.decode("utf-8", "replace"), reason=reason)

    def send_outputs(self, outputs: list[tuple[bytes, messages.Output]]) -> None:
        """Send one Steps message per gateway. Outputs for gateways that are gone are dropped."""
        by_gateway: dict[bytes, list[messages.Output]] = {}
        for identity, output in outputs:
            by_gateway.setdefault(identity, []).append(output)
        for identity, items in by_gateway.items():
            gateway = self._gateways.get(identity)
            if gateway is None:
                continue
            gateway.sequence += 1
            self.send(identity, messages.Steps(epoch=self.epoch, sequence=gateway.sequence, outputs=items))

    def send(self, identity: bytes, message: messages.WorkerMessage) -> None:
        """Queue a message. A gateway whose queue is full or whose connection is gone is dropped."""
        if self._socket is None:
            return
        try:
            self._socket.send_multipart([identity, messages.encode_message(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._give_up(identity, zmq.strerror(error.errno or 0))


def _decode(frames: list[bytes]) -> messages.GatewayMessage | BrokenSubmit:
    """Decode a message. Raises WireError if it cannot even be answered."""
    if len(frames) != 1:
        raise WireError("a message must have one frame")
    try:
        return messages.decode_gateway_message(frames[0])
    except WireError as error:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError):
            return _broken_submit_decoder.decode(frames[0])
        raise error from None
