"""Biases, penalties and sampling on the CPU, compiled by numba; the ids equal those of reference.py.

Rows are not sorted. Tokens are counted in buckets of their scaled logit, and only the bucket that contains a filter's
border is sorted. Noise is computed only for tokens that could still win; the raw Philox word gives an upper bound of
it. The functions release the GIL, so that the caller can share rows among threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.row_threads import next_row
from kernels.common.cpu.simd import inner_numpy
from kernels.ops.sampling.cpu_borders import (
    CHUNK,
    SHIFT,
    argmax,
    key_value,
    largest_of,
    masked_row,
    num_chunks,
    options,
    row_border,
    token_key,
)
from kernels.ops.sampling.philox import (
    MAX_NOISE,
    MULTIPLIER_0,
    MULTIPLIER_1,
    NUM_ROUNDS,
    STREAM,
    WEYL_0,
    WEYL_1,
)

_M0 = np.uint64(MULTIPLIER_0)
_M1 = np.uint64(MULTIPLIER_1)
_W0 = np.uint32(WEYL_0)
_W1 = np.uint32(WEYL_1)
_STREAM = np.uint32(STREAM)
_BLOCKS = CHUNK // 4
_MAX_NOISE = np.float32(MAX_NOISE)
_LN2 = np.float32(0.6931472)


@inner_numpy
def words_of_chunk(first_token, position, choice, stream, key_low, key_high, words):  # type: ignore[no-untyped-def]
    """Compute the Philox words of one chunk of tokens on a stream, vectorized over the counters."""
    for j in range(_BLOCKS):
        c0 = np.uint32(first_token // 4 + j)
        c1 = np.uint32(position)
        c2 = np.uint32(choice)
        c3 = np.uint32(stream)
        k0 = np.uint32(key_low)
        k1 = np.uint32(key_high)
        for _ in range(NUM_ROUNDS):
            p0 = np.uint64(c0) * _M0
            p1 = np.uint64(c2) * _M1
            c0 = np.uint32(np.uint32(p1 >> SHIFT) ^ c1 ^ k0)
            c1 = np.uint32(p1)
            c2 = np.uint32(np.uint32(p0 >> SHIFT) ^ c3 ^ k1)
            c3 = np.uint32(p0)
            k0 = np.uint32(k0 + _W0)
            k1 = np.uint32(k1 + _W1)
        words[4 * j] = c0
        words[4 * j + 1] = c1
        words[4 * j + 2] = c2
        words[4 * j + 3] = c3


@inner_numpy
def _gumbel(word):  # type: ignore[no-untyped-def]
    uniform = (np.float64(word >> np.uint32(8)) + 0.5) * 2.0**-24
    return np.float32(-np.log(-np.log(uniform)))


@inner_numpy
def _noisy_argmax(row, maxima, best_id, temperature, border, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """Return the argmax of scaled logit + noise over the tokens up to the border; the lowest id wins a tie."""
    words = np.empty(CHUNK, np.uint32)
    bounds = np.empty(CHUNK, np.float32)
    highest = row[best_id]
    words_of_chunk(best_id - best_id % CHUNK, position, choice, _STREAM, key_low, key_high, words)
    best = _gumbel(words[best_id % CHUNK])
    cut = key_value(border)
    for c in range(len(maxima)):
        largest = (maxima[c] - highest) / temperature
        if largest < cut or largest + _MAX_NOISE < best:
            continue
        first = c * CHUNK
        chunk = row[first : first + CHUNK]
        words_of_chunk(first, position, choice, _STREAM, key_low, key_high, words)
        for i in range(len(chunk)):
            # -log(-log(u)) <= -log(1 - u). Exponent and linear mantissa give a lower bound of log2(1 - u).
            rest = np.float32(np.float32(np.uint32(~words[i]) >> np.uint32(8)) + np.float32(0.5))
            log2 = np.float32(rest.view(np.int32)) * np.float32(2.0**-23) - np.float32(151.001)
            bounds[i] = (chunk[i] - highest) / temperature - _LN2 * log2
        if largest_of(bounds[: len(chunk)]) < best:
            continue
        for i in range(len(chunk)):
            token = first + i
            s = (chunk[i] - highest) / temperature
            if bounds[i] < best or token_key(s, token) > border:
                continue
            noisy = s + _gumbel(words[i])
            if noisy > best or (noisy == best and token < best_id):
                best = noisy
                best_id = token
    return best_id


@njit(**options)
def sample_rows(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, log_min_p, key, position, choice, mask, mask_rows, claims, ids
):
    """Sample the rows that this thread claims and store their ids.

    The arguments before `claims` are the fields of SamplingInputs; `mask_rows` is negative for rows without a mask.
    """
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
        ids[r] = _noisy_argmax(
            row, maxima, best_id, temperature[r], border, position[r], choice[r], key[0, r], key[1, r]
        )


# Compiled for explicit types: numba would treat a table with one row and one entry as contiguous, and compile again
# later.
@njit("void(f4[:, ::1], i4[:, :], f4[:, :], i4[:, :], i4[::1], i8[::1])", **options)
def adjust_rows(logits, ids, values, until, table_rows, position):  # type: ignore[no-untyped-def]
    """Add biases and masks as reference.adjust does.

    The arguments are the fields of AdjustInputs, whose tables need not be contiguous.
    """
    for r in range(len(logits)):
        row = logits[r]
        entry = table_rows[r]
        for i in range(ids.shape[1]):
            if position[r] < until[entry, i]:
                row[ids[entry, i]] += values[entry, i]


@inner_numpy
def _penalized(value, count, in_prompt, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    """Return one penalized logit."""
    if count > 0 or in_prompt:
        value = value / repetition if value > 0 else value * repetition
    if count > 0:
        value = value - frequency * np.float32(count) - presence
    return value


@njit(**options)
def penalize_rows(  # type: ignore[no-untyped-def]
    logits, rows, slots, output_counts, in_prompt, repetition, presence, frequency, extra
):
    """Penalize as reference.penalize does: one pass over each row, then redo the few tokens in `extra`."""
    raw = np.empty(extra.shape[1], np.float32)
    for i in range(len(rows)):
        row = logits[rows[i]]
        counts = output_counts[slots[i]]
        prompt = in_prompt[slots[i]]
        for j in range(len(raw)):
            raw[j] = row[max(extra[i, j], 0)]
        for token in range(len(row)):
            row[token] = _penalized(row[token], counts[token], prompt[token], repetition[i], presence[i], frequency[i])
        for j in range(len(raw)):
            token = extra[i, j]
            if token >= 0:
                count = counts[token]
                for other in range(len(raw)):
                    if extra[i, other] == token:
                        count += 1
                row[token] = _penalized(raw[j], count, prompt[token], repetition[i], presence[i], frequency[i])
