"""Conversion of a request of Anthropic's Messages API to a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.anthropic.conversation import conversation
from gateway.api.anthropic.fields import (
    ChoiceField,
    ContextManagement,
    ConversationFields,
    MessagesFields,
    OutputConfig,
    ThinkingField,
    ToolDefinition,
    check_cache_control,
    given_type,
)
from gateway.api.common.fields import (
    MAX_INT32,
    ChatFields,
    FunctionField,
    FunctionName,
    JsonSchemaField,
    JsonSchemaFormat,
    PlacedToolField,
    ToolChoiceField,
    ToolField,
    check_choice,
    check_range,
    invalid,
    missing,
    unsupported,
)
from gateway.api.common.reasoning import SWITCHES
from gateway.cluster.registry import ModelEntry
from gateway.http.body import convert

MIN_THINKING_TOKENS = 1024
MAX_USER_ID = 256
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_TIERS = {"auto": "auto", "standard_only": "default"}
_CLEAR_THINKING = "clear_thinking_20251015"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_conversation(fields: ConversationFields, entry: ModelEntry) -> ChatFields:
    """Return the chat request with the same prompt.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    converted = conversation(fields.system, fields.messages, keep_thinking=_kept_rounds(fields.context_management))
    chat = ChatFields(model=fields.model, messages=converted.messages)
    if converted.continued:
        chat.continue_final_message = True
    chat.tools = _tools(fields.tools, converted.referenced)
    if fields.tool_choice is not None:
        chat.tool_choice = _tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use is not None:
            chat.parallel_tool_calls = not fields.tool_choice.disable_parallel_tool_use
    _apply_output_config(chat, fields, entry)
    if fields.thinking is not None:
        _apply_thinking(chat, fields.thinking, entry)
    return chat


def chat_of_messages(fields: MessagesFields, entry: ModelEntry) -> ChatFields:
    """Return the equivalent chat request without max_tokens, which may be 0 or exceed the room in the context.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    check_range("max_tokens", fields.max_tokens, 0, MAX_INT32)
    if fields.temperature is not None and not 0.0 <= fields.temperature <= 1.0:
        raise invalid("temperature", f"must be in [0, 1], got {fields.temperature:g}.")
    chat = chat_of_conversation(fields, entry)
    budget = None if fields.thinking is None else fields.thinking.budget_tokens
    if budget is not None and budget >= fields.max_tokens:
        raise invalid("thinking.budget_tokens", f"must be less than max_tokens = {fields.max_tokens}.")
    chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
    chat.stop = fields.stop_sequences
    chat.stream = fields.stream
    if fields.service_tier is not None:
        check_choice("service_tier", fields.service_tier, tuple(_TIERS))
        chat.service_tier = _TIERS[fields.service_tier]
    if fields.metadata is not None and fields.metadata.user_id is not None:
        if len(fields.metadata.user_id) > MAX_USER_ID:
            raise invalid("metadata.user_id", f"must have at most {MAX_USER_ID} characters.")
        chat.user = fields.metadata.user_id
    return chat


def _tools(values: list[dict[str, Any]] | None, referenced: Mapping[str, str]) -> list[ToolField] | None:
    """Return the tools of the prompt. One with `defer_loading` is included if a tool_reference block names it."""
    tools = [_tool(value, f"tools[{index}]") for index, value in enumerate(values or ())]
    names = {tool.name for tool in tools}
    for name, place in referenced.items():
        if name not in names:
            raise invalid(place, f"{name[:64]!r} is not the name of a tool in tools.")
    if values is None:
        return None
    return [
        _tool_field(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if not tool.defer_loading or tool.name in referenced
    ]


def _tool(value: dict[str, Any], place: str) -> ToolDefinition:
    # Check the type first, because each type of tool has other fields.
    kind = value.get("type")
    if kind is not None and kind != "custom":
        raise unsupported(f"{place}.type", f"must be custom, not {given_type(kind)}: the server does not run tools.")
    tool = convert(value, ToolDefinition, place)
    check_cache_control(tool.cache_control, f"{place}.cache_control")
    if tool.allowed_callers not in (None, ["direct"]):
        raise unsupported(f"{place}.allowed_callers", 'must be ["direct"]: the server does not run programs.')
    if tool.eager_input_streaming is False:
        raise unsupported(f"{place}.eager_input_streaming", "must be true: input is streamed as it is generated.")
    return tool


def _tool_field(tool: ToolDefinition, place: str) -> ToolField:
    """Convert a tool to chat's form. Examples are appended to the description, because chat has no field for them."""
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of input:\n{examples}".strip()
    function = FunctionField(name=tool.name, description=description, parameters=tool.input_schema, strict=tool.strict)
    return PlacedToolField(type="function", function=function, place=place)


def _tool_choice(choice: ChoiceField) -> str | ToolChoiceField:
    check_choice("tool_choice.type", choice.type, (*_CHOICES, "tool"))
    if choice.type == "none" and choice.disable_parallel_tool_use is not None:
        raise invalid("tool_choice.disable_parallel_tool_use", "cannot be combined with tool_choice.type none.")
    if choice.type == "tool":
        if choice.name is None:
            raise missing("tool_choice.name")
        return ToolChoiceField(type="function", function=FunctionName(name=choice.name))
    if choice.name is not None:
        raise invalid("tool_choice.name", "requires tool_choice.type tool.")
    return _CHOICES[choice.type]


