"""Fields of /v1/responses, and their conversion to the fields of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from gateway.api.common.fields import (
    MAX_INT32,
    AllowedTool,
    AllowedTools,
    ChatFields,
    FunctionField,
    FunctionName,
    JsonObjectFormat,
    JsonSchemaField,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    TextFormat,
    ToolChoiceField,
    ToolField,
    check_num_entries,
    check_range,
    invalid,
    parse_fields,
    unsupported,
)
from gateway.api.common.tools import MAX_TOOLS
from gateway.http.body import convert
from gateway.text.grammars.json_schema import is_strict
from shared.errors import InvalidRequestError, PeltonError
from shared.sampling_params import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING)
"""Values of `include`. OpenAI's other values concern tools and inputs that are not supported."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for refusing a field.

    Attributes:
        reason: The reason, or what to send instead.
        accepted: Values that are accepted because they have no effect; null always is.
    """

    reason: str
    accepted: tuple[Any, ...] = ()


REFUSED = {
    "access_programs": Refusal("access programs are not supported"),
    "background_options": Refusal("background responses start immediately"),
    "context_management": Refusal("contexts are never compacted"),
    "conversation": Refusal("send previous_response_id instead"),
    "image": Refusal("images are not supported"),
    "max_completion_tokens": Refusal("send max_output_tokens instead"),
    "max_tokens": Refusal("send max_output_tokens instead"),
    "max_tool_calls": Refusal("there are no built-in tools"),
    "messages": Refusal("send input instead"),
    "moderation": Refusal("there is no moderation"),
    "personality": Refusal("send instructions instead"),
    "prompt": Refusal("prompts are not stored"),
    "prompt_cache_options": Refusal("prefixes are always cached", ({"mode": "implicit"},)),
    "reasoning.context": Refusal("the chat template selects the earlier reasoning that the model reads", ("auto",)),
    "reasoning.generate_summary": Refusal("reasoning is returned in full and never summarized", ("auto",)),
    "reasoning.mode": Refusal("the server has a single mode", ("standard",)),
    "reasoning.summary": Refusal("reasoning is returned in full and never summarized", ("auto",)),
    "response_format": Refusal("send text.format instead"),
    "stop": Refusal("the Responses API has no stop sequences"),
    "stream_options.include_obfuscation": Refusal("events are not padded", (False,)),
    "text.verbosity": Refusal("describe the verbosity in instructions", ("medium",)),
    "tools[].allowed_callers": Refusal("only the model calls tools", (["direct"],)),
    "tools[].async": Refusal("the client sends the results of calls in its next request", (False,)),
    "tools[].defer_loading": Refusal("the prompt always contains all tools", (False,)),
    "tools[].output_schema": Refusal("results of tools are not validated"),
}
"""Refused fields by path; `[]` stands for every entry of a list."""


class ReasoningField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `reasoning`."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(JsonSchemaField, kw_only=True, tag_field="type", tag="json_schema"):
    """Field `text.format` for a JSON Schema; chat has these fields in `json_schema`."""


class TextField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `text`."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class InputFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that /v1/responses and /v1/responses/input_tokens share. Items and tools are validated separately."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    truncation: str | None = None


class InputTokensFields(InputFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of /v1/responses/input_tokens."""

    model: str | None = None


