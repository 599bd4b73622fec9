"""Messages of a chat request: checks, and conversion to what a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.common.fields import check_choice, check_known, check_num_entries, invalid, missing, unsupported
from gateway.text.formats import ModelFormats
from gateway.text.json_text import MAX_DEPTH, is_too_deep
from gateway.text.tools.format import ToolRequest
from gateway.text.tools.prompting import conversation
from shared.errors import ContextLengthError

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CALLS = 128
MAX_NAME = 256
MAX_ARGUMENT_MARKS = 300_000
"""Limit on brackets, colons and commas in the arguments of all calls: bounds the time and memory of parsing them."""
BREAKPOINT = "prompt_cache_breakpoint"
_BREAKPOINT_VALUES: Mapping[str, tuple[str | None, ...]] = {"mode": ("explicit",), "ttl": (None, "30m", "12h")}
_ASSISTANT = ("assistant",)
_REASONING = ("reasoning_content", "reasoning")
_EMPTY_ONLY = ("audio", "function_call", "annotations")
"""Fields of OpenAI's responses that clients send back; accepted if they are empty."""
_PARSED, _PARSED_ARGUMENTS = "parsed", "parsed_arguments"
"""Copies of the content and of a call's arguments that `parse()` of OpenAI's library adds."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "role": ROLES,
    "content": ROLES,
    "name": ROLES,
    "tool_call_id": ("tool",),
    "tool_calls": _ASSISTANT,
    "refusal": _ASSISTANT,
    _PARSED: _ASSISTANT,
    **dict.fromkeys(_REASONING, _ASSISTANT),
    **dict.fromkeys(_EMPTY_ONLY, _ASSISTANT),
}
"""Roles whose messages may have each field; null is the same as an absent field."""
_NAMES: dict[Any, set[str]] = {role: {name for name, roles in _FIELDS.items() if role in roles} for role in ROLES}
_TEXTS = ("name", "tool_call_id", "refusal", *_REASONING)

RESERVED_TEMPLATE_VARIABLES = frozenset((
    "add_generation_prompt", "add_special_tokens", "bos_token", "chat_template", "cls_token",
    "continue_final_message", "conversation", "date_string", "documents", "eos_token", "mask_token", "max_length",
    "messages", "namespace", "pad_token", "padding", "raise_exception", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "self", "sep_token", "strftime_now", "tokenize", "tokenizer",
    "tokenizer_kwargs", "tools", "truncation", "unk_token",
))  # fmt: skip
"""Template variables that the renderer sets; clients must not set them (CVE-2025-62426)."""


def template_messages(
    messages: list[dict[str, Any]], tools: ToolRequest | None, formats: ModelFormats
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Check messages and convert them to what the model's template reads.

    Returns:
        The last message as `check_messages` returns it, then the messages and the tools for the template.

    Raises:
        InvalidRequestError: A message is invalid; the error names its place.
    """
    checked = check_messages(messages)
    return checked[-1], *conversation(checked, tools, formats.tools, formats.template)


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages; contents become strings, and arguments of calls the text of an object.

    Text parts are joined by newlines. Empty system messages are dropped, and `developer` becomes `system`. Templates
    render the fields that they know: many leave out the optional `name`, the id of the call that a tool message
    answers (which is checked here), and earlier reasoning.

    Raises:
        InvalidRequestError: A message is invalid; the error names its place.
        ContextLengthError: There are too many messages.
    """
    check_count(messages)
    _check_structure(messages)
    checked = []
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        result = _check_message(message, f"messages[{index}]")
        if result["role"] == "tool":
            _check_answers_a_call(message, call_ids, f"messages[{index}]")
        call_ids.update(call["id"] for call in result.get("tool_calls", ()))
        if result["role"] != "system" or result["content"]:
            checked.append(result)
    if not checked:
        raise invalid("messages", "has only empty system messages; at least one message must have content.")
    return checked


def check_count(messages: Sequence[object]) -> None:
    """Raise InvalidRequestError if there are no messages, and ContextLengthError if there are too many."""
    if not messages:
        raise invalid("messages", "must not be empty.")
    if len(messages) > MAX_MESSAGES:
        # The same error as for too many tokens: clients and `truncation` react to it by shortening the conversation.
        message = f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed."
        raise ContextLengthError(message, param="messages")


def _check_structure(messages: list[dict[str, Any]]) -> None:
    num_marks = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                num_marks += sum(text.count(mark) for mark in "[{:,")
    if num_marks > MAX_ARGUMENT_MARKS:
        raise invalid(
            "messages",
            f"has tool calls whose arguments have {num_marks} brackets, colons and commas; "
            f"at most {MAX_ARGUMENT_MARKS} are allowed.",
            "too_many_values",
        )


def _check_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    given = [name for name, value in message.items() if value is not None or name not in _FIELDS]
    # Most messages are correct, and a request may have thousands of them.
    if role not in ROLES or not _NAMES[role].issuperset(given):
        check_choice(f"{place}.role", role, ROLES)
        check_known(given, _NAMES[role], place)
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for name in given:
        value, shown = message[name], f"{place}.{name}"
        if name in _EMPTY_ONLY and value != []:
            raise unsupported(shown, "is not supported.")
        if name == "tool_calls" and (calls := _tool_calls(value, shown)):
            result["tool_calls"] = calls
        if name in _TEXTS:
            if not isinstance(value, str):
                raise invalid(shown, "must be a string.", "invalid_type")
            result[name] = value
    refusal = result.pop("refusal", None)
    content, is_assistant = message.get("content"), role == "assistant"
    if (
        content is None
        and is_assistant
        and (refusal is not None or {"tool_calls", "reasoning_content"} & result.keys())
    ):
        content = ""
    result["content"] = _content(content, f"{place}.content", assistant=is_assistant)
    if refusal:
        result["content"] += ("\n" if result["content"] else "") + refusal
    _unify_reasoning(result, place)
    return result


def _unify_reasoning(message: dict[str, Any], place: str) -> None:
    """Give earlier reasoning every name under which templates look for it.

    gpt-oss's template rejects a message with both `thinking` and content before a call, so that such a message gets no
    `thinking`.
    """
    texts = {message[name] for name in _REASONING if name in message}
    if len(texts) > 1:
        raise invalid(f"{place}.reasoning", f"and {place}.reasoning_content are the same field but differ. Send one.")
    for text in texts:
        message.update(dict.fromkeys(_REASONING, text))
        if not (message["content"] and "tool_calls" in message):
            message["thinking"] = text


def _tool_calls(value: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid(place, "must be a list.", "invalid_type")
    check_num_entries(place, len(value), MAX_CALLS)
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(value)]


def _tool_call(call: object, place: str) -> dict[str, Any]:
    call = _object(call, place, ("id", "type", "function", "index"))
    if call.get("type", "function") != "function":
        raise invalid(f"{place}.type", 'must be "function".')
    function = _object(call.get("function"), f"{place}.function", ("name", "arguments", _PARSED_ARGUMENTS))
    return {
        "id": _text(call.get("id"), f"{place}.id"),
        "type": "function",
        "function": {
            "name": _text(function.get("name"), f"{place}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
        },
    }


def _arguments(value: object, place: str) -> str:
    """Return the arguments of a call; empty arguments become `{}`.

    Clients send back what the model wrote, which may be incomplete or invalid JSON; such text is not changed.
    """
    if not isinstance(value, str):
        raise invalid(place, "must be a string of JSON.", "invalid_type")
    try:
        too_deep = is_too_deep(json.loads(value or "{}"))
    except ValueError:
        return value
    except RecursionError:
        too_deep = True
    if too_deep:
        raise invalid(place, f"is nested deeper than {MAX_DEPTH} objects and arrays.")
    return value or "{}"


def _object(value: object, place: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(place, "must be an object.", "invalid_type")
    check_known(value, known, place)
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME:
        raise invalid(place, f"must be a string of 1 to {MAX_NAME} characters.")
    return value


def _check_answers_a_call(message: dict[str, Any], call_ids: set[str], place: str) -> None:
    place = f"{place}.tool_call_id"
    call_id = message.get("tool_call_id")
    if call_id is None:
        raise missing(place)
    if call_id not in call_ids:
        raise invalid(place, f"{call_id[:64]!r} is not the id of a call in an earlier assistant message.")


def _content(content: object, place: str, *, assistant: bool = False) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(place, "must be a string or a non-empty list of text parts.")
    return "\n".join(_part_text(part, f"{place}[{index}]", assistant) for index, part in enumerate(content))


def _part_text(part: object, place: str, assistant: bool) -> str:
    if not isinstance(part, dict):
        raise invalid(place, "must be an object.")
    kind = part.get("type")
    kinds = ("text", "refusal") if assistant else ("text",)
    if kind not in kinds:
        what = " or ".join(f'"{name}"' for name in kinds)
        raise invalid(f"{place}.type", f"must be {what}; other parts are not supported.")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"{place}.{kind}", "must be a string.")
    _object(part, place, ("type", str(kind), *((BREAKPOINT,) if kind == "text" else ())))
    check_breakpoint(part, place)
    return text


def check_breakpoint(part: Mapping[str, Any], place: str) -> None:
    """Check OpenAI's `prompt_cache_breakpoint` of a text part. It has no effect, since every prefix is cached.

    Raises:
        InvalidRequestError: The value is not one that OpenAI documents; null counts as absent.
    """
    value, place = part.get(BREAKPOINT), f"{place}.{BREAKPOINT}"
    if value is None:
        return
    _object(value, place, tuple(_BREAKPOINT_VALUES))
    for name, known in _BREAKPOINT_VALUES.items():
        if value.get(name) not in known:
            allowed = " or ".join(choice for choice in known if choice)
            raise invalid(f"{place}.{name}", f"must be {allowed}.")


def check_template_kwargs(kwargs: Mapping[str, Any], known: frozenset[str]) -> None:
    """Check `chat_template_kwargs`.

    Args:
        kwargs: The field's value.
        known: Names that the model's template reads.

    Raises:
        InvalidRequestError: A name is set by the renderer, or the template does not read it.
    """
    for name in kwargs:
        param = f"chat_template_kwargs.{name[:64]}"
        if name in RESERVED_TEMPLATE_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise invalid(param, "cannot be set by a request.")
        if name not in known:
            raise invalid(param, "is not read by the model's chat template. Leave it out.", "unknown_parameter")
