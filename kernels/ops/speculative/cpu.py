"""Rejection on the CPU, compiled by numba.

As kernels/ops/sampling/cpu.py: a row is never sorted, and a logarithm is taken only where a bound of it, read off the
raw
word, could win. README.md has the maths. The compiled functions release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.claims import next_row
from kernels.common.cpu.inner import inner_numpy
from kernels.ops.sampling.cpu import words_of_chunk
from kernels.ops.sampling.cpu_borders import (
    CHUNK,
    SHIFT,
    argmax,
    border_of,
    exp,
    key_value,
    largest_of,
    mask_row,
    num_chunks,
    options,
    token_key,
)
from kernels.ops.sampling.philox import ACCEPT_STREAM, REPLACE_STREAM

_NO_BORDER = (np.uint64(0x7F7FFFFF) << SHIFT) | np.uint64(0xFFFFFFFF)
_NO_TOKEN = np.int64(-1)
_MOST_TIMES = np.float32(2.0**25)
"""By which a share is divided at least: 1 - u, and so -log(u), is no less than 2**-25."""
_ROUNDED_UP = np.float32(1.0 + 2.0**-20)


@inner_numpy
def _border(row, maxima, best_id, temperature, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    """The key of the last token that passes the filters."""
    if top_k > 0 or top_p < 1.0:
        return border_of(row, maxima, row[best_id], temperature, top_k, top_p, log_min_p)
    if log_min_p > np.float32(-np.inf):
        return token_key(log_min_p, np.uint64(0xFFFFFFFF))
    return _NO_BORDER


@inner_numpy
def _masses(row, maxima, best_id, temperature, border, masses):  # type: ignore[no-untyped-def]
    """exp of the scaled logit of each token that passes, 0 of others; the sum of all."""
    highest = row[best_id]
    cut = key_value(border)
    last_bits = np.uint32(border >> SHIFT)
    last_id = np.int64(border & np.uint64(0xFFFFFFFF))
    sums = np.zeros(CHUNK, np.float64)
    for c in range(len(maxima)):
        first = c * CHUNK
        chunk = row[first : first + CHUNK]
        out = masses[first : first + CHUNK]
        if (maxima[c] - highest) / temperature < cut:
            out[:] = np.float32(0.0)
            continue
        at_border = np.int64(0)
        for i in range(len(chunk)):
            s = (chunk[i] - highest) / temperature
            bits = np.float32(abs(s)).view(np.uint32)
            out[i] = exp(s) if bits <= last_bits else np.float32(0.0)
            at_border += np.int64(bits == last_bits)
        if at_border > 0:
            for i in range(len(chunk)):
                if first + i > last_id and np.float32((chunk[i] - highest) / temperature) == cut:
                    out[i] = np.float32(0.0)
        for i in range(len(chunk)):
            sums[i] += np.float64(out[i])
    return sums.sum()


@inner_numpy
def _uniform(word):  # type: ignore[no-untyped-def]
    return (np.float64(word >> np.uint32(8)) + 0.5) * 2.0**-24


@inner_numpy
def _first_to_arrive(shares, likely, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """argmax of share / -log(u), the lowest id where they are equal; _NO_TOKEN where all shares are 0.

    Begins with the chunk of a token that is likely to win, so that most others need no words.
    """
    words = np.empty(CHUNK, np.uint32)
    ahead = np.empty(CHUNK, np.float32)
    best = 0.0
    best_id = _NO_TOKEN
    start = likely - likely % CHUNK
    for k in range(-1, (len(shares) + CHUNK - 1) // CHUNK):
        first = start if k < 0 else k * CHUNK
        if k >= 0 and first == start:
            continue
        chunk = shares[first : first + CHUNK]
        if largest_of(chunk) * _MOST_TIMES * _ROUNDED_UP < best:
            continue
        words_of_chunk(first, position, choice, np.uint32(REPLACE_STREAM), key_low, key_high, words)
        so_far = np.float32(best)
        for i in range(len(chunk)):
            # -log(u) >= 1 - u, so below 0 a token cannot be the first, whatever its logarithm.
            rest = (np.float32(np.uint32(~words[i]) >> np.uint32(8)) + np.float32(0.5)) * np.float32(2.0**-24)
            ahead[i] = chunk[i] * _ROUNDED_UP - so_far * rest
        if largest_of(ahead[: len(chunk)]) < np.float32(0.0):
            continue
        for i in range(len(chunk)):
            if chunk[i] <= np.float32(0.0) or ahead[i] < np.float32(0.0):
                continue
            ratio = np.float64(chunk[i]) / -np.log(_uniform(words[i]))
            if ratio > best or (ratio == best and first + i < best_id):
                best = ratio
                best_id = np.int64(first + i)
    return best_id


@njit(**options)
def probability_rows(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, log_min_p, key, position, choice, mask, mask_rows, claims, out
):
    """reference.probabilities in float32 of the rows that it claims; the arguments before are those of
    kernels/ops/sampling's sample_rows."""
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    masked = np.empty(logits.shape[1], np.float32)
    for _ in range(len(logits)):
        r = next_row(claims)
        if r < 0:
            break
        row = logits[r]
        if mask_rows[r] >= 0:
            mask_row(row, mask[mask_rows[r]], masked)
            row = masked
        best_id = argmax(row, maxima)
        if best_id < 0:
            out[r] = np.float32(np.nan)
        elif temperature[r] == np.float32(0.0):
            out[r] = np.float32(0.0)
            out[r, best_id] = np.float32(1.0)
        else:
            border = _border(row, maxima, best_id, temperature[r], top_k[r], top_p[r], log_min_p[r])
            inverse = np.float32(1.0 / _masses(row, maxima, best_id, temperature[r], border, out[r]))
            for token in range(len(row)):
                out[r, token] *= inverse


