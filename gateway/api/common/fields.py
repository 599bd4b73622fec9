"""The fields of each request body, strictly typed: a bool is no int, "2" is no 2, 1.5 is no int.

A field that is null counts as absent. A field that is known but not supported, or unknown, is refused by name.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from gateway.api.common.refused import NO_EFFECT, UNSUPPORTED, refusal_text
from gateway.api.common.speculation_fields import PredictionField, SpeculativeField
from gateway.api.common.structured_fields import ResponseFormat, StructuredOutputs
from gateway.api.common.tool_params import ToolChoiceField, ToolField
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

TokenIds = list[int]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    resumable: bool | None = None


class RepetitionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`repetition_detection`; null is the default, as everywhere."""

    max_pattern_size: int
    min_pattern_size: int | None = None
    min_count: int | None = None


class RequestFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request for a model's work takes: who asks, at what urgency, and how a prompt becomes tokens."""

    model: str
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # OpenAI's bookkeeping.
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None


class SamplingFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints take."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeField | None = None
    # Structured output: gateway.api.common.structured.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Sampling as llama.cpp's users know it.
    typical_p: float | None = None
    typ_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    # What vLLM's users send.
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionField | None = None
    stop_regex: str | list[str] | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


class ChatFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """/v1/chat/completions. Messages are checked by gateway.api.common.messages."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Tools: gateway.api.common.tool_params.
    tools: list[ToolField] | None = None
    tool_choice: str | ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    # Reasoning: gateway.api.common.reasoning_params.
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    prediction: PredictionField | None = None
    # How the prompt is made of the messages.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class CompletionFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """/v1/completions. The prompt is checked by gateway.api.common.prompts."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """/tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolField] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class DetokenizeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]


Fields = TypeVar("Fields", bound=msgspec.Struct)


def parse_fields(body: dict[str, Any], kind: type[Fields]) -> Fields:
    """Converts a body to its struct. Raises InvalidRequestError naming the first parameter at fault."""
    known = kind.__struct_fields__
    for name in body:
        if name not in known and not _has_no_effect(name, body[name]):
            raise _refusal(name)
    return convert({name: value for name, value in body.items() if name in known}, kind)


def _has_no_effect(name: str, value: object) -> bool:
    if name not in UNSUPPORTED:
        return False
    # `==` alone would take 0 for False.
    return value is None or any(value == idle and type(value) is type(idle) for idle in NO_EFFECT.get(name, ()))


def _refusal(name: str) -> InvalidRequestError:
    if name in UNSUPPORTED:
        what = refusal_text(name)
        return InvalidRequestError(what, param=name, code="unsupported_parameter")
    shown = name[:64]
    return InvalidRequestError(f"Unknown parameter: {shown!r}.", param=shown, code="unknown_parameter")
