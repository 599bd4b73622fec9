"""The prompts of a request, and the lengths that they may have."""

from __future__ import annotations

from typing import Any

from gateway.api.common.fields import RequestFields
from shared.errors import ContextLengthError, InvalidRequestError
from shared.messages import WorkerFacts

MAX_PROMPTS = 256
MAX_CHOICES_IN_ALL = 1024
_MAX_TRUNCATED = 131_072
"""Tokens of a prompt that is to be truncated; or eight contexts, if that is more."""

Prompt = str | list[int]


def split_prompts(prompt: str | list[Any], name: str = "prompt", most: int = MAX_PROMPTS) -> list[Prompt]:
    """The single prompts of a field that is a string, a list of strings, token ids, or a list of token id lists.

    Args:
        name: of the field.
        most: so many prompts it may have.

    Raises InvalidRequestError for empty prompts and for mixtures.
    """
    if isinstance(prompt, str):
        return [_not_empty(prompt, name)]
    if not prompt:
        raise InvalidRequestError(f"{name} must not be empty.", param=name)
    if _is_token_list(prompt):
        return [prompt]
    if len(prompt) > most:
        raise InvalidRequestError(f"{name} has {len(prompt)} entries; at most {most} are allowed.", param=name)
    if all(isinstance(entry, str) for entry in prompt):
        return [_not_empty(entry, f"{name}[{index}]") for index, entry in enumerate(prompt)]
    if all(isinstance(entry, list) and _is_token_list(entry) for entry in prompt):
        return [_not_empty(entry, f"{name}[{index}]") for index, entry in enumerate(prompt)]
    raise InvalidRequestError(
        f"{name} must be a string, a list of strings, a list of token ids or a list of such lists.",
        param=name,
        code="invalid_type",
    )


def _is_token_list(value: list[Any]) -> bool:
    # `type`, not isinstance: True is an int to Python.
    return set(map(type, value)) <= {int}


def _not_empty(prompt: Prompt, place: str) -> Prompt:
    if not prompt:
        raise InvalidRequestError(f"{place} must not be empty.", param=place)
    return prompt


def check_token_ids(ids: list[int], facts: WorkerFacts, param: str) -> None:
    """Raises InvalidRequestError for ids outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < facts.vocab_size)
        shown = str(wrong) if abs(wrong) < 2**63 else "beyond 64 bits"
        message = f"{param} has the token id {shown}; the vocabulary has {facts.vocab_size} ids, from 0."
        raise InvalidRequestError(message, param=param)


def context_limit(facts: WorkerFacts) -> int:
    """Tokens that prompt and completion may have together."""
    capacity = facts.num_pages * facts.page_size
    return min(facts.max_model_len, capacity) if capacity else facts.max_model_len


def limit_name(facts: WorkerFacts) -> str:
    """What `context_limit` is, as a client is told."""
    if context_limit(facts) == facts.max_model_len:
        return "maximum context length"
    return "KV cache, smaller than its maximum context length,"


def longest_text(fields: RequestFields, facts: WorkerFacts) -> int:
    """Tokens that a text may certainly not have more of, before it is truncated."""
    if fields.truncate_prompt_tokens is None:
        return facts.max_model_len
    return max(8 * facts.max_model_len, _MAX_TRUNCATED)


def truncated(ids: list[int], wanted: int | None, side: str | None, room_for: int, facts: WorkerFacts) -> list[int]:
    """The ids that `truncate_prompt_tokens` keeps.

    Args:
        wanted: how many tokens to keep; -1: what fits; None: all.
        side: which end is cut; None: the left one.
        room_for: tokens of the completion for which -1 leaves room.
    """
    if wanted is None:
        return ids
    limit = context_limit(facts)
    if wanted >= limit:
        raise ContextLengthError(
            f"truncate_prompt_tokens is {wanted}; the model's maximum context length is {limit} tokens, and at least "
            "one must be left for the completion.",
            param="truncate_prompt_tokens",
        )
    most = max(limit - room_for, 1) if wanted == -1 else wanted
    return cut(ids, most, side)


def cut(ids: list[int], most: int, side: str | None) -> list[int]:
    """`most` of the ids, or all where there are fewer; what is left out is on this side, None: the left one."""
    return ids[:most] if side == "right" else ids[max(len(ids) - most, 0) :]


def completion_budget(
    num_prompt_tokens: int, wanted: int | None, default: int | None, facts: WorkerFacts, param: str
) -> int:
    """How many tokens may be generated.

    Args:
        wanted: what the client asked for, or None.
        default: what it gets otherwise, where there is room; None: all that is left.

    Raises ContextLengthError with the numbers where prompt, or prompt and completion, do not fit.
    """
    limit = context_limit(facts)
    name = limit_name(facts)
    if num_prompt_tokens >= limit:
        raise ContextLengthError(
            # LangChain knows the error by the first words.
            f"The prompt is too long: it has {num_prompt_tokens} tokens; the model's {name} is {limit} tokens, "
            "and at least one must be left for the completion.",
            param=param,
        )
    room = limit - num_prompt_tokens
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens and {wanted} are asked for, "
            f"{num_prompt_tokens + wanted} in all; the model's {name} is {limit} tokens.",
            param="max_tokens",
        )
    return wanted
