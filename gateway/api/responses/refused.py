"""Fields of OpenAI's /v1/responses that are refused, each with what its 400 says and which values change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused.

    Attributes:
        why: or what to send instead.
        taken: values that ask for what is done anyway; null always does.
    """

    why: str
    taken: tuple[Any, ...] = ()


REFUSED = {
    "access_programs": Refusal("there are none"),
    "background_options": Refusal("what runs in the background begins at once"),
    "context_management": Refusal("a context is never compacted"),
    "conversation": Refusal("send previous_response_id"),
    "image": Refusal("there are no images"),
    "max_completion_tokens": Refusal("send max_output_tokens"),
    "max_tokens": Refusal("send max_output_tokens"),
    "max_tool_calls": Refusal("there are no built-in tools"),
    "messages": Refusal("send input"),
    "moderation": Refusal("there is no moderation"),
    "personality": Refusal("there are none; send instructions"),
    "prompt": Refusal("there are no stored prompts"),
    "prompt_cache_options": Refusal("prefixes are always cached", ({"mode": "implicit"},)),
    "reasoning.context": Refusal("the chat template decides which earlier reasoning the model is shown", ("auto",)),
    "reasoning.generate_summary": Refusal("reasoning is shown itself, and not summarized", ("auto",)),
    "reasoning.mode": Refusal("there is one mode", ("standard",)),
    "reasoning.summary": Refusal("reasoning is shown itself, and not summarized", ("auto",)),
    "response_format": Refusal("send text.format"),
    "stop": Refusal("OpenAI's Responses have none"),
    "stream_options.include_obfuscation": Refusal("events are not padded", (False,)),
    "text.verbosity": Refusal("say it in the instructions", ("medium",)),
    "tools[].allowed_callers": Refusal("the model alone calls tools", (["direct"],)),
    "tools[].async": Refusal("the outputs of calls come with the next request", (False,)),
    "tools[].defer_loading": Refusal("the model is shown all tools", (False,)),
    "tools[].output_schema": Refusal("what tools answer is not checked"),
}
"""Fields by their paths; `[]` stands for every entry of a list."""


def without_refused(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without what is refused of it and changes nothing. Raises InvalidRequestError naming what would."""
    for path, refusal in REFUSED.items():
        outer, _, name = path.rpartition(".")
        for place, holder in _holders(body, outer):
            value = holder.get(name)
            # `==` alone would take 0 for False.
            if value is not None and not any(value == one and type(value) is type(one) for one in refusal.taken):
                raise _error(f"{place}.{name}" if place else name, refusal)
    kept = {name: value for name, value in body.items() if name not in REFUSED}
    for path in REFUSED:
        outer, _, name = path.rpartition(".")
        if outer and not outer.endswith("[]") and isinstance(kept.get(outer), dict):
            kept[outer] = {key: value for key, value in kept[outer].items() if key != name}
    return kept


def without_refused_of_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A checked entry of `tools` without what changes nothing."""
    return {name: value for name, value in tool.items() if f"tools[].{name}" not in REFUSED}


def _holders(body: Mapping[str, Any], outer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object that may have the field, with its place."""
    name = outer.removesuffix("[]")
    found = body.get(name) if name else body
    if name != outer and isinstance(found, list):
        yield from ((f"{name}[{index}]", one) for index, one in enumerate(found) if isinstance(one, dict))
    elif isinstance(found, dict):
        yield name, found


def _error(place: str, refusal: Refusal) -> InvalidRequestError:
    message = f"{place} is not supported here: {refusal.why}."
    if refusal.taken:
        message = f"{place} must be {json.dumps(refusal.taken[0])}: {refusal.why}."
    return InvalidRequestError(message, param=place, code="unsupported_parameter")
