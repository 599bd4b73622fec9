"""Small vocabulary with all marks as special tokens, and random texts that a grammar allows."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.text.detokenizer import build_token_bytes
from gateway.text.formats import TOOL_FORMATS
from gateway.text.grammars.grammar import Fragment, grammar_source
from tests.fakes.tokenizers import byte_level_json

END = 2
MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks})
_CLOSING = frozenset(map(str.encode, '"})]\n'))
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


def allowed(state: LLMatcher) -> list[int]:
    """Return the ids of the tokens that may come next."""
    bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.nonzero(bits)[0]]


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
    """Return a random text that the grammar allows; tokens that close strings and brackets are preferred."""
    state, chance = matcher(fragment), random.Random(seed)
    ids = _ids(beginning, True)
    assert state.consume_tokens(ids)
    written = [_table()[token_id] for token_id in ids]
    for _ in range(MAX_TOKENS):
        choices = allowed(state)
        if END in choices and (len(choices) == 1 or chance.random() < 0.5):
            return b"".join(written).decode("utf-8", "replace")
        choices = [token_id for token_id in choices if token_id != END]
        closing = [token_id for token_id in choices if _table()[token_id] in _CLOSING]
        token_id = chance.choice(closing if closing and chance.random() < 0.5 else choices)
        assert state.consume_token(token_id)
        written.append(_table()[token_id])
    raise AssertionError("the text does not end")
