"""The messages of a chat request, checked and reduced to what a template takes."""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidRequestError

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")

_STRINGS = ("name", "tool_call_id", "reasoning_content")
_NULL_ONLY = ("audio", "function_call", "tool_calls", "refusal", "annotations")
"""Fields of an answer of OpenAI's that clients send back; taken when they hold nothing."""

RESERVED_TEMPLATE_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "bos_token",
        "chat_template",
        "cls_token",
        "continue_final_message",
        "conversation",
        "date_string",
        "documents",
        "eos_token",
        "mask_token",
        "max_length",
        "messages",
        "namespace",
        "pad_token",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "sep_token",
        "strftime_now",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "unk_token",
    }
)
"""What the renderer itself fills in; a client must not (CVE-2025-62426)."""


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages with plain string contents; empty system messages are dropped, `developer` becomes `system`.

    Text parts are joined by line ends. Raises InvalidRequestError naming the place.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", param="messages"
        )
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    kept = [message for message in checked if message["role"] != "system" or message["content"]]
    if not kept:
        raise InvalidRequestError("messages has nothing but empty system messages.", param="messages")
    return kept


def _check_message(message: dict[str, Any], place: str) -> dict[str, str]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{place}.role must be one of {', '.join(ROLES)}.", param=f"{place}.role")
    result = {"role": "system" if role == "developer" else role}
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name in _STRINGS and (value is None or isinstance(value, str)):
            if value is not None:
                result[name] = value
        elif name in _NULL_ONLY:
            if value not in (None, []):
                raise InvalidRequestError(f"{place}.{name} is not supported yet.", param=f"{place}.{name}")
        else:
            shown = f"{place}.{name[:64]}"
            raise InvalidRequestError(f"Unknown or invalid parameter: {shown}.", param=shown, code="unknown_parameter")
    result["content"] = _content(message.get("content"), f"{place}.content")
    return result


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{place} must be a string or a non-empty list of text parts.", param=place)
    return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{place} must be an object.", param=place)
    if part.get("type") != "text":
        raise InvalidRequestError(f'{place}.type must be "text"; other parts are not supported.', param=f"{place}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.text must be a string.", param=f"{place}.text")
    for name in part:
        if name not in ("type", "text"):
            shown = f"{place}.{name[:64]}"
            raise InvalidRequestError(f"Unknown parameter: {shown}.", param=shown, code="unknown_parameter")
    return text


def check_template_kwargs(kwargs: dict[str, Any] | None, known: frozenset[str]) -> dict[str, Any]:
    """Variables for the template.

    Args:
        known: the names that the model's template reads.

    Raises InvalidRequestError for names that the renderer fills in, and for those that would have no effect.
    """
    for name in kwargs or {}:
        param = f"chat_template_kwargs.{name[:64]}"
        if name in RESERVED_TEMPLATE_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequestError(f"{param} cannot be set by a request.", param=param)
        if name not in known:
            message = f"{param} is not used by the model's chat template."
            raise InvalidRequestError(message, param=param, code="unknown_parameter")
    return kwargs or {}
