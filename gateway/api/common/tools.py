"""Tool fields of a request, checked and combined into a ToolRequest."""

from __future__ import annotations

import re
from typing import Literal

from gateway.api.common.fields import (
    AllowedTools,
    PlacedToolField,
    ToolChoiceField,
    ToolField,
    check_choice,
    check_num_entries,
    invalid,
    missing,
)
from gateway.text.tools.format import Tool, ToolRequest

MAX_TOOLS = 512
"""OpenAI allows 128, but agents send the tools of all their servers. Checking 512 takes some 0.3 s, in a thread."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Anthropic's limit; OpenAI's is 64 characters."""
_CHOICES = ("none", "auto", "required")


def tool_request(
    tools: list[ToolField] | None, tool_choice: str | ToolChoiceField | None, parallel_tool_calls: bool | None
) -> ToolRequest | None:
    """Return the tools of a request, or None if it has none.

    The schemas of the parameters are checked later; see gateway.api.common.grammar.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "requires a call, but the request has no tools.")
        if parallel_tool_calls is not None:
            raise invalid("parallel_tool_calls", "requires tools.")
        return None
    check_num_entries("tools", len(tools), MAX_TOOLS)
    by_name: dict[str, Tool] = {}
    for index, field in enumerate(tools):
        place = field.place if isinstance(field, PlacedToolField) else f"tools[{index}]"
        tool = _tool(field, place)
        if tool.name in by_name:
            raise invalid(f"{place}.function.name", f"{tool.name!r} is used by two tools; names must differ.")
        by_name[tool.name] = tool
    choice, callable_tools = _choice(tool_choice, by_name)
    return ToolRequest(
        tools=tuple(by_name.values()),
        callable=callable_tools,
        choice=choice,
        parallel=choice != "named" and parallel_tool_calls is not False,
    )


def _tool(field: ToolField, place: str) -> Tool:
    if field.type != "function" or field.custom is not None:
        raise invalid(f"{place}.type", 'must be "function"; other tools are not supported.')
    function = field.function
    if function is None:
        raise missing(f"{place}.function")
    if not _NAME.fullmatch(function.name):
        raise invalid(f"{place}.function.name", "must be 1 to 128 letters, digits, underscores and dashes.")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters or {},
        strict=bool(function.strict),
        place=f"{place}.function.parameters",
    )


def _choice(
    field: str | ToolChoiceField | None, by_name: dict[str, Tool]
) -> tuple[Literal["none", "auto", "required", "named"], tuple[Tool, ...]]:
    """Return the kind of choice and the tools that may be called."""
    if field == "none":
        return "none", ()
    if field is None or field == "auto":
        return "auto", tuple(by_name.values())
    if field == "required":
        return "required", tuple(by_name.values())
    if isinstance(field, str):
        raise invalid("tool_choice", f"must be one of {', '.join(_CHOICES)}, or an object.")
    if field.type == "function" and field.allowed_tools is None and field.custom is None:
        if field.function is None:
            raise missing("tool_choice.function")
        return "named", (_known(field.function.name, by_name, "tool_choice.function.name"),)
    if field.type == "allowed_tools" and field.function is None and field.custom is None:
        return _allowed(field.allowed_tools, by_name)
    raise invalid("tool_choice.type", 'must be "function" or "allowed_tools", with only the field of the same name.')


def _allowed(
    allowed: AllowedTools | None, by_name: dict[str, Tool]
) -> tuple[Literal["auto", "required"], tuple[Tool, ...]]:
    place = "tool_choice.allowed_tools"
    if allowed is None:
        raise missing(place)
    check_choice(f"{place}.mode", allowed.mode, ("auto", "required"))
    if not allowed.tools:
        raise invalid(f"{place}.tools", "must not be empty.")
    names = set()
    for index, entry in enumerate(allowed.tools):
        if entry.type != "function":
            raise invalid(f"{place}.tools[{index}].type", 'must be "function".')
        names.add(_known(entry.function.name, by_name, f"{place}.tools[{index}].function.name").name)
    tools = tuple(tool for tool in by_name.values() if tool.name in names)
    return ("auto" if allowed.mode == "auto" else "required"), tools


def _known(name: str, by_name: dict[str, Tool], place: str) -> Tool:
    if name not in by_name:
        raise invalid(place, f"{name[:64]!r} is not the name of any of the tools.")
    return by_name[name]
