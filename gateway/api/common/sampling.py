"""Sampling and beam-search fields: conversion to SamplingParams and BeamParams, and combinations that are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.common.fields import (
    SamplingFields,
    SpeculativeField,
    TextFormat,
    check_length,
    check_num_entries,
    invalid,
)
from gateway.flow.beam_state import BeamParams
from gateway.text.pipeline import TextPipeline
from shared.errors import InvalidRequestError
from shared.sampling_params import MAX_DRY_BREAKERS, MAX_LOGPROBS, RepetitionDetection

DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")
"""Defaults of llama.cpp."""
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_LENGTH_PENALTY = 10.0

_SAME_NAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau",
    "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
)  # fmt: skip
"""Fields with the same name, meaning and default as in SamplingParams."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "typ_p": (1.0,),
    "top_n_sigma": (0.0, -1.0),
    "xtc_probability": (0.0,),
    "dynatemp_range": (0.0,),
}
"""Fields that mirostat replaces, each with its values that have no effect besides null."""
_NEUTRAL_FOR_BEAMS: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0.0, 1.0),
    **_NEUTRAL,
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "mirostat": (0,),
    "dry_multiplier": (0.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "repetition_detection": (),
    "seed": (),
    "response_format": (TextFormat(),),
    "structured_outputs": (),
    "tools": ([],),
    "thinking_token_budget": (),
    "speculative": (SpeculativeField(enabled=False),),
    "prediction": (),
}
"""Fields that beam search does not support, each with its values that have no effect besides null."""


def sampling_values(fields: SamplingFields) -> dict[str, Any]:
    """Return the arguments of SamplingParams that need no model.

    SamplingParams.validate checks the ranges that are the same here and there.

    Raises:
        InvalidRequestError: A value is out of range, or fields exclude each other.
    """
    if fields.mirostat in (1, 2):
        for name, neutral in _NEUTRAL.items():
            if getattr(fields, name) not in (None, *neutral):
                raise invalid(name, "cannot be combined with mirostat, which replaces it. Send one of them.")
    values = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if (detection := fields.repetition_detection) is not None:
        given = {name: value for name, value in msgspec.structs.asdict(detection).items() if value is not None}
        values["repetition_detection"] = RepetitionDetection(**given)
    if fields.top_k is not None:
        values["top_k"] = max(fields.top_k, 0)
    if fields.top_p is not None and not 0.0 <= fields.top_p <= 1.0:
        raise invalid("top_p", f"must be in [0, 1], got {fields.top_p:g}.")
    if fields.top_p == 0.0:
        # OpenAI allows an empty nucleus; like vLLM, keep the most likely token.
        del values["top_p"]
        values["top_k"] = 1
    if fields.typ_p is not None and not 0.0 < fields.typ_p <= 1.0:
        raise invalid("typ_p", f"must be in (0, 1], got {fields.typ_p}.")
    if None not in (fields.typical_p, fields.typ_p) and fields.typical_p != fields.typ_p:
        raise InvalidRequestError("typical_p and typ_p are the same parameter but differ. Send one.", param="typ_p")
    if (typical_p := fields.typ_p if fields.typical_p is None else fields.typical_p) is not None:
        values["typical_p"] = typical_p
    if fields.top_n_sigma is not None:
        # llama.cpp's default, -1, keeps all tokens.
        values["top_n_sigma"] = 0.0 if fields.top_n_sigma == -1.0 else fields.top_n_sigma
    if (allowed := fields.allowed_token_ids) is not None:
        if not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
            raise invalid("allowed_token_ids", f"must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids.")
        values["allowed_token_ids"] = tuple(allowed)
    values["logit_bias"] = _logit_bias(fields.logit_bias)
    values["seed"] = random.getrandbits(63) if fields.seed is None else fields.seed
    values["ignore_eos"] = bool(fields.ignore_eos)
    values["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    _check_words("bad_words", fields.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    _check_words("dry_sequence_breakers", fields.dry_sequence_breakers, MAX_BREAKERS, MAX_BREAKER_LENGTH)
    return values


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        # int() would also accept "+1", "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError("The keys of logit_bias must be token ids in decimal digits.", param="logit_bias")
        result[int(key)] = bias
    return result


def _check_words(name: str, words: Sequence[str] | None, max_words: int, max_length: int) -> None:
    if not words:
        return
    check_num_entries(name, len(words), max_words)
    for index, word in enumerate(words):
        check_length(f"{name}[{index}]", word, max_length)


async def word_values(fields: SamplingFields, pipeline: TextPipeline) -> dict[str, Any]:
    """Return the arguments of SamplingParams that are words in the model's vocabulary.

    Raises:
        InvalidRequestError: A word has no tokens, or the sequence breakers occur in too many tokens.
    """
    values: dict[str, Any] = {}
    if fields.dry_multiplier:
        given = fields.dry_sequence_breakers
        breakers = await pipeline.tokens_containing(DEFAULT_DRY_BREAKERS if given is None else tuple(given))
        if len(breakers) > MAX_DRY_BREAKERS:
            raise invalid(
                "dry_sequence_breakers", f"occur in {len(breakers)} tokens; at most {MAX_DRY_BREAKERS} are allowed."
            )
        values["dry_breakers"] = breakers
    if fields.bad_words:
        spellings: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(fields.bad_words):
            spellings |= dict.fromkeys(await _spellings(word, pipeline, f"bad_words[{index}]"))
        values["bad_words"] = tuple(spellings)
    return values


async def _spellings(word: str, pipeline: TextPipeline, place: str) -> list[tuple[int, ...]]:
    """Return the token ids of a word at the start of a text and after a space.

    As in vLLM, the second spelling counts only if the space is part of the word's first token. Otherwise it would ban
    the word's tokens after any space, which the first spelling does already.
    """
    bare = tuple(await pipeline.encode(word.lstrip(), False, param=place))
    spaced = tuple(await pipeline.encode(" " + word.lstrip(), False, param=place))
    if not bare:
        raise invalid(place, "has no tokens.")
    if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
        return [bare, spaced]
    return [bare]


def beam_params(fields: SamplingFields, n: int, best_of: int) -> BeamParams | None:
    """Return the parameters of beam search, or None without `use_beam_search`.

    Raises:
        InvalidRequestError: A value is out of range, or a field cannot be combined with beam search.
    """
    if not fields.use_beam_search:
        for name, given in (
            ("length_penalty", fields.length_penalty not in (None, 1.0)),
            ("early_stopping", fields.early_stopping not in (None, False)),
        ):
            if given:
                raise invalid(name, "requires use_beam_search to be true.")
        return None
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(fields, name, None)
        if value is not None and value not in neutral:
            raise invalid(name, "cannot be combined with use_beam_search.")
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        raise invalid("length_penalty", f"must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], got {penalty}.")
    early_stopping = fields.early_stopping or False
    if isinstance(early_stopping, str) and early_stopping != "never":
        raise invalid("early_stopping", 'must be true, false or "never".')
    if best_of > MAX_LOGPROBS:
        name = "best_of" if best_of > n else "n"
        raise invalid(name, f"must be at most {MAX_LOGPROBS} for beam search, got {best_of}.")
    return BeamParams(width=best_of, num_returned=n, length_penalty=penalty, early_stopping=early_stopping)
