"""DRY and allowed token ids on the CPU, compiled by numba, in time linear in the tokens that they read."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.simd import inner_numpy
from kernels.ops.sampling.cpu_borders import mask_row, options, word_float
from kernels.ops.sampling.inputs import MAX_DRY_EXPONENT, MAX_DRY_PENALTY
from kernels.ops.step_inputs.inputs import DRY_ALLOWED_LENGTH, DRY_BASE, DRY_LAST_N, DRY_MULTIPLIER


@inner_numpy
def _has_bit(words, token):  # type: ignore[no-untyped-def]
    return (np.uint32(words[token // 32]) >> np.uint32(token % 32)) & np.uint32(1) != 0


@inner_numpy
def _matches(tokens, size, limit):  # type: ignore[no-untyped-def]
    """Return for every k how many of the last tokens, up to `limit`, equal those that end k tokens earlier.

    This is the Z-function (Gusfield 1997, section 1.4) of the reversed tokens.
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
    """Apply the DRY penalty as extended.penalize_repetitions does; the arguments are the fields of DryInputs."""
    # Only entries of tokens that occur in the text are read or written.
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
    """Mask tokens as reference.allow_only does."""
    for a in range(len(rows)):
        row = logits[rows[a]]
        mask_row(row, allowed[table_rows[a]], row)
