"""Byte-wise matching of texts against grammars, and random texts that a grammar allows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from gateway.text.grammars.grammar import Fragment, grammar_source
from gateway.text.grammars.process import ByteVocabulary


@cache
def _tokenizer(special: tuple[tuple[str, int], ...]) -> tuple[LLTokenizer, ByteVocabulary]:
    vocabulary = ByteVocabulary(400, dict(special))
    return LLTokenizer(TokenizerWrapper(vocabulary), slices=[]), vocabulary


def allows(grammar: str | Fragment, text: str, special_ids: Mapping[str, int] | None = None) -> bool:
    """Return True if a grammar accepts this text; the text of a special token stands for the token."""
    return reads(grammar, text, special_ids) == (True, True)


def reads(grammar: str | Fragment, text: str, special_ids: Mapping[str, int] | None = None) -> tuple[bool, bool]:
    """Return (True if an accepted text may begin with this one, True if it may end here)."""
    matcher, _, whole = _begun(grammar, text, special_ids or {})
    return whole, whole and matcher.is_accepting()


def _begun(grammar: str | Fragment, text: str, special_ids: Mapping[str, int]) -> tuple[LLMatcher, LLTokenizer, bool]:
    """Return a matcher that has read a text, its tokenizer, and True if the grammar allows the text."""
    tokenizer, vocabulary = _tokenizer(tuple(special_ids.items()))
    matcher = LLMatcher(tokenizer, grammar if isinstance(grammar, str) else grammar_source(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    rest = text
    while rest:
        token = next((token for token in special_ids if rest.startswith(token)), None)
        ids += [special_ids[token]] if token else vocabulary(rest[0])
        rest = rest[len(token) if token else 1 :]
    return matcher, tokenizer, matcher.try_consume_tokens(ids) == len(ids)


def random_continuation(fragment: Fragment, seed: int, beginning: str, special_ids: Mapping[str, int]) -> str:
    """Return a random text that the grammar allows, with this beginning."""
    matcher, tokenizer, whole = _begun(fragment, beginning, special_ids)
    rest = random_text(matcher, tokenizer, random.Random(seed), 3000) if whole else None
    assert rest is not None, "the text does not end"
    return beginning + rest


def random_text(matcher: LLMatcher, tokenizer: LLTokenizer, rng: random.Random, max_tokens: int) -> str | None:
    """Return a text of random tokens that the grammar allows, or None if it does not end within max_tokens.

    Tokens that begin with a closing character of JSON are preferred, so that texts end.
    """
    closing = _closing(tokenizer)
    ids: list[int] = []
    for _ in range(max_tokens):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.vocab_size])
        assert len(allowed), matcher.get_error()
        likely = allowed[closing[allowed]]
        token_id = int(rng.choice(likely if len(likely) and rng.random() < 0.4 else allowed))
        if token_id == tokenizer.eos_token:
            return tokenizer.decode_bytes(ids).decode()
        assert matcher.consume_token(token_id)
        ids.append(token_id)
        if matcher.is_stopped():
            return tokenizer.decode_bytes(ids).decode()
    return None


@cache
def _closing(tokenizer: LLTokenizer) -> np.ndarray:
    firsts = (tokenizer.decode_bytes([token_id])[:1] for token_id in range(tokenizer.vocab_size))
    return np.array([first in (b'"', b"}", b"]", b",") for first in firsts])
