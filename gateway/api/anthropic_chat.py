"""A request of Anthropic's Messages API as the chat request that it asks for."""

from __future__ import annotations

from typing import Any

from gateway.api.anthropic_conversation import chat_messages
from gateway.api.anthropic_params import (
    ChoiceField,
    ConversationFields,
    MessagesFields,
    OutputFormat,
    ThinkingField,
    ToolDefinition,
    check_cache_control,
    check_choice,
    convert,
    unsupported,
)
from gateway.api.params import ChatFields
from gateway.api.ranges import MAX_INT32, check_range
from gateway.api.reasoning_params import SWITCHES
from gateway.api.structured_fields import JsonSchemaField, JsonSchemaFormat
from gateway.api.tool_params import FunctionField, FunctionName, ToolChoiceField, ToolField
from gateway.flow.requests import ModelEntryLike
from shared.errors import InvalidRequestError

MIN_THINKING_TOKENS = 1024
MAX_USER_ID = 256
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_TIERS = {"auto": "auto", "standard_only": "default"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_conversation(fields: ConversationFields, entry: ModelEntryLike) -> ChatFields:
    """The chat request with the same prompt. Raises InvalidRequestError naming the field at fault."""
    messages, continued = chat_messages(fields.system, fields.messages)
    chat = ChatFields(model=fields.model, messages=messages)
    if continued:
        chat.continue_final_message = True
    if fields.tools is not None:
        chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        chat.tool_choice = _tool_choice(fields.tool_choice)
        if fields.tool_choice.disable_parallel_tool_use is not None:
            chat.parallel_tool_calls = not fields.tool_choice.disable_parallel_tool_use
    if fields.output_config is not None:
        if fields.output_config.format is not None:
            chat.response_format = _response_format(fields.output_config.format)
        if fields.output_config.effort is not None:
            check_choice("output_config.effort", fields.output_config.effort, tuple(_EFFORTS))
            chat.reasoning_effort = _EFFORTS[fields.output_config.effort]
    if fields.thinking is not None:
        _think(chat, fields.thinking, entry)
    return chat


def chat_of_messages(fields: MessagesFields, entry: ModelEntryLike) -> ChatFields:
    """The chat request with the same answer, but for max_tokens: what is left of the context may be less.

    Raises InvalidRequestError naming the field at fault.
    """
    check_range("max_tokens", fields.max_tokens, 1, MAX_INT32)
    if fields.temperature is not None and not 0.0 <= fields.temperature <= 1.0:
        raise InvalidRequestError(f"temperature must be in [0, 1], got {fields.temperature:g}.", param="temperature")
    chat = chat_of_conversation(fields, entry)
    if chat.thinking_token_budget is not None and chat.thinking_token_budget >= fields.max_tokens:
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


def _tool(value: dict[str, Any], place: str) -> ToolField:
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
        ("defer_loading", not tool.defer_loading, "it must be false: the model is shown all tools"),
        (
            "eager_input_streaming",
            tool.eager_input_streaming is not False,
            "it must be true: input is streamed as it comes",
        ),
        ("input_examples", not tool.input_examples, "put them into the description"),
    ):
        if not idle:
            raise unsupported(f"{place}.{name}", f"{place}.{name} is not supported here: {why}.")
    function = FunctionField(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolField(type="function", function=function)


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


def _response_format(form: OutputFormat) -> JsonSchemaFormat:
    check_choice("output_config.format.type", form.type, ("json_schema",))
    return JsonSchemaFormat(json_schema=JsonSchemaField(name="output", schema=form.schema))


def _think(chat: ChatFields, thinking: ThinkingField, entry: ModelEntryLike) -> None:
    """Turns reasoning on or off by what the model's template reads, and limits it."""
    check_choice("thinking.type", thinking.type, ("enabled", "disabled", "adaptive"))
    if thinking.display not in (None, "summarized"):
        name = "thinking.display"
        raise unsupported(name, f"{name} must be summarized: thinking is shown, and whole.")
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        name = "thinking.budget_tokens"
        raise InvalidRequestError(f"{name} goes with the type enabled, which needs it.", param=name)
    switches = [name for name in SWITCHES if name in entry.pipeline.template_variables]
    if thinking.type == "disabled":
        if chat.reasoning_effort is not None:
            name = "output_config.effort"
            raise InvalidRequestError(f"{name} does not go with thinking of the type disabled.", param=name)
        if entry.formats.reasoning is not None and not switches:
            name = "thinking.type"
            raise unsupported(name, f"{name} cannot be disabled: the model's chat template has no switch for it.")
        chat.reasoning_effort = "none"
        return
    if thinking.budget_tokens is not None:
        check_range("thinking.budget_tokens", thinking.budget_tokens, MIN_THINKING_TOKENS, MAX_INT32)
        chat.thinking_token_budget = thinking.budget_tokens
    if switches:
        chat.chat_template_kwargs = dict.fromkeys(switches, True)
