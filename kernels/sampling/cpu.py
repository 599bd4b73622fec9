"""Penalties and sampling on the CPU, compiled by numba; the ids are those of reference.py.

A row is never sorted: tokens are counted in buckets of their scaled logit, and only the bucket in which a filter's
border falls is ordered. Noise is computed only where it could still win: the raw Philox word bounds it from above.
The functions release the GIL, so rows are shared among threads by the caller.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.sampling.philox import (
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
_SHIFT = np.uint64(32)
_CHUNK = 64  # tokens of which noise is bounded at a time: 16 counters
_BLOCKS = _CHUNK // 4
_MAX_NOISE = np.float32(MAX_NOISE)
_LN2 = np.float32(0.6931472)
_NUM_BUCKETS = 2048
_BUCKETS_PER_UNIT = np.float32(64.0)  # the last bucket takes what lies 32 and more below the largest
_LOG2E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)

_options = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(**_options)
def _words(first_token, position, choice, key_low, key_high, words):  # type: ignore[no-untyped-def]
    """Philox words of one chunk of tokens; vectorized over its counters."""
    for j in range(_BLOCKS):
        c0 = np.uint32(first_token // 4 + j)
        c1 = np.uint32(position)
        c2 = np.uint32(choice)
        c3 = _STREAM
        k0 = np.uint32(key_low)
        k1 = np.uint32(key_high)
        for _ in range(NUM_ROUNDS):
            p0 = np.uint64(c0) * _M0
            p1 = np.uint64(c2) * _M1
            c0 = np.uint32(np.uint32(p1 >> _SHIFT) ^ c1 ^ k0)
            c1 = np.uint32(p1)
            c2 = np.uint32(np.uint32(p0 >> _SHIFT) ^ c3 ^ k1)
            c3 = np.uint32(p0)
            k0 = np.uint32(k0 + _W0)
            k1 = np.uint32(k1 + _W1)
        words[4 * j] = c0
        words[4 * j + 1] = c1
        words[4 * j + 2] = c2
        words[4 * j + 3] = c3


@njit(**_options)
def _key_range(bits):  # type: ignore[no-untyped-def]
    """Smallest and largest float32 of a row, given and returned as int32 in an order that compares like the floats.

    Comparisons of floats are not vectorized, because of NaN; here positive NaN sorts above +inf, negative below -inf.
    """
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for i in range(len(bits)):
        key = np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    return low, high


@njit(**_options)
def _key_float(key):  # type: ignore[no-untyped-def]
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(**_options)
def _largest(values):  # type: ignore[no-untyped-def]
    """Maximum of values without NaN."""
    _, high = _key_range(values.view(np.int32))
    return _key_float(high)


@njit(**_options)
def _argmax(row):  # type: ignore[no-untyped-def]
    """Lowest id of the largest logit; -1 where the row has NaN or +inf, or nothing but -inf."""
    low, high = _key_range(row.view(np.int32))
    minus_infinity = np.int32(-0x7F800001)
    if low < minus_infinity or high >= np.int32(0x7F800000) or high == minus_infinity:
        return -1
    largest = _key_float(high)
    for first in range(0, len(row), _CHUNK):
        if _largest(row[first : first + _CHUNK]) == largest:
            for i in range(first, len(row)):
                if row[i] == largest:
                    return i
    return -1


@njit(**_options)
def _gumbel(word):  # type: ignore[no-untyped-def]
    uniform = (np.float64(word >> np.uint32(8)) + 0.5) * 2.0**-24
    return np.float32(-np.log(-np.log(uniform)))


@njit(**_options)
def _token_key(scaled, token):  # type: ignore[no-untyped-def]
    """Sorts by scaled logit (<= 0) downwards, then by id upwards."""
    bits = np.float32(abs(scaled)).view(np.uint32)
    return (np.uint64(bits) << _SHIFT) | np.uint64(token)


@njit(**_options)
def _key_value(key):  # type: ignore[no-untyped-def]
    return -np.uint32(key >> _SHIFT).view(np.float32)


@njit(**_options)
def _bucket(scaled):  # type: ignore[no-untyped-def]
    return np.int32(min(np.float32(-scaled * _BUCKETS_PER_UNIT), np.float32(_NUM_BUCKETS - 1)))


@njit(**_options)
def _count_buckets(row, highest, temperature, lowest, last_bucket, counts, masses):  # type: ignore[no-untyped-def]
    """Number and probability mass (largest token's = 1) of the tokens at or above `lowest`, by bucket.

    Chunks of tokens that all lie beyond `last_bucket` are left out.
    """
    scaled = np.empty(_CHUNK, np.float32)
    weights = np.empty(_CHUNK, np.float32)
    buckets = np.empty(_CHUNK, np.int32)
    for first in range(0, len(row), _CHUNK):
        size = min(_CHUNK, len(row) - first)
        if last_bucket < _NUM_BUCKETS - 1:
            largest = (_largest(row[first : first + size]) - highest) / temperature
            if _bucket(largest) > last_bucket:
                continue
        for i in range(size):
            s = (row[first + i] - highest) / temperature
            scaled[i] = s
            # exp by 2**n * polynomial of the remainder (Cephes expf), without a call, so that it is vectorized.
            x = max(s, np.float32(-87.0))
            n = np.floor(x * _LOG2E + np.float32(0.5))
            r = x - n * _LN2_HIGH - n * _LN2_LOW
            p = np.float32(1.9875691500e-4)
            p = p * r + np.float32(1.3981999507e-3)
            p = p * r + np.float32(8.3334519073e-3)
            p = p * r + np.float32(4.1665795894e-2)
            p = p * r + np.float32(1.6666665459e-1)
            p = p * r + np.float32(5.0000001201e-1)
            p = p * r * r + r + np.float32(1.0)
            power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23))
            weights[i] = p * power.view(np.float32)
            buckets[i] = _bucket(s)
        for i in range(size):
            if scaled[i] >= lowest:
                counts[buckets[i]] += 1
                masses[buckets[i]] += weights[i]


@njit(**_options)
def _sorted_bucket(row, highest, temperature, lowest, bucket, count):  # type: ignore[no-untyped-def]
    """Keys of the tokens of one bucket, best first."""
    keys = np.empty(count, np.uint64)
    used = 0
    for token in range(len(row)):
        s = (row[token] - highest) / temperature
        if s >= lowest and _bucket(s) == bucket:
            keys[used] = _token_key(s, token)
            used += 1
    # Shell sort: a bucket is small, and numpy's sorts take seconds to compile.
    gap = 1
    while gap < used // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, used):
            key = keys[i]
            j = i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
        gap //= 3
    return keys[:used]


@njit(**_options)
def _bucket_of_top_k(row, highest, temperature, top_k, counts):  # type: ignore[no-untyped-def]
    """A bucket beyond which none of the k likeliest tokens lies: that of the k-th largest of the chunks' maxima."""
    for first in range(0, len(row), _CHUNK):
        counts[_bucket((_largest(row[first : first + _CHUNK]) - highest) / temperature)] += 1
    reached = 0
    for bucket in range(_NUM_BUCKETS):
        reached += counts[bucket]
        counts[bucket] = 0
        if reached >= top_k:
            counts[bucket:] = 0
            return bucket
    return _NUM_BUCKETS - 1


@njit(**_options)
def _border(row, highest, temperature, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    """The key of the last token that passes the filters."""
    counts = np.zeros(_NUM_BUCKETS, np.int64)
    masses = np.zeros(_NUM_BUCKETS, np.float64)
    # -inf is never kept: a token without probability needs no border.
    lowest = max(log_min_p, np.float32(-3.0e38))
    last_bucket = _NUM_BUCKETS - 1
    if 0 < top_k <= len(row) // _CHUNK:
        last_bucket = _bucket_of_top_k(row, highest, temperature, top_k, counts)
    _count_buckets(row, highest, temperature, lowest, last_bucket, counts, masses)
    last_key = _token_key(lowest, np.uint64(0xFFFFFFFF))
    total = 0.0
    kept = 0
    for bucket in range(_NUM_BUCKETS):
        if top_k > 0 and kept + counts[bucket] >= top_k:
            keys = _sorted_bucket(row, highest, temperature, lowest, bucket, counts[bucket])
            last_key = keys[top_k - kept - 1]
            for i in range(top_k - kept):
                total += np.exp(np.float64(_key_value(keys[i])))
            break
        kept += counts[bucket]
        total += masses[bucket]
    if top_p >= 1.0:
        return last_key
    target = top_p * total
    reached = 0.0
    for bucket in range(_NUM_BUCKETS):
        if counts[bucket] > 0 and reached + masses[bucket] >= target:
            keys = _sorted_bucket(row, highest, temperature, lowest, bucket, counts[bucket])
            for i in range(len(keys)):
                reached += np.exp(np.float64(_key_value(keys[i])))
                if reached >= target or i == len(keys) - 1:
                    return min(last_key, keys[i])
        reached += masses[bucket]
    return last_key


@njit(**_options)
def _noisy_argmax(row, best_id, temperature, border, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """argmax of scaled logit + noise over the tokens up to the border; the lowest id where they are equal."""
    words = np.empty(_CHUNK, np.uint32)
    bounds = np.empty(_CHUNK, np.float32)
    highest = row[best_id]
    _words(best_id - best_id % _CHUNK, position, choice, key_low, key_high, words)
    best = _gumbel(words[best_id % _CHUNK])
    cut = _key_value(border)
    for first in range(0, len(row), _CHUNK):
        chunk = row[first : first + _CHUNK]
        largest = (_largest(chunk) - highest) / temperature
        if largest < cut or largest + _MAX_NOISE < best:
            continue
        _words(first, position, choice, key_low, key_high, words)
        for i in range(len(chunk)):
            # -log(-log(u)) <= -log(1 - u); log2 of 1 - u is bounded below by its exponent and linear mantissa.
            rest = np.float32(np.float32(np.uint32(~words[i]) >> np.uint32(8)) + np.float32(0.5))
            log2 = np.float32(rest.view(np.int32)) * np.float32(2.0**-23) - np.float32(151.001)
            bounds[i] = (chunk[i] - highest) / temperature - _LN2 * log2
        if _largest(bounds[: len(chunk)]) < best:
            continue
        for i in range(len(chunk)):
            token = first + i
            s = (chunk[i] - highest) / temperature
            if bounds[i] < best or _token_key(s, token) > border:
                continue
            noisy = s + _gumbel(words[i])
            if noisy > best or (noisy == best and token < best_id):
                best = noisy
                best_id = token
    return best_id


@njit(**_options)
def _allowed(row, words):  # type: ignore[no-untyped-def]
    """The row with minus infinity where the grammar's mask has no bit."""
    result = np.empty(len(row), np.float32)
    for token in range(len(row)):
        bit = (np.uint32(words[token // 32]) >> np.uint32(token % 32)) & np.uint32(1)
        result[token] = row[token] if bit else np.float32(-np.inf)
    return result


@njit(**_options)
def sample_rows(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, log_min_p, key, position, choice, mask, mask_rows, start, end, ids
):
    """Fills ids[start:end]; the arguments are the fields of SamplingInputs; mask_rows is below 0 without a mask."""
    no_border = (np.uint64(0x7F7FFFFF) << _SHIFT) | np.uint64(0xFFFFFFFF)
    for r in range(start, end):
        row = logits[r]
        if mask_rows[r] >= 0:
            row = _allowed(row, mask[mask_rows[r]])
        best_id = _argmax(row)
        ids[r] = best_id
        if best_id < 0 or temperature[r] == np.float32(0.0):
            continue
        border = no_border
        if top_k[r] > 0 or top_p[r] < 1.0:
            border = _border(row, row[best_id], temperature[r], top_k[r], top_p[r], log_min_p[r])
        elif log_min_p[r] > np.float32(-np.inf):
            border = _token_key(log_min_p[r], np.uint64(0xFFFFFFFF))
        ids[r] = _noisy_argmax(row, best_id, temperature[r], border, position[r], choice[r], key[0, r], key[1, r])


@njit(**_options)
def penalize_rows(  # type: ignore[no-untyped-def]
    logits, rows, slots, output_counts, in_prompt, repetition, presence, frequency
):
    """reference.penalize, one pass over each row."""
    for i in range(len(rows)):
        row = logits[rows[i]]
        counts = output_counts[slots[i]]
        prompt = in_prompt[slots[i]]
        for token in range(len(row)):
            count = counts[token]
            value = row[token]
            if count > 0 or prompt[token]:
                value = value / repetition[i] if value > 0 else value * repetition[i]
            if count > 0:
                value = value - frequency[i] * np.float32(count) - presence[i]
            row[token] = value
