"""All messages between gateway and worker, as typed structs, and their encoding (MessagePack by msgspec).

The gateway's DEALER sends GatewayMessages, and the worker's ROUTER answers with WorkerMessages. One prompt is one
`Submit`. Each of its `num_choices` choices ends with exactly one `Output` whose `finish` is set, whatever happens.
Steps to one gateway are numbered from 1 after each `Hello`, so that a lost message shows as a gap. `epoch` identifies
one process of the worker, so that messages of an earlier process are dropped. Decoding applies limits and never
evaluates data.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.errors import WireError
from shared.sampling_params import SamplingParams

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TOKENS_PER_MESSAGE = 4_194_304
MAX_CHOICES = 128
MAX_GRAMMAR = 1_048_576
"""Maximum number of characters of a grammar."""

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_PER_MESSAGE)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
ShortText = Annotated[str, Meta(max_length=1024)]
Pooling = Literal["last", "mean"]
"""Pooling of the hidden states of a prompt: the last token's state, or the mean over all tokens."""


class FinishReason(enum.StrEnum):
    """Reason of a choice's end. STOP, LENGTH and REPETITION are successes; the gateway refines STOP by stop strings."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


# ---- gateway to worker -----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message on a connection, answered by Welcome.

    Requests of an earlier process of this gateway are aborted.
    """

    version: int
    gateway_id: ShortText


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """One prompt to run.

    Attributes:
        request_id: Unique id of the request.
        model: Name of the model.
        token_ids: Prompt, followed after a resumption by the tokens that were already emitted.
        num_prompt_tokens: End of the prompt in token_ids; penalties, min_tokens and max_tokens count from there.
        sampling: Sampling parameters.
        choice: Index of the first choice.
        num_choices: Choices choice .. choice + num_choices - 1 are generated from the prompt.
        grammar: Grammar of the generated tokens for llguidance (Lark, or JSON with several grammars); empty for
            none.
        salt: Salt of the page hashes; tenants with different salts never share cached pages.
        tenant: Opaque name of the client, for fairness.
        priority: Requests with a lower value run first.
        deadline: Unix time in seconds after which a request that still waits is dropped.
        speculative: True if tokens may be drafted. The text does not depend on it.
        prediction: Expected output as tokens, from which drafts are taken.
        pooling: Makes the request an embedding of token_ids, all of which are prompt. Nothing is generated, and
            `sampling` has no effect. The request has one choice, no grammar, no prompt_logprobs and no prediction, and
            may be max_model_len tokens long.
    """

    request_id: RequestId
    model: ShortText
    token_ids: TokenIds
    num_prompt_tokens: Count
    sampling: SamplingParams
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] = 0
    num_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    tenant: ShortText = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    deadline: float | None = None
    speculative: bool = True
    prediction: TokenIds = []
    pooling: Pooling | None = None


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End a request, or one choice of it. Unknown and finished ids are ignored."""

    request_id: RequestId
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] | None = None


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Request a Pong through the engine loop and renew the lease on this gateway's requests."""

    nonce: Count


class BundleRequest(msgspec.Struct, tag="bundle_request", frozen=True):
    """Request the text bundle with this hash."""

    bundle_hash: ShortText


GatewayMessage = Hello | Submit | Cancel | Ping | BundleRequest


