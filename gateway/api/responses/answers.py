"""What /v1/responses answers and streams, as gateway.openapi declares it; see gateway.api.openai.answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Has all of its fields and no others."""


class InputTextPart(_Answer, tag_field="type", tag="input_text"):
    """Text that was put in."""

    text: str


class OutputTextPart(_Answer, tag_field="type", tag="output_text"):
    """Text of the model. Input that is listed has no log-probabilities."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class RefusalPart(_Answer, tag_field="type", tag="refusal"):
    """A refusal that was put in as what the model said."""

    refusal: str


class ReasoningPart(_Answer, tag_field="type", tag="reasoning_text"):
    """Reasoning itself."""

    text: str


class SummaryPart(_Answer, tag_field="type", tag="summary_text"):
    """A summary of reasoning that was put in."""

    text: str


class MessageItem(_Answer, tag_field="type", tag="message"):
    """What was said."""

    id: str
    status: ItemStatus
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputTextPart | OutputTextPart | RefusalPart]


class CallItem(_Answer, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Answer, tag_field="type", tag="function_call_output"):
    """What a function answered."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[InputTextPart]
    name: str | msgspec.UnsetType = msgspec.UNSET


class ReasoningItem(_Answer, tag_field="type", tag="reasoning"):
    """What the model reasoned. One that was put in has no status."""

    id: str
    summary: list[SummaryPart]
    content: list[ReasoningPart]
    status: ItemStatus | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = MessageItem | CallItem | ReasoningItem
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseUsage(_Answer):
    """Tokens of a response and its prompt."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseError(_Answer):
    """Why a response failed: a code of OpenAI's, and what the error would say otherwise."""

    code: Literal["rate_limit_exceeded", "invalid_prompt", "server_error"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(_Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(_Answer):
    """How the model was to reason."""

    effort: str | None
    summary: None


class ResponseText(_Answer):
    """What the text was to be."""

    format: dict[str, Any]


class ResponseAnswer(_Answer):
    """A response, as it is."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class ResponseDeletedAnswer(_Answer):
    """A response was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsAnswer(_Answer):
    """A page of what was put into a response."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensAnswer(_Answer):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class _Event(_Answer, tag_field="type"):
    """An event of a stream."""

    sequence_number: int


class _ResponseEvent(_Event):
    response: ResponseAnswer


class CreatedEvent(_ResponseEvent, tag="response.created"):
    """The first."""


class QueuedEvent(_ResponseEvent, tag="response.queued"):
    """The second of one in the background: it waits for the model."""


class InProgressEvent(_ResponseEvent, tag="response.in_progress"):
    """The model has begun."""


class CompletedEvent(_ResponseEvent, tag="response.completed"):
    """The last of a response that is whole."""


class IncompleteEvent(_ResponseEvent, tag="response.incomplete"):
    """The last of one that was cut off, or cancelled: its status says which."""


class FailedEvent(_ResponseEvent, tag="response.failed"):
    """The last of one that failed."""


class _ItemEvent(_Event):
    output_index: int
    item: OutputItem


class ItemAddedEvent(_ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class ItemDoneEvent(_ItemEvent, tag="response.output_item.done"):
    """An item has ended."""


class _PlaceEvent(_Event):
    item_id: str
    output_index: int


class _ContentEvent(_PlaceEvent):
    content_index: int


class PartAddedEvent(_ContentEvent, tag="response.content_part.added"):
    """A part of an item begins."""

    part: OutputTextPart | ReasoningPart


class PartDoneEvent(_ContentEvent, tag="response.content_part.done"):
    """A part of an item has ended."""

    part: OutputTextPart | ReasoningPart


class TextDeltaEvent(_ContentEvent, tag="response.output_text.delta"):
    """More of what the model says."""

    delta: str
    logprobs: list[dict[str, Any]]


class TextDoneEvent(_ContentEvent, tag="response.output_text.done"):
    """All of what it said."""

    text: str
    logprobs: list[dict[str, Any]]


class ReasoningDeltaEvent(_ContentEvent, tag="response.reasoning_text.delta"):
    """More of the reasoning."""

    delta: str


class ReasoningDoneEvent(_ContentEvent, tag="response.reasoning_text.done"):
    """All of it."""

    text: str


class ArgumentsDeltaEvent(_PlaceEvent, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDoneEvent(_PlaceEvent, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


class ErrorEvent(_Event, tag="error"):
    """The stream cannot go on, though its response may."""

    code: str | None
    message: str
    param: str | None


ResponseEvent = (
    CreatedEvent
    | QueuedEvent
    | InProgressEvent
    | CompletedEvent
    | IncompleteEvent
    | FailedEvent
    | ItemAddedEvent
    | ItemDoneEvent
    | PartAddedEvent
    | PartDoneEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent
)