def _apply_output_config(chat: ChatFields, fields: ConversationFields, entry: ModelEntry) -> None:
    """Apply `output_config`, and `output_format`, which is the former name of `output_config.format`."""
    config = fields.output_config or OutputConfig()
    if config.task_budget is not None:
        raise unsupported("output_config.task_budget", "is not supported: models do not know their remaining budget.")
    if config.format is not None and fields.output_format is not None:
        raise invalid("output_format", "and output_config.format are the same field; send only the latter.")
    for name, form in (("output_config.format", config.format), ("output_format", fields.output_format)):
        if form is not None:
            check_choice(f"{name}.type", form.type, ("json_schema",))
            chat.response_format = JsonSchemaFormat(json_schema=JsonSchemaField(name="output", schema=form.schema))
    if config.effort is not None:
        check_choice("output_config.effort", config.effort, tuple(_EFFORTS))
        if knows_effort(entry):
            chat.reasoning_effort = _EFFORTS[config.effort]


def switches(entry: ModelEntry) -> list[str]:
    """Return the variables of a model's template that turn reasoning on and off."""
    return [name for name in SWITCHES if name in entry.pipeline.template_variables]


def knows_effort(entry: ModelEntry) -> bool:
    """Return True if a model's template uses an effort. It is a hint, which other models do not get."""
    return bool(switches(entry)) or "reasoning_effort" in entry.pipeline.template_variables


def can_think(entry: ModelEntry) -> bool:
    """Return True if a model has reasoning that can be turned on, turned off or limited."""
    return entry.formats.reasoning is not None or bool(switches(entry))


def _apply_thinking(chat: ChatFields, thinking: ThinkingField, entry: ModelEntry) -> None:
    """Turn reasoning on or off with the template's variables, and limit it.

    A model without reasoning accepts every setting: it has nothing to turn on and exceeds no limit.
    """
    _check_thinking(thinking)
    found = switches(entry)
    if thinking.type == "disabled":
        if entry.formats.reasoning is not None and not found:
            raise unsupported("thinking.type", "cannot be disabled: the model's chat template has no switch for it.")
        chat.reasoning_effort = "none"
        return
    if thinking.budget_tokens is not None and can_think(entry):
        chat.thinking_token_budget = thinking.budget_tokens
    if found:
        chat.chat_template_kwargs = dict.fromkeys(found, True)


def _check_thinking(thinking: ThinkingField) -> None:
    if thinking.type == "between_tools":
        # Text before a call would be returned as thinking, so a stream would have to hold text back until it is known
        # whether a call follows.
        raise unsupported(
            "thinking.type",
            "between_tools is not supported here: text before a call is returned as text, not as thinking. "
            "Send disabled.",
        )
    check_choice("thinking.type", thinking.type, ("enabled", "disabled", "adaptive"))
    if thinking.display not in (None, "summarized", "omitted"):
        raise unsupported("thinking.display", "must be summarized or omitted.")
    if thinking.block_binding is not None and (behavior := thinking.block_binding.prefix_mismatch_behavior) is not None:
        check_choice("thinking.block_binding.prefix_mismatch_behavior", behavior, ("error", "drop_block"))
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        raise invalid(
            "thinking.budget_tokens", "is required with thinking.type enabled and not allowed with other types."
        )
    if thinking.budget_tokens is not None:
        check_range("thinking.budget_tokens", thinking.budget_tokens, MIN_THINKING_TOKENS, MAX_INT32)


class _Turns(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    value: int | None = None


class _ClearThinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Edit of the only supported type."""

    type: str
    keep: str | _Turns | None = None


def _kept_rounds(management: ContextManagement | None) -> int | None:
    """Return the number of the assistant's last rounds that keep their thinking; None keeps all.

    Raises:
        InvalidRequestError: An edit is invalid, depends on the length of the conversation, or summarizes it.
    """
    place = "context_management.edits"
    edits = (management.edits if management is not None else None) or []
    for index, edit in enumerate(edits):
        kind = edit.get("type")
        if kind != _CLEAR_THINKING:
            raise unsupported(
                f"{place}[{index}].type",
                f"must be {_CLEAR_THINKING}, not {given_type(kind)}: conversations are not shortened.",
            )
    if len(edits) > 1:
        raise invalid(place, "must have at most one entry of each type.")
    if not edits:
        return None
    keep = convert(edits[0], _ClearThinking, f"{place}[0]").keep
    name = f"{place}[0].keep"
    if keep is None:
        return 1  # Anthropic's default
    if isinstance(keep, str):
        check_choice(name, keep, ("all",))
        return None
    check_choice(f"{name}.type", keep.type, ("all", "thinking_turns"))
    if (keep.type == "all") != (keep.value is None):
        raise invalid(f"{name}.value", "is required with type thinking_turns and not allowed with type all.")
    return None if keep.value is None else check_range(f"{name}.value", keep.value, 1, MAX_INT32)
