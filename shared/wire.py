"""Encoding and decoding of messages (MessagePack by msgspec), with limits. Decoding never evaluates data."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.errors import WireError
from shared.messages import GatewayMessage, WorkerMessage

_T = TypeVar("_T")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_gateway_decoder: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def encode(message: GatewayMessage | WorkerMessage) -> bytes:
    """Encode one message as the payload of one frame."""
    return _encoder.encode(message)


def decode_gateway_message(frame: bytes | memoryview) -> GatewayMessage:
    """Decode a frame that a worker received. Raises WireError if it is not a GatewayMessage."""
    return _decode(_gateway_decoder, frame)


def decode_worker_message(frame: bytes | memoryview) -> WorkerMessage:
    """Decode a frame that a gateway received. Raises WireError if it is not a WorkerMessage."""
    return _decode(_worker_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes | memoryview) -> _T:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"malformed message: {error}") from error
