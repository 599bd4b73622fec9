"""The fields that say how tokens are sampled: to SamplingParams, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.common.fields import RepetitionField, SamplingFields
from gateway.api.common.ranges import MAX_INT32, check_range
from gateway.flow.requests import TextPipelineLike
from shared.errors import InvalidRequestError
from shared.sampling_params import MAX_DRY_BREAKERS, RepetitionDetection

DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_ALLOWED_TOKEN_IDS = 4096

_SAME_NAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau",
    "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
)  # fmt: skip
"""Fields whose name, meaning and default are those of SamplingParams."""

_MIROSTAT_REPLACES = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "typ_p": (None, 1.0),
    "top_n_sigma": (None, 0.0, -1.0),
    "xtc_probability": (None, 0.0),
    "dynatemp_range": (None, 0.0),
}
"""What mirostat takes the place of -> values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordIds:
    """What of a request's sampling needs the model's vocabulary."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()


NO_WORDS = WordIds()


def sampling_values(fields: SamplingFields) -> dict[str, Any]:
    """Arguments for SamplingParams of what needs no model. Raises InvalidRequestError for what cannot go together.

    Ranges are checked by SamplingParams.validate, where they are the same here.
    """
    _check_mirostat(fields)
    values = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.repetition_detection is not None:
        values["repetition_detection"] = _repetition_detection(fields.repetition_detection)
    if fields.top_k is not None:
        check_range("top_k", fields.top_k, -1, MAX_INT32)
        values["top_k"] = max(fields.top_k, 0)
    if fields.top_p is not None and not 0.0 <= fields.top_p <= 1.0:
        raise InvalidRequestError(f"top_p must be in [0, 1], got {fields.top_p:g}.", param="top_p")
    if fields.top_p == 0.0:
        # OpenAI's smallest nucleus, which here, as with vLLM, must hold something: the likeliest token.
        del values["top_p"]
        values["top_k"] = 1
    if fields.min_tokens is not None:
        check_range("min_tokens", fields.min_tokens, 0, MAX_INT32)
    if (typical_p := _typical_p(fields)) is not None:
        values["typical_p"] = typical_p
    if fields.top_n_sigma is not None:
        # llama.cpp's default, -1, keeps all.
        values["top_n_sigma"] = 0.0 if fields.top_n_sigma == -1.0 else fields.top_n_sigma
    if fields.allowed_token_ids is not None:
        values["allowed_token_ids"] = _allowed_token_ids(fields.allowed_token_ids)
    values["ignore_eos"] = bool(fields.ignore_eos)
    values["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    _check_words("bad_words", fields.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    _check_words("dry_sequence_breakers", fields.dry_sequence_breakers, MAX_BREAKERS, MAX_BREAKER_LENGTH)
    return values


def needs_words(fields: SamplingFields) -> bool:
    """Whether `word_ids` has anything to do."""
    return bool(fields.bad_words) or bool(fields.dry_multiplier)


async def word_ids(fields: SamplingFields, pipeline: TextPipelineLike) -> WordIds:
    """Token ids of words and of breakers. Raises InvalidRequestError for a word without any."""
    breakers: tuple[int, ...] = ()
    if fields.dry_multiplier:
        given = fields.dry_sequence_breakers
        breakers = await pipeline.tokens_containing(DEFAULT_DRY_BREAKERS if given is None else tuple(given))
        if len(breakers) > MAX_DRY_BREAKERS:
            message = f"dry_sequence_breakers are in {len(breakers)} tokens; at most {MAX_DRY_BREAKERS} are allowed."
            raise InvalidRequestError(message, param="dry_sequence_breakers")
    words: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(fields.bad_words or ()):
        for ids in await _spellings(word, pipeline, f"bad_words[{index}]"):
            words[ids] = None
    return WordIds(bad_words=tuple(words), dry_breakers=breakers)


async def _spellings(word: str, pipeline: TextPipelineLike, place: str) -> list[tuple[int, ...]]:
    """The ids of a word where a text begins and, after a space, inside of one.

    As vLLM has it, the second counts only where the space is part of the word's first token: else it would ban the
    word's tokens after any space, and the first spelling does that already.
    """
    bare = tuple(await pipeline.encode(word.lstrip(), False, param=place))
    spaced = tuple(await pipeline.encode(" " + word.lstrip(), False, param=place))
    if not bare:
        raise InvalidRequestError(f"{place} has no tokens.", param=place)
    if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
        return [bare, spaced]
    return [bare]


def _check_mirostat(fields: SamplingFields) -> None:
    if fields.mirostat not in (1, 2):
        return
    for name, idle in _MIROSTAT_REPLACES.items():
        if getattr(fields, name) not in idle:
            raise InvalidRequestError(f"mirostat takes the place of {name}: send one of them.", param=name)


def _typical_p(fields: SamplingFields) -> float | None:
    if fields.typ_p is not None and not 0.0 < fields.typ_p <= 1.0:
        raise InvalidRequestError(f"typ_p must be in (0, 1], got {fields.typ_p}.", param="typ_p")
    given = [value for value in (fields.typical_p, fields.typ_p) if value is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise InvalidRequestError("typical_p and typ_p are one parameter, and differ.", param="typ_p")
    return given[0] if given else None


def _repetition_detection(wanted: RepetitionField) -> RepetitionDetection:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    return RepetitionDetection(**given)


def _allowed_token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(ids) <= MAX_ALLOWED_TOKEN_IDS:
        message = f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids."
        raise InvalidRequestError(message, param="allowed_token_ids")
    return tuple(ids)


def _check_words(name: str, words: Sequence[str] | None, most: int, longest: int) -> None:
    if words is None:
        return
    if len(words) > most:
        raise InvalidRequestError(f"{name} has {len(words)} entries; at most {most} are allowed.", param=name)
    for index, word in enumerate(words):
        if not 1 <= len(word) <= longest:
            raise InvalidRequestError(f"{name}[{index}] must have 1 to {longest} characters.", param=f"{name}[{index}]")