@njit(**options)
def reject_rows(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, log_min_p, key, position, choice, mask, mask_rows,
    drafts, probabilities, probability_rows, claims, ids,
):  # fmt: skip
    """reference.reject; fills ids of the rows that it claims. probability_rows is below 0 where a draft has no
    distribution."""
    masses = np.empty(logits.shape[1], np.float32)
    words = np.empty(CHUNK, np.uint32)
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    masked = np.empty(logits.shape[1], np.float32)
    for _ in range(len(logits)):
        r = next_row(claims)
        if r < 0:
            break
        row = logits[r]
        if mask_rows[r] >= 0:
            mask_row(row, mask[mask_rows[r]], masked)
            row = masked
        best_id = argmax(row, maxima)
        ids[r] = best_id
        if best_id < 0 or temperature[r] == np.float32(0.0):
            continue
        border = _border(row, maxima, best_id, temperature[r], top_k[r], top_p[r], log_min_p[r])
        total = _masses(row, maxima, best_id, temperature[r], border, masses)
        draft = drafts[r]
        proposed = 0 <= draft < len(row)
        given = False
        if proposed:
            chance = np.float32(1.0)
            if probability_rows[r] >= 0:
                chance = probabilities[probability_rows[r], draft]
                given = chance > np.float32(0.0) and chance < np.float32(np.inf)
                if not given:
                    chance = np.float32(1.0)
            words_of_chunk(0, position[r], choice[r], np.uint32(ACCEPT_STREAM), key[0, r], key[1, r], words)
            if _uniform(words[0]) * np.float64(chance) < np.float64(masses[draft]) / total:
                ids[r] = draft
                continue
            masses[draft] = np.float32(0.0)
        if given:
            inverse = np.float32(1.0 / total)
            drawn_from = probabilities[probability_rows[r]]
            for token in range(len(row)):
                left = masses[token] * inverse - drawn_from[token]
                masses[token] = left if left > np.float32(0.0) else np.float32(0.0)
        ids[r] = _first_to_arrive(masses, best_id, position[r], choice[r], key[0, r], key[1, r])
        if ids[r] == _NO_TOKEN:
            ids[r] = draft
