"""Inputs of embeddings through a real tokenizer whose post-processor adds special tokens around a text."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from gateway.api.openai.embeddings import EmbeddingFields, embedding_inputs
from gateway.text.pipeline import TextPipeline, TextThreads
from shared.errors import ContextLengthError
from tests.fakes.fake_generator import facts
from tests.fakes.tokenizers import byte_level_json, make_bundle

BEGIN, END = 1, 2
TEXT = "The quick brown fox <|im_end|> jumps"


def plain_ids(text: str) -> list[int]:
    return Tokenizer.from_buffer(byte_level_json()).encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def entry() -> Iterator[Any]:
    tokenizer = Tokenizer.from_buffer(byte_level_json())
    special = [("<|im_start|>", BEGIN), ("<|im_end|>", END)]
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="$A $B", special_tokens=special
    )
    threads = TextThreads()
    pipeline = TextPipeline(make_bundle(tokenizer.to_str().encode()), threads)
    yield SimpleNamespace(facts=facts(vocab_size=400, max_model_len=40), pipeline=pipeline)
    threads.close()


async def ids_of(entry: Any, **fields: Any) -> list[int]:
    (ids,) = await embedding_inputs(EmbeddingFields(model="m", **fields), entry)
    return ids


async def test_texts_get_the_tokenizers_special_tokens(entry) -> None:
    plain = plain_ids(TEXT)
    assert await ids_of(entry, input=TEXT) == [BEGIN, *plain, END]
    assert await ids_of(entry, input=TEXT, add_special_tokens=False) == plain
    # Ids are taken as they are.
    assert await ids_of(entry, input=plain) == plain


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncation_keeps_special_tokens(entry, side) -> None:
    plain = plain_ids(TEXT)
    for keep in range(3, len(plain) + 4):
        ids = await ids_of(entry, input=TEXT, truncate_prompt_tokens=keep, truncation_side=side)
        room = min(keep - 2, len(plain))
        kept = plain[:room] if side == "right" else plain[-room:]
        assert ids == [BEGIN, *kept, END]
        options = {"truncate_prompt_tokens": room, "truncation_side": side}
        assert await ids_of(entry, input=TEXT, add_special_tokens=False, **options) == kept
    for keep in (1, 2):
        assert len(await ids_of(entry, input=TEXT, truncate_prompt_tokens=keep, truncation_side=side)) == keep


async def test_special_tokens_count_towards_the_context(entry) -> None:
    (single,) = plain_ids("?")
    assert await ids_of(entry, input="?" * 38) == [BEGIN, *[single] * 38, END]
    with pytest.raises(ContextLengthError, match="has 41 tokens") as error:
        await embedding_inputs(EmbeddingFields(model="m", input=["?", "?" * 39]), entry)
    assert error.value.param == "input[1]"
    assert len(await ids_of(entry, input="?" * 500, truncate_prompt_tokens=-1)) == 40
    # Too long to be tokenized at all, even to be truncated.
    for options in ({}, {"truncate_prompt_tokens": -1}):
        with pytest.raises(ContextLengthError, match="bytes"):
            await ids_of(entry, input="?" * 10_000_000, **options)
