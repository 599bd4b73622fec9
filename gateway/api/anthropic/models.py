"""Answers of /v1/models for Anthropic's clients: pages of models with their capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from gateway.api.anthropic.chat import can_think, knows_effort, switches
from gateway.api.common.reasoning import marks_are_tokens
from gateway.cluster.registry import ModelEntry
from gateway.http.route import BetaQuery
from shared.errors import InvalidRequestError

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class ModelsQuery(BetaQuery, forbid_unknown_fields=True, kw_only=True):
    """Query that selects a page."""

    limit: Annotated[
        int,
        msgspec.Meta(ge=1, le=1000, description="Maximum number of models in a page; requires `anthropic-version`."),
    ] = 20
    after_id: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(description="The `last_id` of the previous page; requires `anthropic-version`."),
    ] = msgspec.UNSET
    before_id: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(description="The `first_id` of the next page; requires `anthropic-version`."),
    ] = msgspec.UNSET


def model_page(entries: Sequence[ModelEntry], query: ModelsQuery) -> dict[str, Any]:
    """Return a page of all model names, newest models first.

    Raises:
        InvalidRequestError: The query is invalid.
    """
    latest = sorted(entries, key=lambda entry: -entry.facts.created)
    named = [(name, entry) for entry in latest for name in entry.names]
    names = [name for name, _ in named]
    if query.before_id is not msgspec.UNSET:
        if query.after_id is not msgspec.UNSET:
            raise InvalidRequestError("before_id and after_id cannot be combined.", param="before_id")
        end = _index_of(names, query.before_id, "before_id")
        first = max(end - query.limit, 0)
        has_more = first > 0
    else:
        first = 0 if query.after_id is msgspec.UNSET else _index_of(names, query.after_id, "after_id") + 1
        end = min(first + query.limit, len(names))
        has_more = end < len(names)
    page = [model_info(name, entry) for name, entry in named[first:end]]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


def model_info(name: str, entry: ModelEntry) -> dict[str, Any]:
    """Return the description of a model under one of its names. Its creation time is that of its file."""
    facts = entry.facts
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(facts.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": facts.max_model_len,
        "max_tokens": facts.max_model_len,
        "capabilities": _capabilities(entry),
    }


def _capabilities(entry: ModelEntry) -> dict[str, Any]:
    """Return the capabilities. Each is true exactly if the server fulfils requests that use it."""
    reasoning = entry.formats.reasoning
    if reasoning is None:
        can_limit = not can_think(entry)
    else:
        can_limit = marks_are_tokens((reasoning.starts[0], reasoning.forced_end), entry)
    thinking = {
        "adaptive": True,
        "between_tools": False,
        "disabled": reasoning is None or bool(switches(entry)),
        "enabled": can_limit,
    }
    return {
        **_support(dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), False)),
        "structured_outputs": {"supported": True},
        "context_management": {
            "supported": True,
            **_support({"clear_thinking_20251015": True, "clear_tool_uses_20250919": False, "compact_20260112": False}),
        },
        "effort": {
            "supported": knows_effort(entry),
            **_support(dict.fromkeys(_EFFORTS, knows_effort(entry))),
        },
        "server_tools": {"supported": False, **_support({"code_execution": False, "web_search": False})},
        "thinking": {"supported": can_think(entry), "types": _support(thinking)},
    }


def _support(known: dict[str, bool]) -> dict[str, Any]:
    return {name: {"supported": value} for name, value in known.items()}


def _index_of(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequestError(f"{param} {name[:64]!r} is not the id of a model.", param=param)
    return names.index(name)
