"""Schemas of the answers of Anthropic's API for gateway.openapi; see gateway.api.openai.answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AnthropicErrorBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Error object of Anthropic's API; the message names the invalid field."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Response of Anthropic's API to a request that failed."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of a message and its prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]
    output_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Complete response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCountAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Number of tokens of a prompt."""

    input_tokens: int


class ModelInfoAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Description of a served model in Anthropic's format."""

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
    """Page of descriptions of served models in Anthropic's format."""

    data: list[ModelInfoAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
