"""Rejection sampling on the CPU, compiled by numba.

As in kernels/ops/sampling/cpu.py, rows are not sorted, and a logarithm is computed only where an upper bound, read off
the random word, could win. README.md has the definitions. The compiled functions release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.row_threads import next_row
from kernels.common.cpu.simd import inner_numpy, inner_sums
from kernels.ops.sampling.cpu import words_of_chunk
from kernels.ops.sampling.cpu_borders import (
    CHUNK,
    SHIFT,
    argmax,
    exp,
    largest_of,
    masked_row,
    num_chunks,
    options,
    row_border,
)
from kernels.ops.sampling.philox import ACCEPT_STREAM, REPLACE_STREAM

_NO_TOKEN = np.int64(-1)
_MAX_FACTOR = np.float32(2.0**25)
"""Largest factor applied to a weight: -log(u) >= 1 - u >= 2**-25."""
_ROUNDED_UP = np.float32(1.0 + 2.0**-20)


@inner_sums
def _masses(row, highest, temperature, border, masses):  # type: ignore[no-untyped-def]
    """Fill `masses` with exp of the scaled logit of each token that passes, 0 for the others, and return the sum."""
    last_bits = np.uint32(border >> SHIFT)
    last_id = np.int64(border & np.uint64(0xFFFFFFFF))
    for i in range(len(row)):
        s = (row[i] - highest) / temperature
        masses[i] = exp(s) if np.float32(abs(s)).view(np.uint32) <= last_bits else np.float32(0.0)
    for i in range(last_id + 1, len(row)):
        s = (row[i] - highest) / temperature
        masses[i] = masses[i] if np.float32(abs(s)).view(np.uint32) != last_bits else np.float32(0.0)
    total = 0.0
    for i in range(len(row)):
        total += np.float64(masses[i])
    return total


@inner_numpy
def _uniform(word):  # type: ignore[no-untyped-def]
    return (np.float64(word >> np.uint32(8)) + 0.5) * 2.0**-24


@inner_numpy
def _first_to_arrive(shares, likely, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """Return the argmax of share / -log(u); the lowest id wins a tie, and _NO_TOKEN means that all shares are 0.

    The chunk of the token `likely` comes first, so that most other chunks need no random words.
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
        if largest_of(chunk) * _MAX_FACTOR * _ROUNDED_UP < best:
            continue
        words_of_chunk(first, position, choice, np.uint32(REPLACE_STREAM), key_low, key_high, words)
        so_far = np.float32(best)
        for i in range(len(chunk)):
            # -log(u) >= 1 - u, so a token with a negative value cannot win, whatever its logarithm.
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
    """Compute reference.probabilities in float32 for the rows that this thread claims.

    The arguments before `claims` are those of sample_rows in kernels/ops/sampling/cpu.py.
    """
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    masked = np.empty(logits.shape[1], np.float32)
    for _ in range(len(logits)):
        r = next_row(claims)
        if r < 0:
            break
        row = masked_row(logits, mask, mask_rows, r, masked)
        best_id = argmax(row, maxima)
        if best_id < 0:
            out[r] = np.float32(np.nan)
        elif temperature[r] == np.float32(0.0):
            out[r] = np.float32(0.0)
            out[r, best_id] = np.float32(1.0)
        else:
            border = row_border(row, maxima, row[best_id], temperature[r], top_k[r], top_p[r], log_min_p[r])
            inverse = np.float32(1.0 / _masses(row, row[best_id], temperature[r], border, out[r]))
            for token in range(len(row)):
                out[r, token] *= inverse


@njit(**options)
def reject_rows(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, log_min_p, key, position, choice, mask, mask_rows,
    drafts, probabilities, probability_rows, claims, ids,
):  # fmt: skip
    """Apply reference.reject to the rows that this thread claims, and store their ids.

    `probability_rows` is negative for drafts without a distribution.
    """
    masses = np.empty(logits.shape[1], np.float32)
    words = np.empty(CHUNK, np.uint32)
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    masked = np.empty(logits.shape[1], np.float32)
    for _ in range(len(logits)):
        r = next_row(claims)
        if r < 0:
            break
        row = masked_row(logits, mask, mask_rows, r, masked)
        best_id = argmax(row, maxima)
        ids[r] = best_id
        if best_id < 0 or temperature[r] == np.float32(0.0):
            continue
        border = row_border(row, maxima, row[best_id], temperature[r], top_k[r], top_p[r], log_min_p[r])
        total = _masses(row, row[best_id], temperature[r], border, masses)
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
