"""`tools`, `tool_choice` and `parallel_tool_calls`: the ToolRequest, and the field that each refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.common.fields import ChatFields, parse_fields
from gateway.api.common.grammar import check_tools, tool_grammar
from gateway.api.common.tools import MAX_TOOLS, tool_request
from gateway.text.formats import TOOL_FORMATS
from gateway.text.tools.format import ToolRequest
from shared.errors import InvalidRequestError

HERMES = TOOL_FORMATS["hermes"]
NO_CHOICES: list[Any] = ["any", "", 5, True, []]
BAD_PROPERTIES: list[Any] = [
    {"type": "stsring"}, {"type": ["string", "text"]}, "abc", [], 5, None, {"enum": []}, {"anyOf": {}},
    {"items": [{"type": "x"}]}, {"$ref": 5}, {"pattern": "a" * 10_000}, {"pattern": "^(?:ab){10000000}$"},
]  # fmt: skip


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def requested(tools: Any, **fields: Any) -> ToolRequest | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    parsed = parse_fields(body, ChatFields)
    return tool_request(parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls)


def asked(tools: Any, **fields: Any) -> ToolRequest:
    found = requested(tools, **fields)
    assert found is not None
    return found


def names(request: ToolRequest) -> tuple[list[str], list[str]]:
    return [tool.name for tool in request.tools], [tool.name for tool in request.callable]


def allowed(mode: str, *called: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in called]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_choices() -> None:
    tools = [tool("f"), tool("g"), tool("h")]
    for choice in (None, "auto"):
        request = asked(tools, tool_choice=choice)
        assert (request.choice, request.parallel, request.forced, request.constrained) == ("auto", True, False, False)
        assert names(request) == (["f", "g", "h"], ["f", "g", "h"])
    none = asked(tools, tool_choice="none")
    assert none.choice == "none" and not none.callable and not none.constrained
    required = asked(tools, tool_choice="required")
    assert required.forced and required.constrained and required.parallel and len(required.callable) == 3
    one = asked(tools, tool_choice=named("g"))
    assert one.choice == "named" and one.forced and not one.parallel and names(one)[1] == ["g"]
    some = asked(tools, tool_choice=allowed("auto", "h", "f"))
    assert some.choice == "auto" and names(some) == (["f", "g", "h"], ["f", "h"]) and some.constrained
    assert asked(tools, tool_choice=allowed("required", "h")).choice == "required"
    assert not asked(tools, parallel_tool_calls=False).parallel
    # At most one call is a matter of the grammar.
    assert asked(tools, parallel_tool_calls=False).constrained
    assert asked([tool(strict=True)]).constrained and not asked([tool(strict=False)]).constrained


def test_grammars() -> None:
    tools = [tool("f", parameters={"properties": {"only_f": {}}}), tool("g", strict=True)]
    assert tool_grammar(None, HERMES, {}) is None
    assert tool_grammar(asked(tools, tool_choice="none"), HERMES, {}) is None
    forced = tool_grammar(asked(tools, tool_choice="required"), HERMES, {})
    assert forced is not None and forced.required and "only_f" in str(forced.calls.rules)
    assert [part.param for part in forced.parts] == [f"tools[{index}].function.parameters" for index in (0, 1)]
    free = tool_grammar(asked(tools), HERMES, {})
    assert free is not None and not free.required and free.free is not None and "only_f" not in str(free.free.rules)
    assert [part.param for part in free.parts] == ["tools[1].function.parameters"]
    assert tool_grammar(asked([tool(parameters={"x-guidance": {}})]), HERMES, {}) is None
    loose = tool_grammar(asked([tool()]), HERMES, {}, beside_content=True)
    assert loose is not None and not loose.required and loose.free is None and len(loose.parts) == 1


def test_a_function_needs_only_a_name() -> None:
    (only,) = asked([tool(description=None, parameters=None, strict=None)]).tools
    assert (only.name, only.description, only.parameters, only.strict) == ("f", None, {}, False)
    assert only.as_json() == tool(description="", parameters={"type": "object", "properties": {}})
    check_tools(asked([tool()]))


@pytest.mark.parametrize("tools", [None, []])
def test_tool_fields_without_tools_are_refused(tools: Any) -> None:
    for choice in (None, "none", "auto"):
        assert requested(tools, tool_choice=choice) is None
    for fields in ({"tool_choice": "required"}, {"tool_choice": named("f")}, {"parallel_tool_calls": False}):
        with pytest.raises(InvalidRequestError) as caught:
            requested(tools, **fields)
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], "tools"),
        ([tool(), tool("g"), tool()], "tools[2].function.name"),
        *(([tool(name)], "tools[0].function.name") for name in ("", "a b", "f\n", "é", "a.b", "x" * 129)),
        ([{"type": "function"}], "tools[0].function"), ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
        ([tool(), {"type": "function", "function": {}}], "tools[1].function.name"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(strict="yes")], "tools[0].function.strict"), ([tool(returns={})], "tools[0].function.returns"),
        ([{**tool(), "cache_control": {}}], "tools[0].cache_control"), ("f", "tools"), ({}, "tools"), ([5], "tools[0]"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requested(tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        *((choice, "tool_choice") for choice in NO_CHOICES),
        ({}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "auto"}, "tool_choice.type"),
        ({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type"),
        ({**named("f"), "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.type"),
        (named("unknown"), "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function.x"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", "f", "unknown"), "tool_choice.allowed_tools.tools[1].function.name"),
    ],
)
def test_invalid_tool_choices_are_refused(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requested([tool()], tool_choice=choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "stsring"}, {"type": []}, {"type": 5}, {"type": "array"}, {"properties": ["a"]}, {"required": "a"},
        {"required": [5]}, {"$defs": {"a": {"pattern": "("}}}, {"additionalProperties": {"type": "x"}},
        {"patternProperties": {"(": {}}}, {"patternProperties": {"a{1000000000}": {}}}, {"pattern": "(?a)(?u)x"},
        *({"properties": {"a": inner}} for inner in BAD_PROPERTIES),
        *({"properties": {"a": {"type": "string", "pattern": bad}}}
          for bad in ("(unclosed", "[", "*a", "\\", 5, "(" * 8000)),
    ],
)  # fmt: skip
def test_invalid_schemas_are_refused(schema: dict[str, Any]) -> None:
    """CVE-2025-48944: a bad `type` or `pattern` inside parameters, enforced or not."""
    for choice in ("auto", "required"):
        with pytest.raises(InvalidRequestError) as caught:
            check_tools(asked([tool("f"), tool("g", parameters=schema)], tool_choice=choice))
        assert caught.value.param == "tools[1].function.parameters"


def test_large_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    wide: dict[str, Any] = {"properties": {str(index): {} for index in range(21_000)}}
    for schema in (deep, wide):
        with pytest.raises(InvalidRequestError, match="too large"):
            check_tools(asked([tool(parameters=schema)]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object"]},
        {"$schema": "x", "title": "T", "type": "object", "properties": {"a": True, "type": {"type": "string"}}},
        {"properties": {"pattern": {"type": "string"}, "properties": {"type": "object"}}},
        *(
            {"properties": {"a": {"pattern": good}}}
            for good in (r"^\p{L}+$", r"(?<n>a)\k<n>", r"(?<=x)a", r"\u{1F600}", "[[a]")
        ),
        {"properties": {"a": {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}}},
        {"not": {"type": "string"}, "if": {}, "then": {}},
    ],
)
def test_schemas_that_programs_generate_are_accepted(schema: dict[str, Any]) -> None:
    """Schemas that pydantic writes, and schemas that no grammar can express but that are not enforced."""
    check_tools(asked([tool(parameters=schema)]))
