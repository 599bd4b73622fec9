"""Schemas of responses for gateway.openapi. Responses are built field by field for speed; tests compare them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Response to a request that failed."""

    error: ErrorBody


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """Choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    stop_reason: int | str | None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """Chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct, kw_only=True):
    """Choice of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "repetition"]
    stop_reason: int | str | None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Completions of one or several prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class EmbeddingVector(msgspec.Struct, kw_only=True):
    """Vector of one input; little-endian float32 if it is base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


class RenderedPrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prompt as the model reads it."""

    index: int
    prompt: str
    token_ids: list[int]
    max_tokens: int


class RenderAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prompts of a request."""

    object: Literal["rendered_prompts"]
    model: str
    prompts: list[RenderedPrompt]


class AbortAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Confirmation that a request was aborted."""

    id: str
    object: Literal["request"]
    aborted: Literal[True]


class ModelAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Name of a served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelListAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names of all served models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text of token ids."""

    prompt: str


class StatusAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Result of a health or readiness probe."""

    status: str


class VersionAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pelton's version."""

    version: str
