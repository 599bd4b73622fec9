"""Messages between the coordinator and client processes: one JSON object per line, over stdin and stdout.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]


class Segment(msgspec.Struct, frozen=True):
    """Sequence of synthetic words. Equal keys give equal words, so that prefixes are shared."""

    key: str
    num_tokens: int


class LoadRequest(msgspec.Struct, frozen=True):
    """One request of a load, with exactly one of text, token_ids and segments as its prompt.

    `arrival` is in seconds from the start of the load. The server chooses the length if `max_tokens` is None.
    """

    index: int
    arrival: float
    max_tokens: int | None
    text: str | None = None
    token_ids: list[int] | None = None
    segments: list[Segment] = []

    @property
    def num_prompt_tokens(self) -> int | None:
        """Intended number of prompt tokens; None for a prompt given as text."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return None if self.text is not None else sum(segment.num_tokens for segment in self.segments)


class Target(msgspec.Struct, frozen=True):
    """Server and options of the requests."""

    url: str
    endpoint: Endpoint
    model: str
    api_key: str | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    timeout: float = 120.0
    words: list[str] = []
    seed: int = 0
    # Tokens that the chat template or begin-of-text adds; synthetic prompts are shortened by this number.
    prompt_overhead: int = 0


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First command, with the target of all requests."""

    target: Target


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Command to send a request at `due`."""

    request: LoadRequest
    due: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Command to cancel the requests in flight; each still gives its record."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Last command: report the cost and exit."""


Command = Setup | Go | Cancel | Finish


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First event: the process can send requests."""


class Record(msgspec.Struct, tag="record"):
    """Result of one request.

    `error` is None for a complete stream ([DONE] after a finish reason), otherwise one of `http_429` (or another
    status), `connect`, `timeout`, `truncated`, `stream_error`, `bad_frame`, `interrupted`, `client`.
    """

    index: int
    due: float
    sent: float
    done: float
    frame_times: list[float] = []  # arrival of each frame with text
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    tokens_from_usage: bool = False  # False: the server sent no usage and frames were counted
    finish_reason: str | None = None
    status: int | None = None
    retry_after: str | None = None
    error: str | None = None
    message: str = ""


class Cost(msgspec.Struct, frozen=True, tag="cost"):
    """CPU seconds of a client process from its setup to its end."""

    cpu_seconds: float


Event = Ready | Record | Cost

_encoder = msgspec.json.Encoder()
command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

# A record of a stream of 100,000 tokens has about 2 MB, and a prompt can be as long as a request body.
MAX_LINE_BYTES = 64 << 20


def encode_line(message: Command | Event) -> bytes:
    """Encode a message as one line, including the newline."""
    return _encoder.encode(message) + b"\n"
