"""Fields of Anthropic's Messages API. They are as strictly typed as OpenAI's; see gateway.api.common.fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.common.fields import check_choice, invalid, unsupported
from gateway.api.common.refused import SERVER, TEXT_ONLY
from gateway.http.body import convert
from shared.errors import InvalidRequestError

_OTHER_THAN_TEXT = ("image", "document", "base64", "url", "file")
"""Types of blocks and document sources that are not text."""
VERSION_HEADER = "anthropic-version"
VERSIONS: dict[str, tuple[str, ...]] = {"2023-06-01": (), "2026-10-21": ("temperature", "top_p", "top_k")}
"""Fields that each version of the API removed. Without the header, all fields are accepted."""

REFUSED: dict[str, str] = {
    "anthropic_version": "send the header anthropic-version instead",
    "betas": "send the fields directly, without betas",
    "billing_policy": "the server has no billing",
    "compaction": "the server does not summarize conversations",
    "container": "the server does not run code",
    "diagnostics": "the server does not compare prompts",
    "fallback_credit_token": "the server has no billing",
    "fallbacks": SERVER,
    "inference_geo": SERVER,
    "max_tokens_to_sample": "send max_tokens instead",
    "mcp_servers": "the server does not run tools",
    "prompt": "send messages instead",
    "speed": SERVER,
    "thread": "send the whole conversation instead",
    "user_profile_id": "",
    "workspace_id": "",
}
"""Reason for refusing each field, or what to send instead; may be empty."""
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "fallbacks": ("default", []),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
"""Values of refused fields that are accepted because they have no effect."""
NO_THREADS = "thread_unsupported_request"
_CODES = {"thread": NO_THREADS}
"""Error codes on which Anthropic's clients repeat the request without the field."""


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `cache_control`. It has no effect, because every prefix is cached while there is room.

    Claude Code also sends a `scope`, which limits the sharing of a prefix.
    """

    type: str
    ttl: str | None = None
    scope: str | None = None


class MetadataField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `metadata`."""

    user_id: str | None = None


class BlockBinding(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `thinking.block_binding`. It has no effect, because earlier thinking is not verified."""

    prefix_mismatch_behavior: str | None = None


class ThinkingField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None
    block_binding: BlockBinding | None = None


class ChoiceField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `output_config.format`."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `context_management`; gateway.api.anthropic.chat validates the edits."""

    edits: list[dict[str, Any]] | None = None


class ConversationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of /v1/messages/count_tokens, which determine the prompt.

    gateway.api.anthropic.conversation validates messages and system prompt, gateway.api.anthropic.chat the tools.
    """

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None


class MessagesFields(ConversationFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MetadataField | None = None
    service_tier: str | None = None
    stream: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Entry of `tools`."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


Body = TypeVar("Body", bound=ConversationFields)


def parse_body(body: dict[str, Any], kind: type[Body], versions: Sequence[str]) -> Body:
    """Convert a body to its struct.

    Args:
        body: The parsed JSON body.
        kind: The struct.
        versions: Versions of the API that the request's headers name; may be empty.

    Raises:
        InvalidRequestError: A field is invalid; the error names the first one.
    """
    check_versions(versions)
    for version in versions:
        for name in VERSIONS[version]:
            if body.get(name) is not None:
                raise unsupported(name, f"does not exist in version {version} of the API; use version 2023-06-01.")
    for name, value in body.items():
        if name in REFUSED and value is not None and value not in NO_EFFECT.get(name, ()):
            reason = f": {REFUSED[name]}" if REFUSED[name] else ""
            raise invalid(name, f"is not supported here{reason}.", _CODES.get(name, "unsupported_parameter"))
    fields = convert({name: value for name, value in body.items() if name not in REFUSED}, kind)
    check_cache_control(fields.cache_control, "cache_control")
    return fields


def check_versions(versions: Sequence[str]) -> None:
    """Raise InvalidRequestError if a version of the API is unknown."""
    if not all(version in VERSIONS for version in versions):
        raise invalid(VERSION_HEADER, f"must be {' or '.join(VERSIONS)}.")


def check_cache_control(control: CacheControl | None, place: str) -> None:
    """Raise InvalidRequestError if Anthropic does not define the values."""
    if control is not None:
        check_choice(f"{place}.type", control.type, ("ephemeral",))
        check_choice(f"{place}.ttl", control.ttl, (None, "5m", "1h"))


def given_type(kind: object) -> str:
    """Return the type that a client sent, for an error message."""
    return repr(kind[:64]) if isinstance(kind, str) else "the given value"


def unsupported_kind(place: str, kind: object, known: Sequence[str]) -> InvalidRequestError:
    """Return the error for a content block whose type is not allowed at a path."""
    reason = f": {TEXT_ONLY}" if kind in _OTHER_THAN_TEXT else ""
    problem = f"must be one of {', '.join(known)}; {given_type(kind)} is not supported here{reason}."
    return unsupported(f"{place}.type", problem)
