"""`tools`, `tool_choice` and `parallel_tool_calls`: their fields, and what they ask for together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.api.common.output_grammar import ToolGrammar
from gateway.text.grammars.grammar import Fragment
from gateway.text.tools.format import Tool, ToolFormat, ToolRequest
from gateway.text.tools.schema import arguments_expression, check_parameters
from shared.errors import InvalidRequestError

MAX_TOOLS = 512
"""OpenAI takes 128; agents bring what all their servers of tools have. Some 0.3 s of checks, in a thread."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Anthropic's; OpenAI's has at most 64."""
_CHOICES = ("none", "auto", "required")


class FunctionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tools[i].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An entry of `tools`."""

    type: str
    function: FunctionField | None = None
    custom: dict[str, Any] | None = None


class PlacedToolField(ToolField, kw_only=True):
    """A tool that has another place in the request than among the tools that the model is shown."""

    place: str


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of a named tool_choice, or of an allowed tool."""

    name: str


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An entry of `tool_choice.allowed_tools.tools`."""

    type: str
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice.allowed_tools`."""

    mode: str
    tools: list[AllowedTool]


class ToolChoiceField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool_choice that is an object."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: dict[str, Any] | None = None


def check_num_tools(count: int) -> None:
    """Raises InvalidRequestError. To be called before anything is done with each of them."""
    if count > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {count} entries; at most {MAX_TOOLS} are allowed.", param="tools")


def tool_request(
    tools: list[ToolField] | None, tool_choice: str | ToolChoiceField | None, parallel_tool_calls: bool | None
) -> ToolRequest | None:
    """What a request's fields ask for; None where it has no tools.

    The schemas of the parameters are not looked at here, see `check_tools`. Raises InvalidRequestError naming the
    field at fault.
    """
    if not tools:
        _check_without_tools(tool_choice, parallel_tool_calls)
        return None
    check_num_tools(len(tools))
    by_name: dict[str, Tool] = {}
    for index, field in enumerate(tools):
        place = field.place if isinstance(field, PlacedToolField) else f"tools[{index}]"
        tool = _tool(field, place)
        if tool.name in by_name:
            param = f"{place}.function.name"
            raise InvalidRequestError(f"{param} {tool.name!r} is there twice.", param=param)
        by_name[tool.name] = tool
    choice, called = _choice(tool_choice, by_name)
    return ToolRequest(
        tools=tuple(by_name.values()),
        callable=called,
        choice=choice,
        parallel=choice != "named" and parallel_tool_calls is not False,
    )


def check_tools(request: ToolRequest) -> None:
    """Checks the schemas of all parameters. May take some time: call it in a thread.

    Raises InvalidRequestError naming `tools[i].function.parameters`.
    """
    for tool in request.tools:
        check_parameters(tool.parameters, tool.place)


def tool_grammar(
    request: ToolRequest | None, form: ToolFormat, special_ids: Mapping[str, int], *, beside_content: bool = False
) -> ToolGrammar | None:
    """What the calls of a request are held to; None: to nothing. May take some time: call it in a thread.

    Args:
        special_ids: text of each special token -> its id.
        beside_content: the content is held to a grammar, so that calls have to be part of it.
    """
    if request is None or request.choice == "none" or not (request.constrained or beside_content):
        return None
    calls = form.call_grammar(request.callable, special_ids, parallel=request.parallel)
    free = None
    if request.constrained and not request.forced:
        free = form.free_grammar(request.callable, special_ids, parallel=request.parallel)
    enforced = [tool for tool in request.callable if request.forced or beside_content or tool.strict]
    parts = tuple(Fragment(arguments_expression(tool), param=tool.place) for tool in enforced)
    return ToolGrammar(required=request.forced, calls=calls, free=free, parts=parts)


def _check_without_tools(tool_choice: str | ToolChoiceField | None, parallel: bool | None) -> None:
    if tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice asks for calls, but there are no tools.", param="tool_choice")
    if parallel is not None:
        raise InvalidRequestError("parallel_tool_calls is only allowed with tools.", param="parallel_tool_calls")


def _tool(field: ToolField, place: str) -> Tool:
    if field.type != "function" or field.custom is not None:
        message = f'{place}.type must be "function"; other tools are not supported.'
        raise InvalidRequestError(message, param=f"{place}.type")
    function = field.function
    if function is None:
        raise InvalidRequestError(
            f"Missing required parameter: {place}.function.",
            param=f"{place}.function",
            code="missing_required_parameter",
        )
    if not _NAME.fullmatch(function.name):
        message = f"{place}.function.name must be 1 to 128 letters, digits, underscores and dashes."
        raise InvalidRequestError(message, param=f"{place}.function.name")
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
    every = tuple(by_name.values())
    if field is None or field == "auto":
        return "auto", every
    if field == "none":
        return "none", ()
    if field == "required":
        return "required", every
    if isinstance(field, str):
        message = f"tool_choice must be one of {', '.join(_CHOICES)}, or an object."
        raise InvalidRequestError(message, param="tool_choice")
    if field.type == "function" and field.allowed_tools is None and field.custom is None:
        if field.function is None:
            message = "Missing required parameter: tool_choice.function."
            raise InvalidRequestError(message, param="tool_choice.function", code="missing_required_parameter")
        return "named", (_known(field.function.name, by_name, "tool_choice.function.name"),)
    if field.type == "allowed_tools" and field.function is None and field.custom is None:
        return _allowed(field.allowed_tools, by_name)
    message = 'tool_choice.type must be "function" or "allowed_tools", with the field of that name and no other.'
    raise InvalidRequestError(message, param="tool_choice.type")


def _allowed(
    allowed: AllowedTools | None, by_name: dict[str, Tool]
) -> tuple[Literal["auto", "required"], tuple[Tool, ...]]:
    place = "tool_choice.allowed_tools"
    if allowed is None:
        raise InvalidRequestError(
            f"Missing required parameter: {place}.", param=place, code="missing_required_parameter"
        )
    if allowed.mode not in ("auto", "required"):
        raise InvalidRequestError(f'{place}.mode must be "auto" or "required".', param=f"{place}.mode")
    if not allowed.tools:
        raise InvalidRequestError(f"{place}.tools must not be empty.", param=f"{place}.tools")
    names = set()
    for index, entry in enumerate(allowed.tools):
        if entry.type != "function":
            at = f"{place}.tools[{index}].type"
            raise InvalidRequestError(f'{at} must be "function".', param=at)
        names.add(_known(entry.function.name, by_name, f"{place}.tools[{index}].function.name").name)
    called = tuple(tool for tool in by_name.values() if tool.name in names)
    return ("auto" if allowed.mode == "auto" else "required"), called


def _known(name: str, by_name: dict[str, Tool], place: str) -> Tool:
    if name not in by_name:
        raise InvalidRequestError(f"{place} {name[:64]!r} is not among the tools.", param=place)
    return by_name[name]
