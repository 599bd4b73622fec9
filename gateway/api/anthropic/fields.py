"""The fields of Anthropic's Messages API, as strictly typed as OpenAI's: see gateway.api.common.fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.common.refused import SERVER, TEXT_ONLY
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

_OTHER_THAN_TEXT = ("image", "document", "base64", "url", "file")
"""Types of blocks, and of the sources of documents."""
VERSION_HEADER = "anthropic-version"
VERSIONS: dict[str, tuple[str, ...]] = {"2023-06-01": (), "2026-10-21": ("temperature", "top_p", "top_k")}
"""Version of the API -> the fields that it removed. Without the header none is missing."""

REFUSED: dict[str, str] = {
    "anthropic_version": "send the header anthropic-version",
    "betas": "send the fields themselves",
    "billing_policy": "nothing is billed here",
    "compaction": "conversations are not summarized here",
    "container": "no code is run here",
    "diagnostics": "prompts are not compared with former ones",
    "fallback_credit_token": "nothing is billed here",
    "fallbacks": SERVER,
    "inference_geo": SERVER,
    "max_tokens_to_sample": "send max_tokens",
    "mcp_servers": "no tools are run here",
    "prompt": "send messages",
    "speed": SERVER,
    "thread": "send the whole conversation",
    "user_profile_id": "",
    "workspace_id": "",
}
"""Name -> why, or what to send instead; empty where it is merely not there."""
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "fallbacks": ("default", []),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
"""Refused fields -> values that ask for nothing else than what is done, and are taken."""
UNSUPPORTED = "unsupported_parameter"
NO_THREADS = "thread_unsupported_request"
_CODES = {"thread": NO_THREADS}
"""Refused fields -> the code that tells Anthropic's clients to go on without them."""


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cache_control`, which changes nothing: every prefix is cached as long as there is room. Claude Code sends a
    `scope`: whom a prefix may be shared with."""

    type: str
    ttl: str | None = None
    scope: str | None = None


class MetadataField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`metadata`."""

    user_id: str | None = None


class BlockBinding(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking.block_binding`, which changes nothing: former thinking is not checked, so that none fails."""

    prefix_mismatch_behavior: str | None = None


class ThinkingField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None
    block_binding: BlockBinding | None = None


class ChoiceField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config.format`."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`context_management`; edits are checked by gateway.api.anthropic.context."""

    edits: list[dict[str, Any]] | None = None


class ConversationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What shapes the prompt: all of /v1/messages/count_tokens. Messages and the system prompt are checked by
    gateway.api.anthropic.conversation, tools by gateway.api.anthropic.chat."""

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
    """/v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MetadataField | None = None
    service_tier: str | None = None
    stream: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An entry of `tools`."""

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
    """Converts a body to its struct. Raises InvalidRequestError naming the first field at fault.

    Args:
        versions: of the API, as the request's headers name them; none: any.
    """
    check_versions(versions)
    for version in versions:
        for name in VERSIONS[version]:
            if body.get(name) is not None:
                raise unsupported(name, f"{name} is no field of version {version} of the API; 2023-06-01 has it.")
    for name, value in body.items():
        if name in REFUSED and value is not None and value not in NO_EFFECT.get(name, ()):
            why = f": {REFUSED[name]}" if REFUSED[name] else ""
            raise unsupported(name, f"{name} is not supported here{why}.", _CODES.get(name, UNSUPPORTED))
    fields = convert({name: value for name, value in body.items() if name not in REFUSED}, kind)
    check_cache_control(fields.cache_control, "cache_control")
    return fields


def check_versions(versions: Sequence[str]) -> None:
    """Raises InvalidRequestError for a version of the API that there is not."""
    if not all(version in VERSIONS for version in versions):
        raise InvalidRequestError(f"{VERSION_HEADER} must be {' or '.join(VERSIONS)}.", param=VERSION_HEADER)


def check_cache_control(control: CacheControl | None, place: str) -> None:
    """Raises InvalidRequestError for one that Anthropic does not know."""
    if control is not None:
        check_choice(f"{place}.type", control.type, ("ephemeral",))
        if control.ttl is not None:
            check_choice(f"{place}.ttl", control.ttl, ("5m", "1h"))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises InvalidRequestError where the value is none of those."""
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}.", param=name)


def unsupported(name: str, message: str, code: str = UNSUPPORTED) -> InvalidRequestError:
    """The error for what Anthropic knows and this server does not."""
    return InvalidRequestError(message, param=name, code=code)


def unsupported_kind(place: str, kind: object, known: Sequence[str]) -> InvalidRequestError:
    """The error for a content block of a type that is not taken at this place."""
    name = f"{place}.type"
    what = repr(kind[:64]) if isinstance(kind, str) else "the given value"
    why = f": {TEXT_ONLY}" if kind in _OTHER_THAN_TEXT else ""
    return unsupported(name, f"{name} must be one of {', '.join(known)}; {what} is not supported here{why}.")
