"""What endpoints answer, as gateway.openapi declares it. Answers are built field by field for speed; tests compare."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What failed, whose fault it is, and the parameter at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every failure."""

    error: ErrorBody


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    stop_reason: int | str | None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "repetition"]
    stop_reason: int | str | None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Whole completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class EmbeddingVector(msgspec.Struct, kw_only=True):
    """Of one input; float32 in little endian where it is base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


class AnthropicErrorBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What failed; the message names the field at fault. Details are for what clients go on without."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every failure of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message and its prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]
    output_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A whole message of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCountAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many tokens a prompt has."""

    input_tokens: int


class RenderedPrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One prompt as the model would be given it."""

    index: int
    prompt: str
    token_ids: list[int]
    max_tokens: int


class RenderAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The prompts of a request."""

    object: Literal["rendered_prompts"]
    model: str
    prompts: list[RenderedPrompt]


class AbortAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request was aborted."""

    id: str
    object: Literal["request"]
    aborted: Literal[True]


class ModelAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A name that a model answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelListAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All of them."""

    object: Literal["list"]
    data: list[ModelAnswer]


class ModelInfoAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A name that a model answers to, for clients of Anthropic."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    line: None
    deprecated_at: None
    retires_at: None
    max_input_tokens: int
    max_tokens: int
    capabilities: dict[str, Any]


class ModelPageAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Some of them."""

    data: list[ModelInfoAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenizeAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text of tokens."""

    prompt: str


class StatusAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a probe."""

    status: str


class VersionAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pelton's version."""

    version: str
