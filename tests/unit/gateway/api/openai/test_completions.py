"""Prompts that fill in the middle, with the marks of each family."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.api.openai.completions import fill_in_middle
from gateway.text.pipeline import TextPipeline, TextThreads
from shared.errors import ContextLengthError, InvalidRequestError
from tests.fakes.tokenizers import byte_fallback_json, byte_level_json, make_bundle

PREFIX, SUFFIX = "the quick ", " the lazy dog"
FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek": ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    "codestral": ("[PREFIX]", "[SUFFIX]"),
}


@pytest.fixture
async def threads():
    running = TextThreads()
    yield running
    running.close()


def with_marks(tokenizer_json, marks, **bundle):
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return make_bundle(tokenizer.to_str().encode(), **bundle)


@pytest.mark.parametrize("name", FAMILIES)
async def test_order_and_end_tokens_of_each_family(threads, name):
    marks = FAMILIES[name]
    pipeline = TextPipeline(with_marks(byte_level_json(), marks), threads)
    filled = await fill_in_middle(PREFIX, SUFFIX, pipeline)
    text = pipeline.decode(filled.token_ids, False)
    if name == "codestral":
        assert text == f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}"
    else:
        assert text == f"{marks[0]}{PREFIX}{marks[1]}{SUFFIX}{marks[2]}"
    assert {pipeline.token_id(mark) for mark in marks} <= set(filled.end_ids)
    if name in ("qwen", "starcoder", "santacoder"):
        assert pipeline.token_id("<|endoftext|>") in filled.end_ids
    # Ids go in as they are, and an empty suffix is one.
    ids = await pipeline.encode(PREFIX, False)
    assert (await fill_in_middle(ids, SUFFIX, pipeline)).token_ids == filled.token_ids
    assert SUFFIX not in pipeline.decode((await fill_in_middle(PREFIX, "", pipeline)).token_ids, False)


async def test_the_beginning_of_text_comes_first(threads):
    marks = FAMILIES["starcoder"]
    pipeline = TextPipeline(with_marks(byte_level_json(), marks, add_bos_token=True), threads)
    bos = pipeline.token_id("<|endoftext|>")
    filled = await fill_in_middle("a", "b", pipeline)
    assert filled.token_ids[:2] == [bos, pipeline.token_id(marks[0])] and filled.token_ids.count(bos) == 1
    assert (await fill_in_middle("a", "b", pipeline, add_special_tokens=False)).token_ids == filled.token_ids[1:]


async def test_a_suffix_gets_no_leading_space(threads):
    marks = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>")
    names = {"special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    pipeline = TextPipeline(with_marks(byte_fallback_json(), marks, add_bos_token=True, **names), threads)
    filled = await fill_in_middle("he", "ll", pipeline)
    ids = [pipeline.token_id(mark) for mark in marks]
    he, ll = pipeline.token_id("\u2581he"), pipeline.token_id("ll")
    assert filled.token_ids == [pipeline.token_id("<s>"), ids[0], he, ids[1], ll, ids[2]]
    assert set(filled.end_ids) == set(ids)


async def test_models_without_marks_and_texts_that_are_too_long(threads):
    plain = TextPipeline(make_bundle(), threads)
    with pytest.raises(InvalidRequestError, match="fill-in-the-middle") as refused:
        await fill_in_middle("a", "b", plain)
    assert refused.value.param == "suffix" and refused.value.code == "unsupported_parameter"
    half = TextPipeline(with_marks(byte_level_json(), ("<fim_prefix>", "<fim_suffix>")), threads)
    with pytest.raises(InvalidRequestError):
        await fill_in_middle("a", "b", half)
    pipeline = TextPipeline(with_marks(byte_level_json(), FAMILIES["qwen"]), threads)
    for prefix, suffix, param in (("a" * 5_000_000, "b", "prompt"), ("a", "b" * 5_000_000, "suffix")):
        with pytest.raises(ContextLengthError) as refused:
            await fill_in_middle(prefix, suffix, pipeline, max_tokens=50)
        assert refused.value.param == param
