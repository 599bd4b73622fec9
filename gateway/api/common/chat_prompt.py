"""The prompt of a conversation: what the chat template is given, and whether the model goes on with reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.common.messages import check_messages, check_template_kwargs
from gateway.api.common.reasoning_params import effort_variables, ends_inside_reasoning
from gateway.flow.requests import ModelEntryLike
from gateway.text.offload import aside, count_objects
from gateway.text.tools.format import ToolRequest
from gateway.text.tools.prompting import conversation
from shared.errors import InvalidRequestError

MAX_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFields:
    """The fields of a request that shape its prompt, beside its messages and tools."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Attributes:
    ids: the prompt.
    opened: it ends inside reasoning.
    """

    ids: list[int]
    opened: bool


async def chat_prompt(
    messages: list[dict[str, Any]],
    tools: ToolRequest | None,
    fields: PromptFields,
    entry: ModelEntryLike,
    *,
    max_tokens: int,
) -> ChatPrompt:
    """Checks, renders and tokenizes a conversation.

    Args:
        messages: as the client sent them; see check_messages.
        max_tokens: of the prompt.

    Raises InvalidRequestError naming the message at fault, or the field that the model's template has no use for, and
    with the template's own message where it refuses.
    """

    def work() -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]:
        checked = check_messages(messages)
        return *conversation(checked, tools, entry.formats.tools, entry.formats.template), _continued(checked, fields)

    said, shown_tools, continued = await aside(count_objects(messages), work)
    variables = check_template_kwargs(fields.chat_template_kwargs, entry.pipeline.template_variables)
    variables = {**variables, **effort_variables(fields.reasoning_effort, variables, entry)}
    if fields.documents:
        _check_documents(fields.documents, entry)
    ids = await entry.pipeline.encode_chat(
        said,
        shown_tools,
        fields.add_generation_prompt is not False and not fields.continue_final_message,
        variables,
        documents=fields.documents or None,
        continue_final=bool(fields.continue_final_message),
        max_tokens=max_tokens,
    )
    return ChatPrompt(ids, ends_inside_reasoning(ids, continued, entry))


def _continued(messages: Sequence[Mapping[str, Any]], fields: PromptFields) -> str:
    """The content that the model is to continue; empty where it begins a message of its own."""
    name = "continue_final_message"
    if not fields.continue_final_message:
        return ""
    if fields.add_generation_prompt:
        raise InvalidRequestError(f"{name} and add_generation_prompt exclude each other.", param=name)
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        raise InvalidRequestError(
            f"{name} needs the last message to be the assistant's, with content and without tool calls.", param=name
        )
    return str(last["content"])


def _check_documents(documents: Sequence[Mapping[str, Any]], entry: ModelEntryLike) -> None:
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidRequestError(
            f"documents has {len(documents)} entries; at most {MAX_DOCUMENTS} are allowed.", param="documents"
        )
    if not entry.pipeline.takes_documents:
        raise InvalidRequestError(
            "documents are not supported by this model: its chat template does not read them.",
            param="documents",
            code="unsupported_parameter",
        )
