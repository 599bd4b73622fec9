"""Prompts of a request: splitting, tokenizing, truncation and the budget of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api.common.fields import check_num_entries, invalid
from gateway.api.common.options import RequestOptions
from gateway.cluster.registry import ModelEntry
from shared.errors import ContextLengthError
from shared.messages import WorkerFacts

MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 1024
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class SizedPrompt:
    """Prompt that fits the model.

    Attributes:
        token_ids: Token ids of the prompt.
        max_tokens: Limit on generated tokens.
        room: Number of tokens that the context has left after the prompt.
    """

    token_ids: list[int]
    max_tokens: int
    room: int


def split_prompts(prompt: str | list[Any], name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> list[Prompt]:
    """Return the prompts of a string, a list of strings, a list of token ids or a list of such lists.

    Args:
        prompt: The field's value.
        name: The field's name.
        max_prompts: Limit on the number of prompts.

    Raises:
        InvalidRequestError: A prompt is empty, or the list mixes types.
    """
    if not prompt:
        raise invalid(name, "must not be empty.")
    if isinstance(prompt, str) or _is_token_list(prompt):
        return [prompt]
    check_num_entries(name, len(prompt), max_prompts)
    is_text = all(isinstance(entry, str) for entry in prompt)
    if not is_text and not all(isinstance(entry, list) and _is_token_list(entry) for entry in prompt):
        raise invalid(
            name, "must be a string, a list of strings, a list of token ids or a list of such lists.", "invalid_type"
        )
    for index, entry in enumerate(prompt):
        if not entry:
            raise invalid(f"{name}[{index}]", "must not be empty.")
    return prompt


def _is_token_list(value: list[Any]) -> bool:
    # Types are compared because bool is a subclass of int.
    return set(map(type, value)) <= {int}


def check_token_ids(ids: list[int], facts: WorkerFacts, param: str) -> None:
    """Raise InvalidRequestError if an id is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < facts.vocab_size)
        shown = str(wrong) if abs(wrong) < 2**63 else "beyond 64 bits"
        raise invalid(param, f"has the token id {shown}; the model's vocabulary has {facts.vocab_size} ids, from 0.")


async def encode_prompt(
    prompt: Prompt, entry: ModelEntry, param: str, *, add_special_tokens: bool, max_tokens: int
) -> list[int]:
    """Return the token ids of a plain prompt; given ids are checked against the vocabulary.

    Raises:
        InvalidRequestError: An id is outside the vocabulary.
        ContextLengthError: A text certainly has more than `max_tokens` tokens.
    """
    if isinstance(prompt, str):
        return await entry.pipeline.encode(prompt, add_special_tokens, max_tokens=max_tokens, param=param)
    check_token_ids(prompt, entry.facts, param)
    return prompt


def context_limit(facts: WorkerFacts) -> int:
    """Return how many tokens prompt and completion may have together."""
    capacity = facts.num_pages * facts.page_size
    return min(facts.max_model_len, capacity) if capacity else facts.max_model_len


def limit_name(facts: WorkerFacts) -> str:
    """Return the name of `context_limit` for error messages."""
    if context_limit(facts) == facts.max_model_len:
        return "maximum context length"
    return "KV cache, which is smaller than its maximum context length,"


def cut(ids: list[int], length: int, side: str | None) -> list[int]:
    """Return at most `length` of the ids, without those at the given end; None is the left end."""
    return ids[:length] if side == "right" else ids[max(len(ids) - length, 0) :]


def fit_prompt(
    ids: list[int], options: RequestOptions, default: int | None, entry: ModelEntry, param: str
) -> SizedPrompt:
    """Truncate a prompt if the request asks for it, and compute its budget of generated tokens.

    Args:
        ids: Token ids of the prompt.
        options: The request.
        default: Budget if the client sends no limit; None uses what is left of the context.
        entry: The model.
        param: The field that holds the prompt.

    Raises:
        ContextLengthError: The prompt, or prompt and completion together, exceed the context.
    """
    fields, facts, wanted = options.fields, entry.facts, options.max_tokens
    limit, name = context_limit(facts), limit_name(facts)
    if (keep := fields.truncate_prompt_tokens) is not None:
        if keep >= limit:
            raise ContextLengthError(
                f"truncate_prompt_tokens is {keep}; the model's maximum context length is {limit} tokens, and at least "
                "one must be left for the completion.",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(limit - (wanted or default or DEFAULT_MAX_TOKENS), 1)
        ids = cut(ids, keep, fields.truncation_side)
    room = limit - len(ids)
    if room <= 0:
        raise ContextLengthError(
            # LangChain recognizes the error by its first words.
            f"The prompt is too long: it has {len(ids)} tokens; the model's {name} is {limit} tokens, "
            "and at least one must be left for the completion.",
            param=param,
        )
    if wanted is None:
        return SizedPrompt(ids, room if default is None else min(default, room), room)
    if wanted > room and not options.clamps:
        raise ContextLengthError(
            f"The prompt has {len(ids)} tokens and max_tokens is {wanted}, {len(ids) + wanted} in all; "
            f"the model's {name} is {limit} tokens. Shorten the prompt or reduce max_tokens.",
            param="max_tokens",
        )
    return SizedPrompt(ids, min(wanted, room), room)
