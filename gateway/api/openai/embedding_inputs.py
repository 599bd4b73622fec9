"""The input of /v1/embeddings as token ids."""

from __future__ import annotations

from gateway.api.common.prompts import (
    Prompt,
    check_token_ids,
    context_limit,
    cut,
    limit_name,
    longest_text,
    split_prompts,
)
from gateway.api.openai.embedding_fields import EmbeddingFields
from gateway.flow.requests import ModelEntryLike
from shared.errors import ContextLengthError, InvalidRequestError

MAX_INPUTS = 2048
"""OpenAI's."""


async def embedding_inputs(fields: EmbeddingFields, entry: ModelEntryLike) -> list[list[int]]:
    """Token ids of each input: of text as the model's tokenizer makes them, its special tokens included.

    Raises InvalidRequestError, or ContextLengthError for what does not fit, naming the input at fault.
    """
    inputs = split_prompts(fields.input, "input", MAX_INPUTS)
    keep = _most_kept(fields, entry)
    result = []
    for index, one in enumerate(inputs):
        param = f"input[{index}]" if len(inputs) > 1 else "input"
        ids = await _token_ids(one, fields, entry, param, keep)
        if not ids:
            raise InvalidRequestError(f"{param} has no tokens.", param=param)
        limit = context_limit(entry.facts)
        if len(ids) > limit:
            raise ContextLengthError(
                # LangChain knows the error by the first words.
                f"The prompt is too long: {param} has {len(ids)} tokens; the model's {limit_name(entry.facts)} is "
                f"{limit} tokens.",
                param=param,
            )
        result.append(ids)
    return result


def _most_kept(fields: EmbeddingFields, entry: ModelEntryLike) -> int | None:
    """What an input is truncated to; None: it is not."""
    wanted, limit = fields.truncate_prompt_tokens, context_limit(entry.facts)
    if wanted is not None and wanted > limit:
        raise ContextLengthError(
            f"truncate_prompt_tokens is {wanted}; the model's {limit_name(entry.facts)} is {limit} tokens.",
            param="truncate_prompt_tokens",
        )
    return limit if wanted == -1 else wanted


async def _token_ids(
    one: Prompt, fields: EmbeddingFields, entry: ModelEntryLike, param: str, keep: int | None
) -> list[int]:
    special, side = fields.add_special_tokens is not False, fields.truncation_side
    if not isinstance(one, str):
        check_token_ids(one, entry.facts, param)
        return one if keep is None else cut(one, keep, side)
    most = longest_text(fields, entry.facts)
    ids = await entry.pipeline.encode(one, special, max_tokens=most, param=param)
    if keep is None or len(ids) <= keep:
        return ids
    plain = await entry.pipeline.encode(one, False, max_tokens=most, param=param) if special else ids
    return _cut_between(ids, plain, keep, side)


def _cut_between(ids: list[int], plain: list[int], keep: int, side: str | None) -> list[int]:
    """`keep` of the ids, of which those around the text, `plain`, stay: a model that is made for embeddings is read at
    its end token.
    """
    num_special = len(ids) - len(plain)
    for begin in range(num_special + 1):
        end = begin + len(plain)
        if num_special < keep and ids[begin:end] == plain:
            return ids[:begin] + cut(plain, keep - num_special, side) + ids[end:]
    return cut(ids, keep, side)
