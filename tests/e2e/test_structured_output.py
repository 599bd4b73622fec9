"""The default model follows schemas, expressions and tools; its template has no tools, and it is too weak to choose."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e.server import Server
from tests.fakes.json_schemas import SCHEMAS

pytestmark = pytest.mark.timeout(300, func_only=True)

MODEL = "SmolLM2-135M-Instruct"
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
ENDLESS = {"person_open", "recursion", "linked_list"}
"""Schemas that let a weak model continue up to max_tokens."""
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, (_, schema) in SCHEMAS.items()
    if schema.get("type") == "object" and name not in ENDLESS
]
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def ask(server: Server, question: str, **fields: Any) -> Any:
    body = {"model": MODEL, "temperature": 0.0, "max_tokens": 120, **fields}
    with server.client() as client:
        return client.chat.completions.create(messages=[{"role": "user", "content": question}], **body).choices


def ask_all(server: Server, questions: list[str], fields: list[dict[str, Any]]) -> list[Any]:
    """Return the choices of each question; many are asked at a time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda question, more: ask(server, question, **more), questions, fields))


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def check(text: str, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


def check_calls(choice: Any, tools: list[dict[str, Any]]) -> list[str]:
    """Check that each call names one of the tools and has valid arguments; return the names."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"}) for tool in tools}
    assert choice.message.tool_calls and not choice.message.content
    for call in choice.message.tool_calls:
        check(call.function.arguments, schemas[call.function.name])
    return [call.function.name for call in choice.message.tool_calls]


def test_schemas_are_followed(server: Server) -> None:
    """Half of the answers are random. A test of the gateway has random texts for every schema."""
    chosen = list(SCHEMAS)[::3]
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2}
    fields = [
        {"response_format": schema_format(SCHEMAS[name][1]), **(sampled if index % 2 else {})}
        for index, name in enumerate(chosen)
    ]
    for name, choices in zip(chosen, ask_all(server, [SCHEMAS[name][0] for name in chosen], fields), strict=True):
        for choice in choices:
            if choice.finish_reason == "stop":
                check(choice.message.content, SCHEMAS[name][1])
            else:
                assert choice.finish_reason == "length" and (name in ENDLESS or len(choices) == 2), name


def test_structured_outputs_are_followed(server: Server) -> None:
    digit = {"type": "regex", "pattern": "[0-9]"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[A-Z]{3}-\d{4}"}, r"[A-Z]{3}-[0-9]{4}"),
        ({"choice": ["positive", "negative", "neutral"]}, "positive|negative|neutral"),
        ({"grammar": 'root ::= "I say " ("yes" | "no") "."'}, r"I say (yes|no)\."),
        ({"grammar": 'start: "(" INT ("+" INT){0,3} ")"\nINT: /[0-9]{1,3}/'}, r"\(\d{1,3}(\+\d{1,3}){0,3}\)"),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": "<n>", "content": digit, "end": "</n>"}}},
            "<n>[0-9]</n>",
        ),
    ]
    options = {"temperature": 0.8, "seed": 3}
    fields = [{**options, "extra_body": {"structured_outputs": outputs}} for outputs, _ in cases]
    for (_, pattern), (choice,) in zip(cases, ask_all(server, ["Well?"] * len(cases), fields), strict=True):
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.message.content)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_enforced_calls_have_valid_arguments(server: Server, choice: str) -> None:
    sets: list[list[dict[str, Any]]] = [[tool, TOOLS[index - 1], NOW] for index, tool in enumerate(TOOLS)][
        0 if choice == "required" else 3 :: 6
    ]
    fields = [
        {
            "tools": tools,
            "tool_choice": "required" if choice == "required" else {**tools[0], "function": {"name": name}},
            "parallel_tool_calls": False,
            "max_tokens": 300,
        }
        for tools in sets
        for name in [tools[0]["function"]["name"]]
    ]
    called = set()
    for tools, (answer,) in zip(sets, ask_all(server, ["Do it."] * len(sets), fields), strict=True):
        (name,) = check_calls(answer, tools)
        called.add(name)
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert choice == "required" or name == tools[0]["function"]["name"]
    assert len(called) > 2