# ---- worker to gateway -----------------------------------------------------------------------------------------


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties and limits of a worker, fixed for one epoch.

    Attributes:
        model_names: Names of the model, the canonical one first.
        max_model_len: Maximum tokens of prompt and completion together.
        max_num_seqs: Sequences that run at a time.
        num_pages: Pages of the KV cache.
        page_size: Tokens per page.
        vocab_size: Size of the vocabulary; token ids are below it.
        eos_token_ids: Union of all places in which the model declares them.
        model_hash: Hash of configuration, tensor table, sizes and sampled blocks; equal for equal weights.
        bundle_hash: SHA-256 (hex) of the text bundle.
        created: Unix time of the model file, for /v1/models.
        tool_call_parser: Format of tool calls; `auto`: according to the chat template; `none`: plain text.
        reasoning_parser: Format of reasoning, likewise.
        speculative_method: Source of drafts; `off` for none.
        hidden_size: Number of values of an embedding.
        pooling: Default pooling of embeddings; one of Pooling.
    """

    model_names: list[ShortText]
    max_model_len: Count
    num_pages: Count
    page_size: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    vocab_size: Count
    eos_token_ids: list[TokenId]
    model_hash: ShortText
    bundle_hash: ShortText
    device: ShortText = "cpu"
    dtype: ShortText = "float32"
    created: Count = 0
    tool_call_parser: ShortText = "auto"
    reasoning_parser: ShortText = "auto"
    speculative_method: ShortText = "off"
    hidden_size: Count = 0
    pooling: ShortText = "last"


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Answer to Hello."""

    version: int
    epoch: ShortText
    facts: WorkerFacts


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the raw logits (before temperature and filters).

    Attributes:
        token_id: The token at this position.
        logprob: Its log-probability; None for a prompt's first token. Never infinite: clamped to -9999.
        rank: 1 for the likeliest token.
        top_ids: Likeliest tokens, best first; as many as requested.
        top_logprobs: Their log-probabilities.
    """

    token_id: TokenId
    logprob: float | None
    rank: Count
    top_ids: list[TokenId]
    top_logprobs: list[float]


class Finish(msgspec.Struct, frozen=True):
    """End of a choice.

    Attributes:
        reason: Reason of the end.
        stop_token_id: For reason STOP, the id that ended it; it is the last of the emitted token_ids.
        message: For reason ERROR, a message for the client.
        code: For reason ERROR, an error code for the client.
        param: Request field at fault, if there is one.
    """

    reason: FinishReason
    stop_token_id: TokenId | None = None
    message: str = ""
    code: str | None = None
    param: str | None = None


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Verified drafts of one choice: accepted ones, which are in its output, and others."""

    num_accepted: Count
    num_rejected: Count


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Output of one choice in one step.

    Attributes:
        request_id: Id of the request.
        choice: Index of the choice.
        token_ids: Ids generated since the last Output, in order; may be empty with a finish.
        finish: Set on the last Output of the choice.
        logprobs: One entry per token id, if requested.
        num_cached_tokens: Prompt tokens found in the prefix cache; on the first Output of a choice.
        prompt_logprobs: One entry per prompt token; on the first Output of the first choice, if requested.
        drafts: Counts of the choice so far: with the finish, if anything was drafted, and with any Output before.
            A choice that the gateway ends at a stop string shows the last counts that arrived.
        embedding: For a request with `pooling`, with its finish, which is STOP: hidden_size float32 values in
            little-endian order, pooled from the output of the model's last norm and not normalized.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafts: DraftCounts | None = None
    embedding: bytes | None = None


class Steps(msgspec.Struct, tag="steps", frozen=True):
    """All outputs for one gateway from one pass of the engine loop."""

    epoch: ShortText
    sequence: Count
    outputs: list[Output]


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, and counters since the start. The counters never decrease within an epoch.

    Attributes:
        num_running: Choices that are running.
        num_waiting: Choices that are waiting.
        num_waiting_tokens: Prompt tokens not yet computed, of waiting and running requests.
        pages_in_use: Pages that live requests hold.
        num_cached_pages: Free pages that can still be found.
        prefill_tokens_per_second: Learned speed at which prompts are computed; 0 while unknown.
        counters: Counters by metric name without prefix (`prompt_tokens_total`, `num_preemptions_total`, ...).
        accepted_per_position: Accepted drafts by position in the draft.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    num_waiting_tokens: Count = 0
    pages_in_use: Count = 0
    num_cached_pages: Count = 0
    prefill_tokens_per_second: float = 0.0
    counters: dict[str, float] = {}
    accepted_per_position: list[Count] = []


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to Ping, sent by the engine loop itself."""

    epoch: ShortText
    nonce: Count
    stats: WorkerStats


class Bundle(msgspec.Struct, tag="bundle", frozen=True, kw_only=True):
    """Files that the gateway needs to convert text to token ids and back.

    Attributes:
        tokenizer_json: Tokenizer in the format of the `tokenizers` library.
        chat_template: Jinja source, or None if the model has none.
        special_tokens: Names that templates use (`bos_token`, `eos_token`, ...) with their texts.
        add_bos_token: Prepend the beginning-of-text id to a plain prompt.
    """

    bundle_hash: ShortText
    tokenizer_json: bytes
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    add_bos_token: bool = False


WorkerMessage = Welcome | Steps | Pong | Bundle


# ---- encoding ---------------------------------------------------------------------------------------------------

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_gateway_decoder: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def encode_message(message: GatewayMessage | WorkerMessage) -> bytes:
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
