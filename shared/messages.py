"""Every message on the wire between gateway and worker, as typed structs (encoded by shared.wire).

The gateway's DEALER sends GatewayMessages, the worker's ROUTER answers with WorkerMessages. One prompt is one
`Submit`; each of its `num_choices` choices ends with exactly one `Output` whose `finish` is set, whatever happens.
Steps to one gateway are numbered from 1 after each `Hello`, so that a lost message shows as a gap; `epoch` names one
start of the worker, so that messages of an earlier life are dropped.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.sampling_params import SamplingParams

PROTOCOL_VERSION = 1
MAX_TOKENS_PER_MESSAGE = 4_194_304
MAX_CHOICES = 128
MAX_GRAMMAR = 1_048_576
"""Characters of a grammar."""

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_PER_MESSAGE)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
ShortText = Annotated[str, Meta(max_length=1024)]
Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one vector: the last token's, or the mean over all tokens."""


class FinishReason(enum.StrEnum):
    """Why a choice ended. STOP, LENGTH and REPETITION are successes; the gateway refines STOP by stop strings."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


# ---- gateway -> worker ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message on a connection; answered by Welcome. Requests of an earlier life of this gateway are aborted."""

    version: int
    gateway_id: ShortText


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """One prompt to run.

    Attributes:
        token_ids: prompt, followed after a resume by the tokens already emitted.
        num_prompt_tokens: where the prompt ends in token_ids; penalties, min_tokens and max_tokens count from there.
        choice, num_choices: choices choice .. choice + num_choices - 1 are generated from the same prompt.
        grammar: what the generated tokens must spell, as llguidance reads it (Lark, or JSON with several grammars);
            empty: anything.
        salt: mixed into the page hashes; tenants with different salts never share cached pages.
        tenant: opaque name of who asks, for fairness.
        priority: lower runs first.
        deadline: Unix time in seconds after which a request still waiting is dropped.
        speculative: whether tokens may be drafted for it. The text is the same either way.
        prediction: what the client expects the output to be, as tokens; drafts are taken from it.
        pooling: makes it an embedding of token_ids, all of which are prompt, pooled like this: nothing is generated,
            and what `sampling` says of tokens is ignored. It has one choice, no grammar, no prompt_logprobs and no
            prediction, and may be max_model_len tokens long.
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
    """Ends a request, or one choice of it. Unknown and finished ids are ignored."""

    request_id: RequestId
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] | None = None


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Asks for a Pong through the engine loop and renews the lease on this gateway's requests."""

    nonce: Count


class BundleRequest(msgspec.Struct, tag="bundle_request", frozen=True):
    """Asks for the text bundle with this hash."""

    bundle_hash: ShortText


GatewayMessage = Hello | Submit | Cancel | Ping | BundleRequest


# ---- worker -> gateway ----------------------------------------------------------------------------------------


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves and can hold; fixed for one epoch.

    Attributes:
        model_names: the names it answers to, the first is the canonical one.
        max_model_len: tokens of prompt and completion together.
        num_pages, page_size: KV capacity in pages and tokens per page.
        vocab_size: token ids are below it.
        eos_token_ids: the union of every place in which the model declares them.
        model_hash: configuration, tensor table, sizes and sampled blocks; equal for equal weights.
        bundle_hash: SHA-256 (hex) of the text bundle.
        created: Unix time of the model file, for /v1/models.
        tool_call_parser, reasoning_parser: format of the model's tool calls and of its reasoning; `auto`: what its
            chat template says, `none`: plain text.
        speculative_method: where drafts come from; `off`: nothing is drafted.
        hidden_size: values of an embedding.
        pooling: how an embedding is pooled where a request does not say; one of Pooling.
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
        logprob: of the token at this position; None for a prompt's first token. Never infinite: clamped to -9999.
        rank: 1 for the likeliest token.
        top_ids, top_logprobs: the likeliest tokens, best first; as many as were asked for.
    """

    token_id: TokenId
    logprob: float | None
    rank: Count
    top_ids: list[TokenId]
    top_logprobs: list[float]


class Finish(msgspec.Struct, frozen=True):
    """How a choice ended.

    Attributes:
        stop_token_id: the id that ended it, for reason STOP; it is the last of the emitted token_ids.
        message, code: for reason ERROR, fit for a client.
        param: the request field at fault, where one is.
    """

    reason: FinishReason
    stop_token_id: TokenId | None = None
    message: str = ""
    code: str | None = None
    param: str | None = None


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Drafted tokens of one choice that the model verified: those in its output, and the others."""

    num_accepted: Count
    num_rejected: Count


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one choice from one step.

    Attributes:
        token_ids: generated since the last Output, in order; may be empty with a finish.
        logprobs: one entry per token id, where asked for.
        num_cached_tokens: prompt tokens found in the prefix cache; set on the first Output of a choice.
        prompt_logprobs: one entry per prompt token; on the first Output of the first choice, where asked for.
        drafts: counts of the choice so far: with the finish, where anything was drafted, and with any Output before. A
            choice that the gateway ends, at a stop string, shows the last that came.
        embedding: of a request with `pooling`, with its finish, which is STOP: hidden_size values, float32 in little
            endian; the pooled output of the model's last norm, its length as it came.
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
    """All news for one gateway from one pass of the engine loop."""

    epoch: ShortText
    sequence: Count
    outputs: list[Output]


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters since start; the counters never decrease within an epoch.

    Attributes:
        num_waiting_tokens: prompt tokens not yet computed, of waiting and running requests.
        pages_in_use: pages that live requests hold; num_cached_pages: free ones that could still be found.
        prefill_tokens_per_second: learned speed at which waiting tokens are worked off; 0 while unknown.
        counters: by metric name without prefix (`prompt_tokens_total`, `num_preemptions_total`, ...).
        accepted_per_position: drafted tokens that were accepted, by their place in the draft.
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
    """What the gateway needs to turn text into token ids and back.

    Attributes:
        tokenizer_json: in the format of the `tokenizers` library.
        chat_template: Jinja source, or None where the model has none.
        special_tokens: names that templates use (`bos_token`, `eos_token`, ...) and their text.
        add_bos_token: whether a plain completion prompt gets the beginning-of-text id in front.
    """

    bundle_hash: ShortText
    tokenizer_json: bytes
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    add_bos_token: bool = False


WorkerMessage = Welcome | Steps | Pong | Bundle
