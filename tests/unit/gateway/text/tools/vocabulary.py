"""Small vocabulary with all marks as special tokens, and random texts that a grammar allows."""

from __future__ import annotations

import json
import random
from functools import cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.text.detokenizer import build_token_bytes
from gateway.text.formats import TOOL_FORMATS
from gateway.text.grammars.grammar import Fragment, grammar_source
from tests.fakes import grammar_text
from tests.fakes.tokenizers import byte_level_json

END = 2
MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks})
MAX_TOKENS = 3000


@cache
def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with a token for each mark."""
    found = Tokenizer.from_str(byte_level_json().decode())
    found.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return found


@cache
def special_ids() -> dict[str, int]:
    """Return the id of each mark by its text."""
    return {mark: tokenizer().token_to_id(mark) for mark in MARKS}


@cache
def _model() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_str(), eos_token=END)


@cache
def _table() -> list[bytes]:
    return build_token_bytes(json.loads(tokenizer().to_str()), tokenizer().get_vocab()).table


def matcher(fragment: Fragment) -> LLMatcher:
    """Return a new matcher of the grammar."""
    found = LLMatcher(_model(), grammar_source(fragment))
    assert not found.is_error(), found.get_error()
    return found


def _ids(text: str, tokens: bool) -> list[int]:
    if tokens:
        return list(tokenizer().encode(text, add_special_tokens=False).ids)
    return [_table().index(bytes([value])) for value in text.encode()]


def accepts(fragment: Fragment, text: str, *, tokens: bool = True) -> bool:
    """Return True if the grammar accepts this text, with its marks as tokens or as plain text."""
    state, ids = matcher(fragment), _ids(text, tokens)
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


def holds(fragment: Fragment, text: str) -> bool:
    """Return True if a text of the grammar can begin with this one."""
    ids = _ids(text, True)
    return bool(matcher(fragment).try_consume_tokens(ids) == len(ids))


def random_text(fragment: Fragment, seed: int, beginning: str = "") -> str:
    """Return a random text that the grammar allows, with this beginning."""
    state = matcher(fragment)
    assert state.consume_tokens(_ids(beginning, True))
    rest = grammar_text.random_text(state, _model(), random.Random(seed), MAX_TOKENS)
    assert rest is not None, "the text does not end"
    return beginning + rest
