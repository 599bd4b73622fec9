"""Rarely used filters on the CPU, compiled by numba; README.md defines them, and extended.py is the reference.

Rows are not sorted: borders are found from buckets, as in cpu.py. Sums use a fixed number of lanes, so that they are
vectorized and always have the same order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.row_threads import next_row
from kernels.common.cpu.simd import inner_numpy
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
    last_chunk,
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
_NO_LIMIT = np.uint64(0xFFFFFFFF)
_COIN_STREAM = np.uint32(XTC_STREAM)


@inner_numpy
def _add_chunks(row, maxima, counts, masses, moments):  # type: ignore[no-untyped-def]
    weights = np.empty(CHUNK, np.float32)
    for c in range(len(maxima)):
        if maxima[c] == _DROPPED:
            continue
        part = row[c * CHUNK : (c + 1) * CHUNK]
        # One loop for each number type; a combined loop takes twice as long.
        for j in range(CHUNK):
            weights[j] = exp(part[j]) * np.float32(np.int32(part[j] >= _LOWEST))
        for j in range(CHUNK):
            counts[j] += np.int32(part[j] >= _LOWEST)
        for j in range(CHUNK):
            masses[j] += np.float64(weights[j])
        for j in range(CHUNK):
            moments[j] += np.float64(weights[j]) * np.float64(max(part[j], np.float32(-87.0)))


@inner_numpy
def _sums(row, maxima):  # type: ignore[no-untyped-def]
    """Return number, sum of exp, and sum of exp times value of the tokens left; the largest value is 0."""
    counts = np.zeros(CHUNK, np.int32)
    masses = np.zeros(CHUNK, np.float64)
    moments = np.zeros(CHUNK, np.float64)
    whole = len(row) // CHUNK
    _add_chunks(row, maxima[:whole], counts, masses, moments)
    if whole < len(maxima):
        _add_chunks(last_chunk(row, whole), maxima[whole:], counts, masses, moments)
    count, mass, moment = 0, 0.0, 0.0
    for j in range(CHUNK):
        count += counts[j]
        mass += masses[j]
        moment += moments[j]
    return count, mass, moment


@inner_numpy
def _sigma_cut(row, highest, top_n_sigma):  # type: ignore[no-untyped-def]
    """Return the smallest logit within the given number of standard deviations of the largest."""
    counts = np.zeros(CHUNK, np.int64)
    sums = np.zeros(CHUNK, np.float64)
    whole = len(row) - len(row) % CHUNK
    for first in range(0, whole, CHUNK):
        for j in range(CHUNK):
            there = row[first + j] >= _LOWEST
            counts[j] += there
            sums[j] += np.float64(row[first + j]) if there else 0.0
    for i in range(whole, len(row)):
        if row[i] >= _LOWEST:
            counts[0] += 1
            sums[0] += np.float64(row[i])
    number = counts.sum()
    mean = sums.sum() / number
    squares = np.zeros(CHUNK, np.float64)
    for first in range(0, whole, CHUNK):
        for j in range(CHUNK):
            off = np.float64(row[first + j]) - mean if row[first + j] >= _LOWEST else 0.0
            squares[j] += off * off
    for i in range(whole, len(row)):
        if row[i] >= _LOWEST:
            squares[0] += (np.float64(row[i]) - mean) ** 2
    return np.float32(np.float64(highest) - np.float64(top_n_sigma) * np.sqrt(squares.sum() / number))


@inner_numpy
def _scale(row, maxima, highest, temperature, lowest):  # type: ignore[no-untyped-def]
    """Replace logits by (logit - highest) / temperature, and drop those below `lowest`."""
    for values in (row, maxima):
        for i in range(len(values)):
            s = (values[i] - highest) / temperature
            values[i] = s if values[i] >= lowest else _DROPPED


@inner_numpy
def _cut(row, maxima, lowest):  # type: ignore[no-untyped-def]
    for values in (row, maxima):
        for i in range(len(values)):
            values[i] = values[i] if values[i] >= lowest else _DROPPED


@inner_numpy
def _temperature(row, maxima, highest, temperature, reach, exponent):  # type: ignore[no-untyped-def]
    """Return the dynamic temperature, from the entropy of the row at temperature 1."""
    shifted = np.empty(len(row), np.float32)
    for i in range(len(row)):
        shifted[i] = row[i] - highest
    count, mass, moment = _sums(shifted, maxima)
    share = 0.0
    if count > 1:
        share = min(max((np.log(mass) - moment / mass) / np.log(float(count)), 0.0), 1.0)
    low = max(float(temperature) - float(reach), 0.0)
    high = float(temperature) + float(reach)
    return np.float32(max(low + (high - low) * share ** float(exponent), MIN_TEMPERATURE))


@inner_numpy
def _keep_up_to(row, maxima, border):  # type: ignore[no-untyped-def]
    """Drop the tokens after a key."""
    lowest = key_value(border)
    last = np.int64(border & _NO_LIMIT)
    _cut(row, maxima, lowest)
    for c in range((last + 1) // CHUNK, len(maxima)):
        if maxima[c] == _DROPPED:
            continue
        for i in range(max(c * CHUNK, int(last) + 1), min((c + 1) * CHUNK, len(row))):
            if row[i] == lowest:
                row[i] = _DROPPED


@inner_numpy
def _distance_bucket(value, mean):  # type: ignore[no-untyped-def]
    return np.int32(min(abs(value - mean) * BUCKETS_PER_UNIT, np.float32(NUM_BUCKETS - 1)))


@inner_numpy
def _count_chunks(row, maxima, mean, counts, masses):  # type: ignore[no-untyped-def]
    weights = np.empty(CHUNK, np.float32)
    buckets = np.empty(CHUNK, np.int32)
    for c in range(len(maxima)):
        if maxima[c] == _DROPPED:
            continue
        part = row[c * CHUNK : (c + 1) * CHUNK]
        for j in range(CHUNK):
            weights[j] = exp(part[j])
        for j in range(CHUNK):
            buckets[j] = _distance_bucket(part[j], mean)
        for j in range(CHUNK):
            if part[j] > _DROPPED:
                masses[buckets[j]] += np.float64(weights[j])
                counts[buckets[j]] += 1


@inner_numpy
def _count_distances(row, maxima, mean, counts, masses):  # type: ignore[no-untyped-def]
    """Count the tokens left, and sum their mass, by distance from the mean."""
    whole = len(row) // CHUNK
    _count_chunks(row, maxima[:whole], mean, counts, masses)
    if whole < len(maxima):
        _count_chunks(last_chunk(row, whole), maxima[whole:], mean, counts, masses)


@inner_numpy
def _keys_of_distance(row, maxima, mean, bucket, count):  # type: ignore[no-untyped-def]
    """Return the keys by distance of the tokens of one bucket, the nearest first."""
    keys = np.empty(count, np.uint64)
    used = 0
    for c in range(len(maxima)):
        if maxima[c] < mean and _distance_bucket(maxima[c], mean) > bucket:
            continue
        part = row[c * CHUNK : (c + 1) * CHUNK]
        found = np.int32(0)
        for j in range(len(part)):
            found += np.int32(_distance_bucket(part[j], mean) == bucket)
        if found == 0:
            continue
        for j in range(len(part)):
            if part[j] > _DROPPED and _distance_bucket(part[j], mean) == bucket and used < len(keys):
                keys[used] = token_key(part[j] - mean, c * CHUNK + j)
                used += 1
    sort_keys(keys)
    return keys


@inner_numpy
def _typical_border(row, maxima, mean, target):  # type: ignore[no-untyped-def]
    """Return the key, by distance from the mean, of the token with which the mass reaches the target."""
    masses = np.zeros(NUM_BUCKETS, np.float64)
    counts = np.zeros(NUM_BUCKETS, np.int64)
    _count_distances(row, maxima, mean, counts, masses)
    chosen, reached, up_to = 0, 0.0, 0.0
    for bucket in range(NUM_BUCKETS):
        if counts[bucket] > 0:
            chosen, reached = bucket, up_to
            up_to += masses[bucket]
            if up_to >= target:
                break
    keys = _keys_of_distance(row, maxima, mean, chosen, counts[chosen])
    for i in range(len(keys)):
        reached += np.float64(exp(row[np.int64(keys[i] & _NO_LIMIT)]))
        if reached >= target:
            return keys[i]
    return keys[len(keys) - 1]


@inner_numpy
def _keep_typical(row, maxima, typical_p):  # type: ignore[no-untyped-def]
    _, mass, moment = _sums(row, maxima)
    mean = np.float32(moment / mass)
    border = _typical_border(row, maxima, mean, np.float64(typical_p) * mass)
    farthest = -key_value(border)
    last = np.int64(border & _NO_LIMIT)
    for i in range(len(row)):
        far = abs(row[i] - mean)
        row[i] = row[i] if far <= farthest else _DROPPED
    for i in range(last + 1, len(row)):
        if abs(row[i] - mean) == farthest:
            row[i] = _DROPPED
    _, high = fill_maxima(row, maxima)
    largest = key_float(high)
    for values in (row, maxima):
        for i in range(len(values)):
            values[i] = values[i] - largest


@inner_numpy
def _top_k_of_mu(row, maxima, number, mu):  # type: ignore[no-untyped-def]
    """See extended.top_k_of_mu; `number` tokens are left. The result is 0 if nothing is cut."""
    if number < 2:
        return 1
    size = min(MIROSTAT_SAMPLE, number)
    border = border_of(row, maxima, np.float32(0.0), np.float32(1.0), size, 1.0, _DROPPED)
    lowest = key_value(border)
    keys = np.empty(size, np.uint64)
    used = 0
    for c in range(len(maxima)):
        if maxima[c] < lowest:
            continue
        for token in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
            if row[token] >= lowest and used < size:
                key = token_key(row[token], token)
                if key <= border:
                    keys[used] = key
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


@inner_numpy
def _keep_unsurprising(row, maxima, best, number, mirostat, mu, log_mass):  # type: ignore[no-untyped-def]
    if mirostat == 2:
        _cut(row, maxima, np.float32(np.float64(log_mass) - np.float64(mu) * _LN2))
        row[best] = np.float32(0.0)
        maxima[best // CHUNK] = np.float32(0.0)
    else:
        top_k = _top_k_of_mu(row, maxima, number, mu)
        if top_k > 0:
            _keep_up_to(row, maxima, border_of(row, maxima, np.float32(0.0), np.float32(1.0), top_k, 1.0, _DROPPED))


@inner_numpy
def _drop_likeliest(row, maxima, log_threshold):  # type: ignore[no-untyped-def]
    """Apply XTC to a row whose coin triggers it."""
    _, mass, _ = _sums(row, maxima)
    lowest = max(np.float32(np.log(mass) + np.float64(log_threshold)), _LOWEST)
    least = np.float32(np.inf)
    last = -1
    for c in range(len(maxima)):
        if maxima[c] >= lowest:
            for i in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
                if row[i] >= lowest and row[i] <= least:
                    least, last = row[i], i
    for c in range(len(maxima)):
        if maxima[c] >= lowest:
            for i in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
                if row[i] >= lowest and i != last:
                    row[i] = _DROPPED


@inner_numpy
def _top_p(words):  # type: ignore[no-untyped-def]
    return words[TOP_P : TOP_P + 2].view(np.float64)[0]


@inner_numpy
def _extend(row, maxima, words, position, coin):  # type: ignore[no-untyped-def]
    """Filter one row; return the log of its mass if mirostat needs it, else 0.

    `coin` is scratch for one chunk of words.
    """
    log_mass = np.float32(0.0)
    best = argmax(row, maxima)
    if best < 0:
        return log_mass
    highest = row[best]
    lowest = _DROPPED
    if word_float(words[TOP_N_SIGMA]) > 0:
        lowest = _sigma_cut(row, highest, word_float(words[TOP_N_SIGMA]))
    heat = word_float(words[TEMPERATURE])
    reach = word_float(words[DYNATEMP_RANGE])
    if reach > 0:
        if lowest > _DROPPED:
            _cut(row, maxima, lowest)
        heat = _temperature(row, maxima, highest, heat, reach, word_float(words[DYNATEMP_EXPONENT]))
    _scale(row, maxima, highest, heat, lowest)
    if words[MIROSTAT] > 0:
        number, mass, _ = _sums(row, maxima)
        log_mass = np.float32(np.log(mass))
        _keep_unsurprising(row, maxima, best, number, words[MIROSTAT], word_float(words[MIROSTAT_MU]), log_mass)
    else:
        if word_float(words[LOG_MIN_P]) > _DROPPED:
            _cut(row, maxima, word_float(words[LOG_MIN_P]))
        if word_float(words[TYPICAL_P]) < 1.0:
            _keep_typical(row, maxima, word_float(words[TYPICAL_P]))
        top_k, top_p = np.int64(words[TOP_K]), _top_p(words)
        if top_k > 0 or top_p < 1.0:
            border = border_of(row, maxima, np.float32(0.0), np.float32(1.0), top_k, top_p, _DROPPED)
            _keep_up_to(row, maxima, border)
    if words[XTC_COIN] > 0:
        key_low, key_high = np.int64(words[KEY]), np.int64(words[KEY + 1])
        words_of_chunk(0, position, np.int64(words[CHOICE]), _COIN_STREAM, key_low, key_high, coin)
        if np.int64(coin[0] >> np.uint32(8)) < words[XTC_COIN]:
            _drop_likeliest(row, maxima, word_float(words[LOG_XTC_THRESHOLD]))
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
