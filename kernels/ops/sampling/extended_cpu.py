"""Rarely used filters on the CPU, compiled by numba; README.md defines them, and extended.py is the reference.

Each filter is a plain loop over the row, which the compiler vectorizes because it may reorder sums.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.row_threads import next_row
from kernels.common.cpu.simd import inner_sums
from kernels.ops.sampling.cpu import words_of_chunk
from kernels.ops.sampling.cpu_borders import (
    BUCKETS_PER_UNIT,
    CHUNK,
    NUM_BUCKETS,
    argmax,
    border_of,
    exp,
    fill_maxima,
    key_float,
    key_value,
    mask_row,
    num_chunks,
    options,
    sort_keys,
    token_key,
    word_float,
)
from kernels.ops.sampling.extended import MIN_SLOPE, MIN_TEMPERATURE, MIROSTAT_SAMPLE
from kernels.ops.sampling.philox import XTC_STREAM
from kernels.ops.step_inputs.inputs import (
    CHOICE,
    DYNATEMP_EXPONENT,
    DYNATEMP_RANGE,
    KEY,
    LOG_MIN_P,
    LOG_XTC_THRESHOLD,
    MIROSTAT,
    MIROSTAT_MU,
    TEMPERATURE,
    TOP_K,
    TOP_N_SIGMA,
    TOP_P,
    TYPICAL_P,
    XTC_COIN,
)

_DROPPED = np.float32(-np.inf)
_LOWEST = np.float32(-3.4028235e38)
_LN2 = float(np.log(2.0))
_LAST_TOKEN = np.uint64(0xFFFFFFFF)
_COIN_STREAM = np.uint32(XTC_STREAM)


@inner_sums
def _sums(row, highest):  # type: ignore[no-untyped-def]
    """Return number, sum of exp, and sum of exp times value of the tokens left, relative to the largest value."""
    count, mass, moment = 0, 0.0, 0.0
    for i in range(len(row)):
        value = max(row[i] - highest, np.float32(-87.0))
        weight = exp(value) if row[i] >= _LOWEST else np.float32(0.0)
        count += row[i] >= _LOWEST
        mass += np.float64(weight)
        moment += np.float64(weight) * np.float64(value)
    return count, mass, moment


@inner_sums
def _sigma_cut(row, highest, top_n_sigma):  # type: ignore[no-untyped-def]
    """Return the smallest logit within the given number of standard deviations of the largest."""
    number, total, squares = 0, 0.0, 0.0
    for i in range(len(row)):
        number += row[i] >= _LOWEST
        total += np.float64(row[i]) if row[i] >= _LOWEST else 0.0
    mean = total / number
    for i in range(len(row)):
        off = np.float64(row[i]) - mean if row[i] >= _LOWEST else 0.0
        squares += off * off
    return np.float32(np.float64(highest) - np.float64(top_n_sigma) * np.sqrt(squares / number))


@inner_sums
def _cut(row, lowest):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        row[i] = row[i] if row[i] >= lowest else _DROPPED


@inner_sums
def _temperature(row, highest, temperature, reach, exponent):  # type: ignore[no-untyped-def]
    """Return the dynamic temperature, from the entropy of the row at temperature 1."""
    count, mass, moment = _sums(row, highest)
    share = 0.0
    if count > 1:
        share = min(max((np.log(mass) - moment / mass) / np.log(float(count)), 0.0), 1.0)
    low = max(float(temperature) - float(reach), 0.0)
    high = float(temperature) + float(reach)
    return np.float32(max(low + (high - low) * share ** float(exponent), MIN_TEMPERATURE))


@inner_sums
def _top_border(row, maxima, top_k, top_p):  # type: ignore[no-untyped-def]
    """Return the key of the last token within top_k and top_p."""
    fill_maxima(row, maxima)
    return border_of(row, maxima, np.float32(0.0), np.float32(1.0), top_k, top_p, _DROPPED)


@inner_sums
def _keep_up_to(row, border):  # type: ignore[no-untyped-def]
    """Drop the tokens after a key."""
    lowest, last = key_value(border), np.int64(border & _LAST_TOKEN)
    _cut(row, lowest)
    for i in range(last + 1, len(row)):
        row[i] = _DROPPED if row[i] == lowest else row[i]


@inner_sums
def _typical_border(row, mean, target):  # type: ignore[no-untyped-def]
    """Return the key, by distance from the mean, of the token with which the mass reaches the target."""
    weights = np.empty(len(row), np.float32)
    buckets = np.empty(len(row), np.int32)
    for i in range(len(row)):
        weights[i] = exp(row[i]) if row[i] >= _LOWEST else np.float32(0.0)
    for i in range(len(row)):
        buckets[i] = np.int32(min(abs(row[i] - mean) * BUCKETS_PER_UNIT, np.float32(NUM_BUCKETS - 1)))
    masses = np.zeros(NUM_BUCKETS, np.float64)
    for i in range(len(row)):
        if weights[i] > 0.0:
            masses[buckets[i]] += np.float64(weights[i])
    chosen, reached, up_to = 0, 0.0, 0.0
    for bucket in range(NUM_BUCKETS):
        if masses[bucket] > 0.0:
            chosen, reached = bucket, up_to
            up_to += masses[bucket]
            if up_to >= target:
                break
    count = 0
    for i in range(len(row)):
        count += (buckets[i] == chosen) & (row[i] >= _LOWEST)
    keys = np.empty(count, np.uint64)
    used = 0
    for i in range(len(row)):
        if buckets[i] == chosen and row[i] >= _LOWEST:
            keys[used] = token_key(row[i] - mean, i)
            used += 1
    sort_keys(keys)
    for i in range(len(keys)):
        reached += np.float64(weights[np.int64(keys[i] & _LAST_TOKEN)])
        if reached >= target:
            return keys[i]
    return keys[len(keys) - 1]


@inner_sums
def _keep_typical(row, maxima, typical_p):  # type: ignore[no-untyped-def]
    _, mass, moment = _sums(row, np.float32(0.0))
    mean = np.float32(moment / mass)
    border = _typical_border(row, mean, np.float64(typical_p) * mass)
    farthest, last = -key_value(border), np.int64(border & _LAST_TOKEN)
    for i in range(len(row)):
        row[i] = row[i] if abs(row[i] - mean) <= farthest else _DROPPED
    for i in range(last + 1, len(row)):
        row[i] = _DROPPED if abs(row[i] - mean) == farthest else row[i]
    _, high = fill_maxima(row, maxima)
    largest = key_float(high)
    for i in range(len(row)):
        row[i] = row[i] - largest


@inner_sums
def _top_k_of_mu(row, maxima, number, mu):  # type: ignore[no-untyped-def]
    """See extended.top_k_of_mu; `number` tokens are left. The result is 0 if nothing is cut."""
    if number < 2:
        return 1
    size = min(MIROSTAT_SAMPLE, number)
    border = _top_border(row, maxima, size, 1.0)
    keys = np.empty(size, np.uint64)
    used = 0
    for i in range(len(row)):
        if row[i] >= key_value(border) and token_key(row[i], i) <= border:
            keys[used] = token_key(row[i], i)
            used += 1
    sort_keys(keys)
    above, below = 0.0, 0.0
    for i in range(size - 1):
        step = np.log((i + 2.0) / (i + 1.0))
        above += step * (np.float64(key_value(keys[i])) - np.float64(key_value(keys[i + 1])))
        below += step * step
    slope = above / below
    if slope < MIN_SLOPE:
        return 0
    excess = slope - 1.0
    log_number = np.log(float(number))
    ratio = 1.0 / log_number if abs(excess) < MIN_SLOPE else excess / -np.expm1(-excess * log_number)
    log_k = max((np.log(ratio) + np.float64(mu) * _LN2) / slope, 0.0)
    return max(int(np.exp(log_k)), 1) if log_k < log_number else 0


@inner_sums
def _keep_unsurprising(row, maxima, best, number, mirostat, mu, log_mass):  # type: ignore[no-untyped-def]
    if mirostat == 2:
        _cut(row, np.float32(np.float64(log_mass) - np.float64(mu) * _LN2))
        row[best] = np.float32(0.0)
    else:
        top_k = _top_k_of_mu(row, maxima, number, mu)
        if top_k > 0:
            _keep_up_to(row, _top_border(row, maxima, top_k, 1.0))


@inner_sums
def _drop_likeliest(row, log_threshold):  # type: ignore[no-untyped-def]
    """Apply XTC to a row whose coin triggers it."""
    _, mass, _ = _sums(row, np.float32(0.0))
    lowest = max(np.float32(np.log(mass) + np.float64(log_threshold)), _LOWEST)
    # Compared as integers, magnitudes need no handling of NaN, which would keep the loop from being vectorized.
    largest = np.int32(-1)
    for i in range(len(row)):
        largest = max(largest, np.float32(abs(row[i])).view(np.int32) if row[i] >= lowest else np.int32(-1))
    if largest >= 0:
        least, last = -np.int32(largest).view(np.float32), len(row) - 1
        while row[last] != least:
            last -= 1
        for i in range(len(row)):
            row[i] = _DROPPED if row[i] >= lowest else row[i]
        row[last] = least


@inner_sums
def _extend(row, maxima, words, position, coin):  # type: ignore[no-untyped-def]
    """Filter one row; return the log of its mass if mirostat needs it, else 0.

    `coin` is scratch for one chunk of words.
    """
    log_mass = np.float32(0.0)
    best = argmax(row, maxima)
    if best < 0:
        return log_mass
    highest = row[best]
    if word_float(words[TOP_N_SIGMA]) > 0:
        _cut(row, _sigma_cut(row, highest, word_float(words[TOP_N_SIGMA])))
    heat = word_float(words[TEMPERATURE])
    reach = word_float(words[DYNATEMP_RANGE])
    if reach > 0:
        heat = _temperature(row, highest, heat, reach, word_float(words[DYNATEMP_EXPONENT]))
    for i in range(len(row)):
        row[i] = (row[i] - highest) / heat
    if words[MIROSTAT] > 0:
        number, mass, _ = _sums(row, np.float32(0.0))
        log_mass = np.float32(np.log(mass))
        _keep_unsurprising(row, maxima, best, number, words[MIROSTAT], word_float(words[MIROSTAT_MU]), log_mass)
    else:
        if word_float(words[LOG_MIN_P]) > _DROPPED:
            _cut(row, word_float(words[LOG_MIN_P]))
        if word_float(words[TYPICAL_P]) < 1.0:
            _keep_typical(row, maxima, word_float(words[TYPICAL_P]))
        top_k, top_p = np.int64(words[TOP_K]), words[TOP_P : TOP_P + 2].view(np.float64)[0]
        if top_k > 0 or top_p < 1.0:
            _keep_up_to(row, _top_border(row, maxima, top_k, top_p))
    if words[XTC_COIN] > 0:
        key_low, key_high = np.int64(words[KEY]), np.int64(words[KEY + 1])
        words_of_chunk(0, position, np.int64(words[CHOICE]), _COIN_STREAM, key_low, key_high, coin)
        if np.int64(coin[0] >> np.uint32(8)) < words[XTC_COIN]:
            _drop_likeliest(row, word_float(words[LOG_XTC_THRESHOLD]))
    return log_mass


@njit(**options)
def extend_rows(logits, rows, words, position, mask, mask_rows, claims, log_masses):  # type: ignore[no-untyped-def]
    """Filter the rows that this thread claims, as extended.extend does.

    The arguments before `claims` are the fields of ExtendInputs.
    """
    coin = np.empty(CHUNK, np.uint32)
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    for _ in range(len(rows)):
        e = next_row(claims)
        if e < 0:
            break
        row = logits[rows[e]]
        if mask_rows[e] >= 0:
            mask_row(row, mask[mask_rows[e]], row)
        log_masses[e] = _extend(row, maxima, words[e], position[e], coin)
