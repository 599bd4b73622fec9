"""Bodies of the OpenAI routes as strictly typed structs.

null means the same as an absent field. Unknown fields and known but unsupported ones are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from gateway.api.common.refused import NO_EFFECT, UNSUPPORTED, refusal_text
from gateway.http.body import Struct, field_error
from gateway.text.grammars.structural_tags import StructuralTag
from shared.errors import InvalidRequestError

MAX_INT32 = 2**31 - 1


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="text"):
    """`{"type": "text"}`: free text."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_object"):
    """`{"type": "json_object"}`."""


class JsonSchemaField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format.json_schema`. The schema is enforced with and without `strict`.

    `strict` also checks that the schema follows OpenAI's rules; see gateway.text.grammars.json_schema.
    """

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """`{"type": "json_schema", "json_schema": {...}}`."""

    json_schema: JsonSchemaField


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTag


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`: one kind of constraint, and options for the JSON kinds."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class SpeculativeField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`speculative`: `{"enabled": false}` turns drafts off."""

    enabled: bool


class PredictedPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text part of a prediction."""

    type: str
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class PredictionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's predicted output: `{"type": "content", "content": ...}`."""

    type: str
    content: str | list[PredictedPart]


class FunctionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tools[i].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Entry of `tools`."""

    type: str
    function: FunctionField | None = None
    custom: dict[str, Any] | None = None


class PlacedToolField(ToolField, kw_only=True):
    """Tool whose index in the request differs from its index among the tools shown to the model."""

    place: str


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Function of a named tool_choice or of an allowed tool."""

    name: str


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Entry of `tool_choice.allowed_tools.tools`."""

    type: str
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice.allowed_tools`."""

    mode: str
    tools: list[AllowedTool]


class ToolChoiceField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice` as an object."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    resumable: bool | None = None


class RepetitionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`repetition_detection`."""

    max_pattern_size: int
    min_pattern_size: int | None = None
    min_count: int | None = None


class RequestFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every request to a model: accounting, priority, and how prompts become tokens."""

    model: str
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # OpenAI's accounting fields.
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None


class SamplingFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and completions share."""

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
    # Structured output; see gateway.api.common.structured.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Samplers of llama.cpp.
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
    # Parameters of vLLM.
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
    """Body of /v1/chat/completions. gateway.api.common.messages checks the messages."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Tools; see gateway.api.common.tools.
    tools: list[ToolField] | None = None
    tool_choice: str | ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    # Reasoning; see gateway.api.common.reasoning.
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    prediction: PredictionField | None = None
    # Rendering of the prompt; see gateway.api.common.chat_prompt.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class CompletionFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/completions. gateway.api.common.prompts checks the prompt."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /tokenize, with either `prompt` or `messages`."""

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
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse_fields(body: dict[str, Any], kind: type[Struct]) -> Struct:
    """Convert a body to its struct.

    Raises:
        InvalidRequestError: A parameter is unknown, unsupported or of the wrong type; the error names the first one.
    """
    known = kind.__struct_fields__
    for name in body:
        if name in known:
            continue
        if name not in UNSUPPORTED:
            shown = name[:64]
            raise InvalidRequestError(f"Unknown parameter: {shown!r}.", param=shown, code="unknown_parameter")
        value, neutral = body[name], NO_EFFECT.get(name, ())
        # Types are compared too, because 0 == False.
        if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
            raise InvalidRequestError(refusal_text(name), param=name, code="unsupported_parameter")
    try:
        return msgspec.convert({name: value for name, value in body.items() if name in known}, kind, strict=True)
    except msgspec.ValidationError as error:
        raise field_error(error) from None


def invalid(name: str, problem: str, code: str | None = None) -> InvalidRequestError:
    """Return the error for the field `name`; its message is the name followed by the problem."""
    return InvalidRequestError(f"{name} {problem}", param=name, code=code)


def unsupported(name: str, problem: str) -> InvalidRequestError:
    """Return the error for a field, or a value of it, that the server does not support."""
    return invalid(name, problem, "unsupported_parameter")


def missing(name: str) -> InvalidRequestError:
    """Return the error for a required field that is absent."""
    return InvalidRequestError(f"Missing required parameter: {name}.", param=name, code="missing_required_parameter")


def check_known(names: Iterable[str], known: Collection[str], place: str) -> None:
    """Raise InvalidRequestError if the object at the path `place` has a field that is not known."""
    for name in names:
        if name not in known:
            shown = f"{place}.{name[:64]}"
            raise InvalidRequestError(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise InvalidRequestError, listing the choices except None, if the value is not one of them."""
    if value not in choices:
        raise invalid(name, f"must be one of {', '.join(str(choice) for choice in choices if choice is not None)}.")


def check_num_entries(name: str, number: int, limit: int) -> None:
    """Raise InvalidRequestError if a list is too long. Call it before any work on each entry."""
    if number > limit:
        raise invalid(name, f"has {number} entries; at most {limit} are allowed.")


def check_length(name: str, text: str, longest: int) -> str:
    """Return the text. Raises InvalidRequestError if it is empty or too long."""
    if not 1 <= len(text) <= longest:
        raise invalid(name, f"must have 1 to {longest} characters.")
    return text


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return the value. Raises InvalidRequestError if it is outside [low, high]."""
    if not low <= value <= high:
        shown = str(value) if abs(value) < 2**63 else "a number beyond 64 bits"
        raise invalid(name, f"must be in [{low}, {high}], got {shown}.")
    return value
