"""Items of /v1/responses: validation of input items, their stored form, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.common.fields import check_choice, check_known, invalid, unsupported
from gateway.api.common.messages import BREAKPOINT, check_breakpoint
from gateway.api.common.reasoning import unpacked_reasoning
from gateway.stores.ids import new_id

MAX_ITEMS = 4096
REFERENCE = "item_reference"
"""Type of an input item that refers to a stored item."""
_MAX_ID = 256
_ROLES = ("user", "system", "developer", "assistant")
_STATUSES = (None, "in_progress", "completed", "incomplete")
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_FIELDS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "parsed_arguments", "caller", "namespace", "async"),
    "function_call_output": ("call_id", "output", "caller", "name", "namespace"),
    "reasoning": ("summary", "content", "encrypted_content"),
    REFERENCE: (),
}
_PHASES = (None, "commentary", "final_answer")
"""Values that OpenAI's models write. They are ignored, because no chat template uses them."""
_NULL_ONLY = ("caller", "namespace", "async")
"""Fields of OpenAI's own models. Its library sends them back as null."""
_PARTS = {
    "input_text": ("text", BREAKPOINT),
    "output_text": ("text", "annotations", "logprobs", "parsed"),
    "refusal": ("refusal",),
    "summary_text": ("text",),
    "reasoning_text": ("text",),
}


def new_item_id(kind: str, gateway_index: int) -> str:
    """Return a new id for an item of a type; it names the gateway process that stores the item."""
    return new_id(_PREFIXES[kind], gateway_index)


def input_items(value: str | list[dict[str, Any]], gateway_index: int) -> list[dict[str, Any]]:
    """Return the items of `input` in their stored form: each has a type, an id and content parts.

    References are not resolved.

    Raises:
        InvalidRequestError: An item is invalid; the error names its path.
    """
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input", new_item_id("message", gateway_index))]
    if not value:
        raise invalid("input", "must not be empty.")
    if len(value) > MAX_ITEMS:
        raise invalid("input", f"has {len(value)} items; at most {MAX_ITEMS} are allowed.")
    return [_item(item, f"input[{index}]", gateway_index) for index, item in enumerate(value)]


def _item(item: Mapping[str, Any], place: str, gateway_index: int) -> dict[str, Any]:
    kind = _kind(item)
    check_choice(f"{place}.type", kind, _FIELDS)
    check_known(item, ("type", "id", "status", *_FIELDS[kind]), place)
    for name in _NULL_ONLY:
        if item.get(name) is not None:
            raise unsupported(f"{place}.{name}", "is not supported.")
    check_choice(f"{place}.status", item.get("status"), _STATUSES)
    if kind == REFERENCE or item.get("id") is not None:
        identifier = _text(item, "id", place)
    else:
        identifier = new_item_id(kind, gateway_index)
    if len(identifier) > _MAX_ID:
        raise invalid(f"{place}.id", f"has more than {_MAX_ID} characters.")
    if kind == REFERENCE:
        return {"id": identifier, "type": kind}
    if kind == "message":
        return _message(item, place, identifier)
    if kind == "reasoning":
        return _reasoning(item, place, identifier)
    call_id = _text(item, "call_id", place)
    if kind == "function_call":
        name, arguments = _text(item, "name", place), _text(item, "arguments", place, empty=True)
        called = {"call_id": call_id, "name": name, "arguments": arguments, "status": "completed"}
        return {"id": identifier, "type": kind, **called}
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, ("input_text",), f"{place}.output")
        if not output:
            raise invalid(f"{place}.output", "must not be empty.")
    named = {} if item.get("name") is None else {"name": _text(item, "name", place)}
    return {"id": identifier, "type": kind, "call_id": call_id, "output": output, "status": "completed", **named}


def _kind(item: Mapping[str, Any]) -> str:
    """Return the type of an item. OpenAI allows messages, and references with only an id, to omit it."""
    kind = item.get("type")
    if kind is None:
        return REFERENCE if set(item) - {"type"} == {"id"} else "message"
    return kind if isinstance(kind, str) else ""


def _reasoning(item: Mapping[str, Any], place: str, identifier: str) -> dict[str, Any]:
    content = _parts(_listed(item, "content"), ("reasoning_text",), f"{place}.content")
    if item.get("encrypted_content") is not None:
        text = unpacked_reasoning(_text(item, "encrypted_content", place), f"{place}.encrypted_content")
        content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": identifier,
        "type": "reasoning",
        "summary": _parts(_listed(item, "summary"), ("summary_text",), f"{place}.summary"),
        "content": content,
    }


