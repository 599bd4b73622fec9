"""What coordinator and client processes say to each other: one JSON object a line, over stdin and stdout.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]


class Segment(msgspec.Struct, frozen=True):
    """A run of synthetic words. Equal keys give equal words, so that prefixes are really shared."""

    key: str
    num_tokens: int


class LoadRequest(msgspec.Struct, frozen=True):
    """One request of a load. Exactly one of text, token_ids and segments is its prompt.

    `arrival` is in seconds from the start of the load. `max_tokens` None leaves the length to the server.
    """

    index: int
    arrival: float
    max_tokens: int | None
    text: str | None = None
    token_ids: list[int] | None = None
    segments: list[Segment] = []

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens that the prompt should have; None where only its text is known."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return None if self.text is not None else sum(segment.num_tokens for segment in self.segments)


class Target(msgspec.Struct, frozen=True):
    """Where requests go and how they are written."""

    url: str
    endpoint: Endpoint
    model: str
    api_key: str | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    timeout: float = 120.0
    words: list[str] = []
    seed: int = 0
    # Tokens that chat template or begin-of-text add to a prompt; synthetic prompts are shortened by them.
    prompt_overhead: int = 0


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First command."""

    target: Target


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Build this request's body; it is sent later."""

    request: LoadRequest


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Send a prepared request at `due`."""

    index: int
    due: float


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """Answer `Ready`: all that came before is done."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Break off what is in flight; each request still gives its record."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Nothing more comes: say what it cost and exit."""


Command = Setup | Prepare | Sync | Go | Cancel | Finish


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The client has done what came before a `Sync`."""


class Record(msgspec.Struct, tag="record"):
    """What became of one request.

    `error` is None for a stream that ended as it should ([DONE] after a finish reason), else a kind: `http_429`,
    `connect`, `timeout`, `truncated`, `stream_error`, `bad_frame`, `interrupted`.
    """

    index: int
    due: float
    sent: float
    done: float
    frame_times: list[float] = []  # arrival of each frame that carried text
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
    """Processor seconds that a client process used between its setup and its end."""

    cpu_seconds: float


Event = Ready | Record | Cost

_encoder = msgspec.json.Encoder()
command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

# A record of a 100,000-token stream is some 2 MB; a prompt of text can be as long as a body may be.
MAX_LINE_BYTES = 64 << 20


def encode_line(message: Command | Event) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"
