"""Conversion of conversations with tools to the form that a model's chat template expects.

A template that supports tools receives them, and calls and results in the form that it expects. For other templates, a
system message describes the functions and how to call them; earlier calls become text of the assistant, and their
results text of the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.text.tools.format import CallArguments, ToolFormat, ToolRequest
from gateway.text.tools.plain_json import FALLBACK

_FEATURES = {
    "tools": r"\btools\b",
    "calls": r"\btool_calls\b",
    "one_call": r"tool_calls\s*\|\s*length\s*[!=>]=?\s*1|tool_calls\[0\]",
    "text_arguments": r"\barguments(?:'\]|\"\])?\s*[+~]",
    "short_ids": r"id\s*\|\s*length\s*!=\s*9",
    "null_content": r"\bcontent(?:'\]|\"\])?\s+is\s+(?:not\s+)?(?i:none)",
}
"""Signs of features in the text of a template."""
_NO_SYSTEM = re.compile(r"system role (?:is )?not supported", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """Features of a chat template.

    Attributes:
        tools: It shows the tools to the model.
        calls: It renders an assistant's tool_calls, and messages of the role `tool`.
        one_call: It refuses messages with more than one call.
        text_arguments: It expects the arguments of calls as JSON text, not as an object.
        short_ids: It refuses ids of calls that do not have nine characters.
        null_content: It supports messages with calls and without content; empty content would be a turn of its
            own.
        system: It supports system messages.
    """

    tools: bool = False
    calls: bool = False
    one_call: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    null_content: bool = False
    system: bool = True


def template_support(template: str | None, form: ToolFormat | None) -> TemplateSupport:
    """Detect the features of a template from its text. If it does not mention the format, it supports no tools."""
    if template is None:
        return TemplateSupport()
    features = {name: re.search(pattern, template) is not None for name, pattern in _FEATURES.items()}
    support = TemplateSupport(**features, system=_NO_SYSTEM.search(template) is None)
    return replace(support, tools=False, calls=False) if form is FALLBACK else support


def conversation(
    messages: Sequence[Mapping[str, Any]],
    request: ToolRequest | None,
    form: ToolFormat | None,
    support: TemplateSupport,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools for the template.

    Args:
        messages: Messages in OpenAI's shape, validated; `content` is a string or None, and `tool_calls` have their
            arguments as text.
        request: Tools of the request, or None. The tools of a request that forbids calls are not shown.
        form: Format of the model's calls; None if it makes none.
        support: Features of the template.
    """
    form = form or FALLBACK
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    converted = list(_converted(messages, form, support, names))
    if request is None or request.choice == "none":
        return converted, None
    if support.tools:
        return converted, [tool.as_json() for tool in request.tools]
    return _with_instructions(converted, instructions(request, form), support), None


def instructions(request: ToolRequest, form: ToolFormat) -> str:
    """Return the instructions for a model whose template does not show tools."""
    functions = "\n".join(json.dumps(tool.as_json()["function"], ensure_ascii=False) for tool in request.tools)
    example = form.render_calls([("function_name", {"argument_name": "value"})])
    if request.choice == "named":
        rule = f"Answer with one call of the function {request.callable[0].name}."
    elif request.choice == "required":
        rule = "Answer with a call of the function that fits best" + (
            ", or with several calls." if request.parallel else "."
        )
    else:
        rule = "Call a function when it helps to answer. When none is needed, answer in plain words."
    if len(request.callable) < len(request.tools) and request.choice != "named":
        rule += f" Of these functions you may call {', '.join(tool.name for tool in request.callable)}."
    return (
        f"You can call functions. Each is described here by a line of JSON, its parameters by a JSON schema:\n\n"
        f"{functions}\n\n"
        f"A call is written like this, with nothing before or after it:\n\n{example}\n\n{rule}"
    )


def _with_instructions(messages: list[dict[str, Any]], text: str, support: TemplateSupport) -> list[dict[str, Any]]:
    role = "system" if support.system else "user"
    if messages and messages[0]["role"] == role:
        content = messages[0]["content"]
        parts = [content, text] if support.system else [text, content]
        return [{**messages[0], "content": "\n\n".join(parts)}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _converted(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat, support: TemplateSupport, names: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Return the messages in the form that the template expects."""
    if support.calls:
        shaped = [_for_template(message, support, names) for message in messages]
        yield from _one_by_one(shaped) if support.one_call else shaped
        return
    results: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name") or "function")
            results.append(f"Result of {name}:\n{content}")
            continue
        if results and message["role"] == "user":
            content = "\n\n".join([*results, content])
        elif results:
            yield {"role": "user", "content": "\n\n".join(results)}
        results.clear()
        if calls := message.get("tool_calls"):
            written = form.render_calls([(call["function"]["name"], _as_object(call)) for call in calls])
            content = f"{content}\n{written}" if content else written
        yield {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
    if results:
        yield {"role": "user", "content": "\n\n".join(results)}


def _for_template(message: Mapping[str, Any], support: TemplateSupport, names: Mapping[str, str]) -> dict[str, Any]:
    shaped = dict(message)
    if message["role"] == "tool":
        identifier = message.get("tool_call_id", "")
        shaped.setdefault("name", names.get(identifier, ""))
        shaped["tool_call_id"] = _call_id(identifier, support)
    if calls := message.get("tool_calls"):
        if support.null_content and not message.get("content"):
            shaped["content"] = None
        shaped["tool_calls"] = [
            {
                "id": _call_id(call["id"], support),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"] if support.text_arguments else _as_object(call),
                },
            }
            for call in calls
        ]
    return shaped


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Put each call into a message of its own, followed by its result."""
    waiting: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            index = next(
                (i for i, call in enumerate(waiting) if call["tool_calls"][0]["id"] == message["tool_call_id"]), None
            )
            if index is not None:
                yield waiting.pop(index)
            yield message
            continue
        yield from waiting
        waiting.clear()
        if len(calls) < 2:
            yield message
            continue
        if message.get("content"):
            yield {key: value for key, value in message.items() if key != "tool_calls"}
        content = None if message["content"] is None else ""
        waiting += [{**message, "content": content, "tool_calls": [call]} for call in calls]
    yield from waiting


def _call_id(identifier: str, support: TemplateSupport) -> str:
    """Return an id that the template accepts, always the same one for the same id."""
    if not support.short_ids or re.fullmatch(r"[a-zA-Z0-9]{9}", identifier):
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "replace")).hexdigest()[:9]


def _as_object(call: Mapping[str, Any]) -> CallArguments:
    """Return the arguments of an earlier call as an object.

    Text that is not a JSON object, which a model may have written, is returned unchanged.
    """
    text: str = call["function"]["arguments"]
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
