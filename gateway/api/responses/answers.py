"""Schemas of the answers and events of /v1/responses for gateway.openapi; see gateway.api.openai.answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all answers: every field is present, and there are no others."""


class InputTextPart(_Answer, tag_field="type", tag="input_text"):
    """Text of the input."""

    text: str


class OutputTextPart(_Answer, tag_field="type", tag="output_text"):
    """Text of the model. It has no log-probabilities when it is listed as input."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class RefusalPart(_Answer, tag_field="type", tag="refusal"):
    """Refusal of the model in the input."""

    refusal: str


class ReasoningPart(_Answer, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str


class SummaryPart(_Answer, tag_field="type", tag="summary_text"):
    """Summary of reasoning in the input."""

    text: str


class MessageItem(_Answer, tag_field="type", tag="message"):
    """Message of the user, the operator or the model."""

    id: str
    status: ItemStatus
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputTextPart | OutputTextPart | RefusalPart]


class CallItem(_Answer, tag_field="type", tag="function_call"):
    """Call of a function."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Answer, tag_field="type", tag="function_call_output"):
    """Result of a function call."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[InputTextPart]
    name: str | msgspec.UnsetType = msgspec.UNSET


class ReasoningItem(_Answer, tag_field="type", tag="reasoning"):
    """Reasoning of the model. It has no status if it comes from the input."""

    id: str
    summary: list[SummaryPart]
    content: list[ReasoningPart]
    status: ItemStatus | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = MessageItem | CallItem | ReasoningItem
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseUsage(_Answer):
    """Token counts of a response and its prompt."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseError(_Answer):
    """Reason of a failure: one of OpenAI's codes, and the message, param and type of the error."""

    code: Literal["rate_limit_exceeded", "invalid_prompt", "server_error"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(_Answer):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(_Answer):
    """Reasoning parameters of the request."""

    effort: str | None
    summary: None


class ResponseText(_Answer):
    """Output format of the request."""

    format: dict[str, Any]


class ResponseAnswer(_Answer):
    """Response in its current state."""

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
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsAnswer(_Answer):
    """Page of the input items of a response."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensAnswer(_Answer):
    """Number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class _Event(_Answer, tag_field="type"):
    """Event of a stream."""

    sequence_number: int


class _ResponseEvent(_Event):
    response: ResponseAnswer


class CreatedEvent(_ResponseEvent, tag="response.created"):
    """First event of a stream."""


class QueuedEvent(_ResponseEvent, tag="response.queued"):
    """Second event of a response in the background, which waits for the model."""


class InProgressEvent(_ResponseEvent, tag="response.in_progress"):
    """Start of the generation."""


class CompletedEvent(_ResponseEvent, tag="response.completed"):
    """Last event of a complete response."""


class IncompleteEvent(_ResponseEvent, tag="response.incomplete"):
    """Last event of a truncated or cancelled response; the status tells which."""


class FailedEvent(_ResponseEvent, tag="response.failed"):
    """Last event of a failed response."""


class _ItemEvent(_Event):
    output_index: int
    item: OutputItem


class ItemAddedEvent(_ItemEvent, tag="response.output_item.added"):
    """Start of an item."""


class ItemDoneEvent(_ItemEvent, tag="response.output_item.done"):
    """End of an item."""


class _ItemPartEvent(_Event):
    item_id: str
    output_index: int


class _ContentEvent(_ItemPartEvent):
    content_index: int


class PartAddedEvent(_ContentEvent, tag="response.content_part.added"):
    """Start of a content part of an item."""

    part: OutputTextPart | ReasoningPart


class PartDoneEvent(_ContentEvent, tag="response.content_part.done"):
    """End of a content part of an item."""

    part: OutputTextPart | ReasoningPart


class TextDeltaEvent(_ContentEvent, tag="response.output_text.delta"):
    """Piece of the text of a message."""

    delta: str
    logprobs: list[dict[str, Any]]


class TextDoneEvent(_ContentEvent, tag="response.output_text.done"):
    """Complete text of a message."""

    text: str
    logprobs: list[dict[str, Any]]


class ReasoningDeltaEvent(_ContentEvent, tag="response.reasoning_text.delta"):
    """Piece of the reasoning."""

    delta: str


class ReasoningDoneEvent(_ContentEvent, tag="response.reasoning_text.done"):
    """Complete reasoning."""

    text: str


class ArgumentsDeltaEvent(_ItemPartEvent, tag="response.function_call_arguments.delta"):
    """Piece of the arguments of a call."""

    delta: str


class ArgumentsDoneEvent(_ItemPartEvent, tag="response.function_call_arguments.done"):
    """Complete arguments of a call."""

    name: str
    arguments: str


class ErrorEvent(_Event, tag="error"):
    """End of a stream that cannot continue, although its response may."""

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
