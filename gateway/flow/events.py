"""What a route hands to the generator, and what it gets back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from gateway.text.message_parser import MessageFormat, ToolCallDelta
from shared.messages import DraftCounts, Pooling, TokenLogprobs
from shared.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and its choices.

    Attributes:
        prompt_token_ids: the whole prompt, special tokens included.
        n: choices 0 .. n - 1 are generated from the prompt.
        stop: strings that end a choice; the text is cut before (or, on request, after) the first match.
        salt: of the prefix cache; requests with different salts never share cached pages.
        tenant: opaque name of who asks.
        priority: lower runs first.
        deadline: Unix time in seconds after which a request still waiting for its first token fails.
        arrival: when it arrived, by time.monotonic; latencies are measured from there.
        grammar: what the output must spell, as llguidance reads it; empty: anything.
        stop_regex: regular expressions that end a choice as stop strings do.
        affinity: requests with the same one rather go to the same worker; empty: no preference.
        format: how the model's text is taken apart into reasoning, content and tool calls; None: it is all content.
        speculative: whether tokens may be drafted.
        prediction: what the output is expected to be, as tokens.
        pooling: the prompt's embedding is asked for, pooled like this, and nothing is generated.
    """

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    salt: bytes = b""
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    arrival: float = field(default_factory=time.monotonic, compare=False)
    grammar: str = ""
    stop_regex: tuple[str, ...] = ()
    format: MessageFormat | None = None
    affinity: str = ""
    speculative: bool = True
    prediction: list[int] = field(default_factory=list)
    pooling: Pooling | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """News of one choice. Concatenated over a choice, `text` is the whole completion, or, where the request has a
    format, its visible content.

    Attributes:
        text: may be empty while bytes or a possible stop string are held back.
        token_ids: generated since the last delta of this choice.
        logprobs: one entry per token id, where asked for.
        finish_reason: "stop", "length", "tool_calls" or "repetition" on the last delta of a choice, None before.
        num_cached_tokens: prompt tokens found in the prefix cache; on the first delta of a choice.
        prompt_logprobs: one entry per prompt token; on the first delta of choice 0, where asked for.
        reasoning: of the model's reasoning; concatenated over a choice, all of it.
        tool_calls: news of its tool calls, in order.
        num_reasoning_tokens: how many of the token ids are reasoning.
        stop_reason: with finish_reason, the stop string, the text that an expression matched, or the one of
            stop_token_ids that ended the choice; None: something else did.
        drafts: with finish_reason, the choice's drafted tokens, if there were any.
        embedding: with finish_reason, where the request has a pooling: float32 in little endian, as the worker sent it.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    num_reasoning_tokens: int = 0
    stop_reason: int | str | None = None
    drafts: DraftCounts | None = None
    embedding: bytes | None = None