def _message(item: Mapping[str, Any], place: str, identifier: str) -> dict[str, Any]:
    role = item.get("role")
    check_choice(f"{place}.role", role, _ROLES)
    check_choice(f"{place}.phase", item.get("phase"), _PHASES)
    kinds = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": kinds[0], "text": content}]
    parts = _parts(content, kinds, f"{place}.content")
    if not parts:
        raise invalid(f"{place}.content", "must not be empty.")
    return {"id": identifier, "type": "message", "status": "completed", "role": role, "content": parts}


def _parts(value: object, kinds: tuple[str, ...], place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid(place, "must be a string or a list of parts.", "invalid_type")
    return [_part(part, kinds, f"{place}[{index}]") for index, part in enumerate(value)]


def _part(part: object, kinds: tuple[str, ...], place: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise invalid(place, "must be an object.", "invalid_type")
    kind = part.get("type")
    check_choice(f"{place}.type", kind, kinds)
    check_known(part, ("type", *_PARTS[str(kind)]), place)
    if _listed(part, "annotations") != []:
        raise unsupported(f"{place}.annotations", "is not supported.")
    if not isinstance(_listed(part, "logprobs"), list):
        raise invalid(f"{place}.logprobs", "must be a list.", "invalid_type")
    check_breakpoint(part, place)
    name = _PARTS[str(kind)][0]
    text = {"type": kind, name: _text(part, name, place, empty=True)}
    return {**text, "annotations": []} if kind == "output_text" else text


def _listed(value: Mapping[str, Any], name: str) -> object:
    """Return a field whose value should be a list; null and a missing field mean an empty list."""
    return [] if value.get(name) is None else value[name]


def _text(value: Mapping[str, Any], name: str, place: str, *, empty: bool = False) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not (text or empty):
        raise invalid(f"{place}.{name}", "must be a string.", "invalid_type")
    return text


class Conversation:
    """Chat messages made from items. The reasoning, text and calls of one turn of the model become one message.

    Attributes:
        messages: The messages; see gateway.api.common.messages.
        places: Field of the request from which each message was made.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        # Message of the assistant to which the next item may belong.
        self._turn: dict[str, Any] | None = None
        if instructions:
            self._add({"role": "system", "content": instructions}, "instructions")

    def add(self, items: Sequence[Mapping[str, Any]], place: str) -> None:
        """Append validated items. `place` is the field that contains them; in `input[]`, the index is inserted."""
        for index, item in enumerate(items):
            self._append(item, place.replace("[]", f"[{index}]"))

    def turns(self) -> list[int]:
        """Return the indices at which a truncated conversation can start: the user messages except the first one."""
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return users[1:]

    def since(self, start: int) -> list[dict[str, Any]]:
        """Return the messages from an index on, preceded by the earlier system and developer messages."""
        instructions = [message for message in self.messages[:start] if message["role"] in ("system", "developer")]
        return instructions + self.messages[start:]

    def _append(self, item: Mapping[str, Any], place: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            text = "\n".join(part["text"] for part in item["content"] or item["summary"])
            if text:
                self._assistant(place, "reasoning_content")["reasoning_content"] = text
        elif kind == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": called}
            self._assistant(place, "").setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            self._add({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])}, place)
        elif item["role"] == "assistant":
            self._assistant(place, "content")["content"] = _content(item["content"])
        else:
            self._add({"role": item["role"], "content": _content(item["content"])}, place)

    def _assistant(self, place: str, field: str) -> dict[str, Any]:
        """Return the message of this turn, or a new one if this one already has the field or one that follows it."""
        turn = self._turn
        later = {
            "reasoning_content": ("reasoning_content", "content", "tool_calls"),
            "content": ("content", "tool_calls"),
        }
        if turn is None or any(name in turn for name in later.get(field, ())):
            turn = {"role": "assistant"}
            self._add(turn, place)
            self._turn = turn
        return turn

    def _add(self, message: dict[str, Any], place: str) -> None:
        self._turn = None
        self.messages.append(message)
        self.places.append(place)


def _content(parts: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Convert content parts to those of chat."""
    if isinstance(parts, str):
        return parts
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else {"type": "text", "text": part["text"]}
        for part in parts
    ]
