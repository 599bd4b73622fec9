"""A request of Anthropic's Messages API as the chat request that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.api.anthropic.context import kept_thinking
from gateway.api.anthropic.conversation import conversation
from gateway.api.anthropic.fields import (
    ChoiceField,
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
from gateway.flow.requests import ModelEntryLike
from gateway.http.convert import convert
from shared.errors import InvalidRequestError

MIN_THINKING_TOKENS = 1024
MAX_USER_ID = 256
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_TIERS = {"auto": "auto", "standard_only": "default"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_conversation(fields: ConversationFields, entry: ModelEntryLike) -> ChatFields:
    """The chat request with the same prompt. Raises InvalidRequestError naming the field at fault."""
    said = conversation(fields.system, fields.messages, keep_thinking=kept_thinking(fields.context_management))
    chat = ChatFields(model=fields.model, messages=said.messages)
    if said.continued:
        chat.continue_final_message = True
    chat.tools = _tools(fields.tools, said.referenced)
    if fields.tool_choice is not None:
        chat.tool_choice = _tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use is not None:
            chat.parallel_tool_calls = not fields.tool_choice.disable_parallel_tool_use
    _shape_output(chat, fields, entry)
    if fields.thinking is not None:
        _think(chat, fields.thinking, entry)
    return chat


def chat_of_messages(fields: MessagesFields, entry: ModelEntryLike) -> ChatFields:
    """The chat request with the same answer, but for max_tokens, which may be none, or more than the context has room
    for.

    Raises InvalidRequestError naming the field at fault.
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
    """The tools that the model is shown: those with `defer_loading` once a tool_reference block has named them."""
    tools = [_tool(value, f"tools[{index}]") for index, value in enumerate(values or ())]
    names = {tool.name for tool in tools}
    for name, place in referenced.items():
        if name not in names:
            raise InvalidRequestError(f"{place} {name[:64]!r} is the name of none of the tools.", param=place)
    if values is None:
        return None
    return [
        _tool_field(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if not tool.defer_loading or tool.name in referenced
    ]


def _tool(value: dict[str, Any], place: str) -> ToolDefinition:
    # Before its other fields, of which each kind of tool has others.
    kind = value.get("type")
    if kind is not None and kind != "custom":
        what = repr(kind[:64]) if isinstance(kind, str) else "the given value"
        name = f"{place}.type"
        raise unsupported(name, f"{name} must be custom; {what} is not supported: no tools are run here.")
    tool = convert(value, ToolDefinition, place)
    check_cache_control(tool.cache_control, f"{place}.cache_control")
    for name, idle, why in (
        (
            "allowed_callers",
            tool.allowed_callers in (None, ["direct"]),
            'it must be ["direct"]: no programs are run here',
        ),
        (
            "eager_input_streaming",
            tool.eager_input_streaming is not False,
            "it must be true: input is streamed as it comes",
        ),
    ):
        if not idle:
            raise unsupported(f"{place}.{name}", f"{place}.{name} is not supported here: {why}.")
    return tool


def _tool_field(tool: ToolDefinition, place: str) -> ToolField:
    """The tool as chat knows it; examples, for which chat has no field, follow the description."""
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
        raise InvalidRequestError(f"{name} does not go with the type none.", param=name)
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError(
                "Missing required parameter: tool_choice.name.",
                param="tool_choice.name",
                code="missing_required_parameter",
            )
        return ToolChoiceField(type="function", function=FunctionName(name=choice.name))
    if choice.name is not None:
        raise InvalidRequestError("tool_choice.name goes with the type tool.", param="tool_choice.name")
    return _CHOICES[choice.type]


def _shape_output(chat: ChatFields, fields: ConversationFields, entry: ModelEntryLike) -> None:
    """What `output_config` asks for, and `output_format`, which is its format's former place."""
    config = fields.output_config or OutputConfig()
    if config.task_budget is not None:
        name = "output_config.task_budget"
        raise unsupported(name, f"{name} is not supported here: models are not told how much is left.")
    if config.format is not None and fields.output_format is not None:
        name = "output_format"
        raise InvalidRequestError(f"{name} and output_config.format are one field: send the latter.", param=name)
    for name, form in (("output_config.format", config.format), ("output_format", fields.output_format)):
        if form is not None:
            check_choice(f"{name}.type", form.type, ("json_schema",))
            chat.response_format = JsonSchemaFormat(json_schema=JsonSchemaField(name="output", schema=form.schema))
    if config.effort is not None:
        check_choice("output_config.effort", config.effort, tuple(_EFFORTS))
        if knows_effort(entry):
            chat.reasoning_effort = _EFFORTS[config.effort]


def switches(entry: ModelEntryLike) -> list[str]:
    """What of a model's template turns reasoning on and off."""
    return [name for name in SWITCHES if name in entry.pipeline.template_variables]


def knows_effort(entry: ModelEntryLike) -> bool:
    """Whether a model's template does something with an effort; it is a hint, and others are not given it."""
    return bool(switches(entry)) or "reasoning_effort" in entry.pipeline.template_variables


def can_think(entry: ModelEntryLike) -> bool:
    """Whether there is anything to turn on, off, or limit."""
    return entry.formats.reasoning is not None or bool(switches(entry))


def _think(chat: ChatFields, thinking: ThinkingField, entry: ModelEntryLike) -> None:
    """Turns reasoning on or off by what the model's template reads, and limits it. A model without any has nothing to
    turn on, and keeps to every limit."""
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
        # Thinking is off, and what is said before a call comes back as thinking: a stream would have to hold text back
        # until a call follows it, or none.
        name = "thinking.type"
        raise unsupported(
            name,
            f"{name} between_tools is not supported here: what a model says before a call is text, and not made "
            "thinking of. Send disabled.",
        )
    check_choice("thinking.type", thinking.type, ("enabled", "disabled", "adaptive"))
    if thinking.display not in (None, "summarized", "omitted"):
        name = "thinking.display"
        raise unsupported(name, f"{name} must be summarized or omitted: nothing else is made of thinking here.")
    if thinking.block_binding is not None and (behavior := thinking.block_binding.prefix_mismatch_behavior) is not None:
        check_choice("thinking.block_binding.prefix_mismatch_behavior", behavior, ("error", "drop_block"))
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        name = "thinking.budget_tokens"
        raise InvalidRequestError(f"{name} goes with the type enabled, which needs it.", param=name)
    if thinking.budget_tokens is not None:
        check_range("thinking.budget_tokens", thinking.budget_tokens, MIN_THINKING_TOKENS, MAX_INT32)