class ResponseFields(InputFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of /v1/responses."""

    model: str
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def includes(self, name: str) -> bool:
        """Return True if `include` contains the value."""
        return name in (self.include or ())


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Query of GET /v1/responses/{id}."""

    stream: Annotated[
        bool, msgspec.Meta(description="Stream the events of a response that was created in the background.")
    ] = False
    starting_after: (
        Annotated[
            int, msgspec.Meta(ge=0, description="The sequence_number after which the stream starts; requires `stream`.")
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    include_obfuscation: Annotated[bool, msgspec.Meta(description="Must be false, because events are not padded.")] = (
        False
    )


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Query of GET /v1/responses/{id}/input_items."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="Maximum number of items in a page.")] = 20
    order: Annotated[Literal["asc", "desc"], msgspec.Meta(description="Oldest or newest first.")] = "desc"
    after: Annotated[str, msgspec.Meta(description="Id of the last item of the previous page.")] | msgspec.UnsetType = (
        msgspec.UNSET
    )


def without_refused(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without refused fields whose values have no effect.

    Raises:
        InvalidRequestError: A refused field has another value.
    """
    kept = {name: dict(value) if isinstance(value, dict) else value for name, value in body.items()}
    for path, refusal in REFUSED.items():
        outer, _, name = path.rpartition(".")
        for place, holder in _holders(kept, outer):
            value = holder.get(name)
            # `==` alone would accept 0 for False.
            if value is not None and not any(value == one and type(value) is type(one) for one in refusal.accepted):
                raise _refused_error(f"{place}.{name}" if place else name, refusal)
            if not outer.endswith("[]"):
                holder.pop(name, None)
    return kept


def _holders(body: dict[str, Any], outer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object that may have the field, with its path."""
    name = outer.removesuffix("[]")
    found = body.get(name) if name else body
    if name != outer and isinstance(found, list):
        yield from ((f"{name}[{index}]", one) for index, one in enumerate(found) if isinstance(one, dict))
    elif isinstance(found, dict):
        yield name, found


def _refused_error(place: str, refusal: Refusal) -> InvalidRequestError:
    problem = f"must be {json.dumps(refusal.accepted[0])}" if refusal.accepted else "is not supported here"
    return unsupported(place, f"{problem}: {refusal.reason}.")


def parse_response_fields(body: dict[str, Any]) -> ResponseFields:
    """Parse the body of /v1/responses and check the constraints that the pipeline of chat does not check.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    fields = parse_fields(without_refused(body), ResponseFields)
    _check_input(fields)
    for index, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            raise unsupported(f"include[{index}]", f"must be one of {', '.join(INCLUDABLE)}.")
    if fields.top_logprobs is not None:
        check_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
        if fields.top_logprobs and not fields.includes(LOGPROBS):
            raise invalid("top_logprobs", f"requires {LOGPROBS!r} in include.")
    if fields.max_output_tokens is not None:
        check_range("max_output_tokens", fields.max_output_tokens, 1, MAX_INT32)
    if fields.background and fields.store is False:
        raise invalid("background", "requires store to be true.")
    _check_stream_options(fields)
    return fields


def parse_input_tokens_fields(body: dict[str, Any]) -> InputTokensFields:
    """Parse the body of /v1/responses/input_tokens.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    fields = parse_fields(without_refused(body), InputTokensFields)
    _check_input(fields)
    return fields


def _check_stream_options(fields: ResponseFields) -> None:
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        raise invalid("stream_options", "requires stream to be true.")
    for name in options.__struct_fields__:
        if getattr(options, name):
            instead = " Send background instead." if name == "resumable" else ""
            raise unsupported(f"stream_options.{name}", f"is not supported here.{instead}")


def _check_input(fields: InputFields) -> None:
    check_num_entries("tools", len(fields.tools or ()), MAX_TOOLS)
    if fields.truncation not in (None, "disabled", "auto"):
        raise invalid("truncation", "must be auto or disabled.")


Tools = Sequence[dict[str, Any]]


def with_strict(tools: Tools) -> list[dict[str, Any]]:
    """Return the tools, each with `strict`.

    A tool that does not set it is strict if its schema is within OpenAI's strict subset.
    """
    return [
        {**tool, "strict": is_strict(tool.get("parameters"))} if tool.get("strict") is None else tool for tool in tools
    ]


def without_strict(tools: Tools, given: Tools) -> list[dict[str, Any]]:
    """Return the tools, strict only where the given tool sets `strict`."""
    return [
        tool if original.get("strict") is not None else {**tool, "strict": False}
        for tool, original in zip(tools, given)
    ]


def chat_tool(tool: dict[str, Any], place: str) -> ToolField:
    """Convert an entry of `tools`. Raise InvalidRequestError if it is invalid."""
    if tool.get("type") != "function":
        raise unsupported(f"{place}.type", 'must be "function", the only supported kind of tool.')
    fields = {name: value for name, value in tool.items() if name != "type" and f"tools[].{name}" not in REFUSED}
    return ToolField(type="function", function=convert(fields, FunctionField, place))


class _NamedFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str


class _AllowedFunctions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    mode: str
    tools: list[_NamedFunction]


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | ToolChoiceField | None:
    """Convert `tool_choice`. Raise InvalidRequestError if it is invalid."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        named = convert(choice, _NamedFunction, "tool_choice")
        return ToolChoiceField(type="function", function=FunctionName(name=named.name))
    if choice.get("type") == "allowed_tools":
        allowed = convert(choice, _AllowedFunctions, "tool_choice")
        tools = [AllowedTool(type=tool.type, function=FunctionName(name=tool.name)) for tool in allowed.tools]
        return ToolChoiceField(type="allowed_tools", allowed_tools=AllowedTools(mode=allowed.mode, tools=tools))
    raise unsupported("tool_choice.type", 'must be "function" or "allowed_tools".')


def chat_fields(fields: InputFields, model: str, messages: list[dict[str, Any]]) -> ChatFields:
    """Return the equivalent chat request.

    Raises:
        InvalidRequestError: A tool or `tool_choice` is invalid.
    """
    tools = [chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())]
    copied: dict[str, Any] = {}
    if isinstance(fields, ResponseFields):
        same = ("temperature", "top_p", "metadata", "service_tier", "user", "safety_identifier", "prompt_cache_key")
        copied = {name: getattr(fields, name) for name in (*same, "prompt_cache_retention", "stream")}
        copied["max_completion_tokens"] = fields.max_output_tokens
        if fields.includes(LOGPROBS):
            copied |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return ChatFields(
        model=model,
        messages=messages,
        tools=tools or None,
        tool_choice=chat_tool_choice(fields.tool_choice),
        # Clients also send it without tools.
        parallel_tool_calls=fields.parallel_tool_calls if tools else None,
        response_format=None if fields.text is None else _response_format(fields.text.format),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        **copied,
    )


def _response_format(requested: TextFormat | JsonObjectFormat | SchemaFormat | None) -> ResponseFormat | None:
    return JsonSchemaFormat(json_schema=requested) if isinstance(requested, SchemaFormat) else requested


_RENAMED = (
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?"), "text.format"),
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\btool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"(\btool_choice\.tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\btool_call_id\b"), "call_id"),
)
_MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.tool_calls\[\d+\]\.function|\.tool_calls\[\d+\])?")


def renamed(error: PeltonError, places: Sequence[str]) -> PeltonError:
    """Replace chat's field names in an error with those of /v1/responses.

    Args:
        error: Error about the chat request. It is modified.
        places: Field of the request from which each chat message was made.
    """
    error.message = _rename(error.message, places)
    if error.param is not None:
        error.param = "input" if error.param == "messages" else _rename(error.param, places)
    return error


def _rename(text: str, places: Sequence[str]) -> str:
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return _MESSAGE.sub(lambda found: places[int(found[1])] if int(found[1]) < len(places) else "input", text)
