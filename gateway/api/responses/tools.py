"""`tools` and `tool_choice` of /v1/responses, as those of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.common.fields import (
    AllowedTool,
    AllowedTools,
    FunctionField,
    FunctionName,
    ToolChoiceField,
    ToolField,
    parse_fields,
)
from gateway.api.responses.refused import without_refused_of_tool
from gateway.text.grammars.strict_schema import is_strict
from shared.errors import InvalidRequestError

Tools = Sequence[dict[str, Any]]


def with_strict(tools: Tools) -> list[dict[str, Any]]:
    """The tools, each with `strict`. Where it is not given, it is true if OpenAI's strict subset has the schema."""
    return [
        {**tool, "strict": is_strict(tool.get("parameters"))} if tool.get("strict") is None else tool for tool in tools
    ]


def without_strict(tools: Tools, asked: Tools) -> list[dict[str, Any]]:
    """The tools as they were asked for, none of them strict that does not say so."""
    return [tool if one.get("strict") is not None else {**tool, "strict": False} for tool, one in zip(tools, asked)]


def chat_tool(tool: dict[str, Any], place: str) -> ToolField:
    """An entry of `tools`. Raises InvalidRequestError naming what is wrong with it."""
    if tool.get("type") != "function":
        message = f'{place}.type must be "function"; other tools are not supported.'
        raise InvalidRequestError(message, param=f"{place}.type", code="unsupported_parameter")
    fields = {name: value for name, value in without_refused_of_tool(tool).items() if name != "type"}
    return ToolField(type="function", function=_convert(fields, FunctionField, place))


class _NamedFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str


class _AllowedFunctions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    mode: str
    tools: list[_NamedFunction]


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | ToolChoiceField | None:
    """`tool_choice`. Raises InvalidRequestError."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        named = _convert(choice, _NamedFunction, "tool_choice")
        return ToolChoiceField(type="function", function=FunctionName(name=named.name))
    if choice.get("type") == "allowed_tools":
        allowed = _convert(choice, _AllowedFunctions, "tool_choice")
        tools = [AllowedTool(type=tool.type, function=FunctionName(name=tool.name)) for tool in allowed.tools]
        return ToolChoiceField(type="allowed_tools", allowed_tools=AllowedTools(mode=allowed.mode, tools=tools))
    message = 'tool_choice.type must be "function" or "allowed_tools".'
    raise InvalidRequestError(message, param="tool_choice.type", code="unsupported_parameter")


def _convert(value: dict[str, Any], kind: type[Any], place: str) -> Any:
    try:
        return parse_fields(value, kind)
    except InvalidRequestError as error:
        param = f"{place}.{error.param}"
        message = error.message.replace(str(error.param), param)
        raise InvalidRequestError(message, param=param, code=error.code) from None
