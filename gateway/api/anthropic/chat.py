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
    check_choice,
    unsupported,
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
    check_range,
)
from gateway.api.common.reasoning import SWITCHES
from gateway.cluster.registry import ModelEntry
from gateway.http.body import convert
from shared.errors import InvalidRequestError

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
        raise InvalidRequestError(f"temperature must be in [0, 1], got {fields.temperature:g}.", param="temperature")
    chat = chat_of_conversation(fields, entry)
    budget = None if fields.thinking is None else fields.thinking.budget_tokens
    if budget is not None and budget >= fields.max_tokens:
        name = "thinking.budget_tokens"
        raise InvalidRequestError(f"{name} must be less than max_tokens = {fields.max_tokens}.", param=name)
    chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
    chat.stop = fields.stop_sequences
    chat.stream = fields.stream
    if fields.service_tier is not None:
        check_choice("service_tier", fields.service_tier, tuple(_TIERS))
        chat.service_tier = _TIERS[fields.service_tier]
    if fields.metadata is not None and fields.metadata.user_id is not None:
        if len(fields.metadata.user_id) > MAX_USER_ID:
            name = "metadata.user_id"
            raise InvalidRequestError(f"{name} must have at most {MAX_USER_ID} characters.", param=name)
        chat.user = fields.metadata.user_id
    return chat


def _tools(values: list[dict[str, Any]] | None, referenced: Mapping[str, str]) -> list[ToolField] | None:
    """Return the tools of the prompt. One with `defer_loading` is included if a tool_reference block names it."""
    tools = [_tool(value, f"tools[{index}]") for index, value in enumerate(values or ())]
    names = {tool.name for tool in tools}
    for name, place in referenced.items():
        if name not in names:
            raise InvalidRequestError(f"{place} {name[:64]!r} is not the name of a tool in tools.", param=place)
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
        given = repr(kind[:64]) if isinstance(kind, str) else "the given value"
        name = f"{place}.type"
        raise unsupported(name, f"{name} must be custom, not {given}: the server does not run tools.")
    tool = convert(value, ToolDefinition, place)
    check_cache_control(tool.cache_control, f"{place}.cache_control")
    if tool.allowed_callers not in (None, ["direct"]):
        name = f"{place}.allowed_callers"
        raise unsupported(name, f'{name} must be ["direct"]: the server does not run programs.')
    if tool.eager_input_streaming is False:
        name = f"{place}.eager_input_streaming"
        raise unsupported(name, f"{name} must be true: input is streamed as it is generated.")
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
        name = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequestError(f"{name} cannot be combined with tool_choice.type none.", param=name)
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "Missing required parameter: tool_choice.name.",
                param="tool_choice.name",
                code="missing_required_parameter",
            )
        return ToolChoiceField(type="function", function=FunctionName(name=choice.name))
    if choice.name is not None:
        raise InvalidRequestError("tool_choice.name requires tool_choice.type tool.", param="tool_choice.name")
    return _CHOICES[choice.type]


def _apply_output_config(chat: ChatFields, fields: ConversationFields, entry: ModelEntry) -> None:
    """Apply `output_config`, and `output_format`, which is the former name of `output_config.format`."""
    config = fields.output_config or OutputConfig()
    if config.task_budget is not None:
        name = "output_config.task_budget"
        raise unsupported(name, f"{name} is not supported: models do not know their remaining budget.")
    if config.format is not None and fields.output_format is not None:
        name = "output_format"
        raise InvalidRequestError(
            f"{name} and output_config.format are the same field; send only the latter.", param=name
        )
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
            name = "thinking.type"
            raise unsupported(name, f"{name} cannot be disabled: the model's chat template has no switch for it.")
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
        name = "thinking.type"
        raise unsupported(
            name,
            f"{name} between_tools is not supported here: text before a call is returned as text, not as thinking. "
            "Send disabled.",
        )
    check_choice("thinking.type", thinking.type, ("enabled", "disabled", "adaptive"))
    if thinking.display not in (None, "summarized", "omitted"):
        name = "thinking.display"
        raise unsupported(name, f"{name} must be summarized or omitted.")
    if thinking.block_binding is not None and (behavior := thinking.block_binding.prefix_mismatch_behavior) is not None:
        check_choice("thinking.block_binding.prefix_mismatch_behavior", behavior, ("error", "drop_block"))
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        name = "thinking.budget_tokens"
        raise InvalidRequestError(
            f"{name} is required with thinking.type enabled and not allowed with other types.", param=name
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
            given = repr(kind[:64]) if isinstance(kind, str) else "the given value"
            name = f"{place}[{index}].type"
            raise unsupported(name, f"{name} must be {_CLEAR_THINKING}, not {given}: conversations are not shortened.")
    if len(edits) > 1:
        raise InvalidRequestError(f"{place} must have at most one entry of each type.", param=place)
    return _kept(edits[0], f"{place}[0]") if edits else None


def _kept(edit: dict[str, Any], place: str) -> int | None:
    keep = convert(edit, _ClearThinking, place).keep
    name = f"{place}.keep"
    if keep is None:
        return 1  # Anthropic's default
    if isinstance(keep, str):
        check_choice(name, keep, ("all",))
        return None
    check_choice(f"{name}.type", keep.type, ("all", "thinking_turns"))
    if (keep.type == "all") != (keep.value is None):
        raise InvalidRequestError(
            f"{name}.value is required with type thinking_turns and not allowed with type all.", param=f"{name}.value"
        )
    return None if keep.value is None else check_range(f"{name}.value", keep.value, 1, MAX_INT32)
