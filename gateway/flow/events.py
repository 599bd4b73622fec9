"""Requests that routes pass to the generator, and the deltas that they receive."""

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
        request_id: Id of the request at the worker.
        model: Name of the model.
        prompt_token_ids: The whole prompt including special tokens.
        sampling: Sampling parameters.
        n: Number of choices, 0 .. n - 1.
        stop: Strings that end a choice; the text is cut before (or, on request, after) the first match.
        include_stop_str_in_output: Cut after the stop string.
        skip_special_tokens: Leave special tokens out of the text.
        salt: Salt of the prefix cache; requests with different salts never share cached pages.
        tenant: Opaque name of the client.
        priority: Requests with a lower value run first.
        deadline: Unix time in seconds after which a request that still waits for its first token fails.
        arrival: Time of arrival by time.monotonic; latencies count from there.
        grammar: Grammar of the output for llguidance; empty for none.
        stop_regex: Regular expressions that end a choice as stop strings do.
        affinity: Requests with the same value prefer the same worker; empty for no preference.
        format: Format by which the text is parsed into reasoning, content and tool calls; None if it is all
            content.
        speculative: True if tokens may be drafted.
        prediction: Tokens that the output is expected to contain.
        pooling: Pooling of the requested embedding; nothing is generated then. None for generation.
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
    """New output of one choice.

    Concatenated over a choice, `text` is the whole completion or, if the request has a format, its visible content.

    Attributes:
        choice: Index of the choice.
        text: New text; may be empty while bytes or a possible stop string are held back.
        token_ids: Ids generated since the last delta of this choice.
        logprobs: One entry per token id, if requested.
        finish_reason: "stop", "length", "tool_calls" or "repetition" on the last delta of a choice, else None.
        num_cached_tokens: Prompt tokens found in the prefix cache; on the first delta of a choice.
        prompt_logprobs: One entry per prompt token; on the first delta of choice 0, if requested.
        reasoning: New reasoning text.
        tool_calls: Changes of tool calls, in order.
        num_reasoning_tokens: Number of the token ids that are reasoning.
        stop_reason: With finish_reason: the stop string, the text that an expression matched, or the id of
            stop_token_ids that ended the choice; None for other ends.
        drafts: With finish_reason: counts of the choice's drafted tokens, if there were any.
        embedding: With finish_reason, for requests with pooling: float32 values in little-endian order, as the
            worker sent them.
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
