"""DRY, bad words and allowed ids on the CPU, compiled by numba: linear in the tokens that they look at."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.inner import inner_numpy
from kernels.ops.sampling.cpu_borders import mask_row, options, word_float
from kernels.ops.sampling.inputs import MAX_DRY_EXPONENT, MAX_DRY_PENALTY
from kernels.ops.step_inputs.inputs import DRY_ALLOWED_LENGTH, DRY_BASE, DRY_LAST_N, DRY_MULTIPLIER

_DROPPED = np.float32(-np.inf)


@inner_numpy
def _has_bit(words, token):  # type: ignore[no-untyped-def]
    return (np.uint32(words[token // 32]) >> np.uint32(token % 32)) & np.uint32(1) != 0


@inner_numpy
def _matches(tokens, size, limit):  # type: ignore[no-untyped-def]
    """For every k, how many of the last tokens up to `limit` are also those that end k tokens earlier.

    The Z-function (Gusfield 1997, section 1.4) of the tokens from the last one back.
    """
    last = len(tokens) - 1
    lengths = np.zeros(size, np.int32)
    left, right = 0, 0
    for k in range(1, size):
        length = 0
        if k < right:
            length = min(right - k, lengths[k - left])
        if k + length >= right:
            while length < limit and k + length < size and tokens[last - length] == tokens[last - k - length]:
                length += 1
            left, right = k, k + length
        lengths[k] = length
    return lengths


@njit(**options)
def dry_rows(logits, rows, table_rows, token_ids, lengths, words, breakers):  # type: ignore[no-untyped-def]
    """dry.penalize_repetitions; the arguments are the fields of DryInputs."""
    # Only what belongs to tokens of the text is ever touched.
    best = np.empty(logits.shape[1], np.int32)
    for d in range(len(rows)):
        row = logits[rows[d]]
        tokens = token_ids[table_rows[d], : lengths[d]]
        last_n = words[d, DRY_LAST_N]
        size = len(tokens) if last_n < 0 else min(last_n, len(tokens))
        bits = breakers[table_rows[d]]
        allowed = words[d, DRY_ALLOWED_LENGTH]
        limit = 0
        while limit < min(size, allowed + MAX_DRY_EXPONENT) and not _has_bit(bits, tokens[len(tokens) - 1 - limit]):
            limit += 1
        if limit < allowed:
            continue
        matches = _matches(tokens, size, limit)
        for k in range(1, size):
            best[tokens[len(tokens) - k]] = 0
        for k in range(1, size):
            token = tokens[len(tokens) - k]
            if matches[k] >= allowed and not _has_bit(bits, token):
                best[token] = max(best[token], matches[k])
        multiplier, base = np.float64(word_float(words[d, DRY_MULTIPLIER])), np.float64(word_float(words[d, DRY_BASE]))
        for k in range(1, size):
            token = tokens[len(tokens) - k]
            if best[token] > 0:
                penalty = multiplier * base ** np.float64(best[token] - allowed)
                row[token] -= np.float32(min(penalty, MAX_DRY_PENALTY))
                best[token] = 0


@njit(**options)
def allow_rows(logits, rows, table_rows, allowed):  # type: ignore[no-untyped-def]
    """reference.allow_only."""
    for a in range(len(rows)):
        row = logits[rows[a]]
        mask_row(row, allowed[table_rows[a]], row)


@njit(**options)
def forbid_rows(logits, rows, table_rows, words, token_ids, lengths):  # type: ignore[no-untyped-def]
    """reference.forbid_words."""
    for b in range(len(rows)):
        row = logits[rows[b]]
        tokens_of_words = words[table_rows[b]]
        tokens = token_ids[table_rows[b], : lengths[b]]
        fits = True
        for i in range(len(tokens_of_words)):
            token, place = tokens_of_words[i]
            if place == 0:
                break
            at = len(tokens) + 1 - place
            if place == 1:
                if fits:
                    row[token] = _DROPPED
                fits = True
            elif at < 0 or tokens[at] != token:
                fits = False
