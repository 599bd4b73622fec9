"""DRY, bad words and allowed ids on the CPU, compiled by numba: linear in the tokens that they look at."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.inner import inner_numpy
from kernels.sampling.cpu_borders import allowed_row, options
from kernels.sampling.inputs import MAX_DRY_EXPONENT, MAX_DRY_PENALTY

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
def dry_rows(  # type: ignore[no-untyped-def]
    logits, rows, table_rows, token_ids, lengths, last_n, multiplier, base, allowed_length, breakers
):
    """dry.penalize_repetitions; the arguments are the fields of DryInputs."""
    best = np.zeros(logits.shape[1], np.int32)
    for d in range(len(rows)):
        row = logits[rows[d]]
        tokens = token_ids[table_rows[d], : lengths[d]]
        size = len(tokens) if last_n[d] < 0 else min(last_n[d], len(tokens))
        bits = breakers[table_rows[d]]
        allowed = allowed_length[d]
        limit = 0
        while limit < min(size, allowed + MAX_DRY_EXPONENT) and not _has_bit(bits, tokens[len(tokens) - 1 - limit]):
            limit += 1
        if limit < allowed:
            continue
        matches = _matches(tokens, size, limit)
        for k in range(1, size):
            token = tokens[len(tokens) - k]
            if matches[k] >= allowed and not _has_bit(bits, token):
                best[token] = max(best[token], matches[k])
        for k in range(1, size):
            token = tokens[len(tokens) - k]
            if best[token] > 0:
                penalty = np.float64(multiplier[d]) * np.float64(base[d]) ** np.float64(best[token] - allowed)
                row[token] -= np.float32(min(penalty, MAX_DRY_PENALTY))
                best[token] = 0


@njit(**options)
def allow_rows(logits, rows, table_rows, allowed):  # type: ignore[no-untyped-def]
    """reference.allow_only."""
    for a in range(len(rows)):
        row = logits[rows[a]]
        row[:] = allowed_row(row, allowed[table_rows[a]])


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
