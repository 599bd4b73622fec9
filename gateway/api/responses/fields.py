"""The fields of /v1/responses, and the chat request that each of them becomes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from gateway.api.common.fields import (
    MAX_INT32,
    ChatFields,
    JsonObjectFormat,
    JsonSchemaField,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    TextFormat,
    check_range,
    parse_fields,
)
from gateway.api.common.tools import check_num_tools
from gateway.api.responses.refused import without_refused
from gateway.api.responses.tools import chat_tool, chat_tool_choice
from shared.errors import InvalidRequestError, PeltonError
from shared.sampling_params import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING)
"""What `include` takes. OpenAI's other values are of tools and inputs that are not supported."""


class ReasoningField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`reasoning`."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """`text.format`, with what chat has in `json_schema`."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`text`."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class InputFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/responses and /v1/responses/input_tokens take. Items and tools are checked by hand."""

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
    """/v1/responses/input_tokens."""

    model: str | None = None


class ResponseFields(InputFields, forbid_unknown_fields=True, kw_only=True):
    """/v1/responses."""

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
        """Whether `include` asks for it."""
        return name in (self.include or ())


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of GET /v1/responses/{id}."""

    stream: Annotated[bool, msgspec.Meta(description="Send the events of a response made in the background.")] = False
    starting_after: (
        Annotated[int, msgspec.Meta(ge=0, description="The sequence_number behind which to begin; needs `stream`.")]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    include_obfuscation: Annotated[bool, msgspec.Meta(description="Only false: nothing is obfuscated.")] = False


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of GET /v1/responses/{id}/input_items."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="How many items a page has.")] = 20
    order: Annotated[Literal["asc", "desc"], msgspec.Meta(description="Oldest or newest first.")] = "desc"
    after: (
        Annotated[str, msgspec.Meta(description="The id of the last item of the page before.")] | msgspec.UnsetType
    ) = msgspec.UNSET


def parse_response_fields(body: dict[str, Any]) -> ResponseFields:
    """Checks what chat does not. Raises InvalidRequestError naming the field at fault."""
    fields = parse_fields(without_refused(body), ResponseFields)
    _check_input(fields)
    for index, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            place = f"include[{index}]"
            message = f"{place} must be one of {', '.join(INCLUDABLE)}; nothing else can be included."
            raise InvalidRequestError(message, param=place, code="unsupported_parameter")
    if fields.top_logprobs is not None:
        check_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
        if fields.top_logprobs and not fields.includes(LOGPROBS):
            raise InvalidRequestError(f"top_logprobs needs include to have {LOGPROBS!r}.", param="top_logprobs")
    if fields.max_output_tokens is not None:
        check_range("max_output_tokens", fields.max_output_tokens, 1, MAX_INT32)
    if fields.background and fields.store is False:
        raise InvalidRequestError("background needs store to be true.", param="background")
    _check_stream_options(fields)
    return fields


def parse_input_tokens_fields(body: dict[str, Any]) -> InputTokensFields:
    """The fields of /v1/responses/input_tokens. Raises InvalidRequestError naming the one at fault."""
    fields = parse_fields(without_refused(body), InputTokensFields)
    _check_input(fields)
    return fields


def _check_stream_options(fields: ResponseFields) -> None:
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
    for name in options.__struct_fields__:
        if getattr(options, name):
            place = f"stream_options.{name}"
            message = f"{place} is not supported here."
            if name == "resumable":
                message = f"{place} is not supported here: send background."
            raise InvalidRequestError(message, param=place, code="unsupported_parameter")


def _check_input(fields: InputFields) -> None:
    check_num_tools(len(fields.tools or ()))
    if fields.truncation not in (None, "disabled", "auto"):
        raise InvalidRequestError("truncation must be auto or disabled.", param="truncation")


def chat_fields(fields: InputFields, model: str, messages: list[dict[str, Any]]) -> ChatFields:
    """The chat request that asks for the same. Raises InvalidRequestError, by the names of /v1/responses."""
    tools = [chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())]
    asked: dict[str, Any] = {}
    if isinstance(fields, ResponseFields):
        same = ("temperature", "top_p", "metadata", "service_tier", "user", "safety_identifier", "prompt_cache_key")
        asked = {name: getattr(fields, name) for name in (*same, "prompt_cache_retention", "stream")}
        asked["max_completion_tokens"] = fields.max_output_tokens
        if fields.includes(LOGPROBS):
            asked |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return ChatFields(
        model=model,
        messages=messages,
        tools=tools or None,
        tool_choice=chat_tool_choice(fields.tool_choice),
        # Clients say so without tools too.
        parallel_tool_calls=fields.parallel_tool_calls if tools else None,
        response_format=None if fields.text is None else _response_format(fields.text.format),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        **asked,
    )


def _response_format(asked: TextFormat | JsonObjectFormat | SchemaFormat | None) -> ResponseFormat | None:
    if not isinstance(asked, SchemaFormat):
        return asked
    schema = JsonSchemaField(name=asked.name, schema=asked.schema, description=asked.description, strict=asked.strict)
    return JsonSchemaFormat(json_schema=schema)


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
    """An error about a chat request, by the names of the fields that it was made of.

    Args:
        places: of each message.
    """
    error.message = _rename(error.message, places)
    if error.param is not None:
        error.param = "input" if error.param == "messages" else _rename(error.param, places)
    return error


def _rename(text: str, places: Sequence[str]) -> str:
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return _MESSAGE.sub(lambda found: places[int(found[1])] if int(found[1]) < len(places) else "input", text)
