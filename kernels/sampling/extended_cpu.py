"""The rarer filters on the CPU, compiled by numba; README.md has the maths, extended.py is the reference.

No row is sorted: borders are found from buckets, as in cpu.py. Sums run in lanes of a fixed width, so that they are
vectorized and yet always in the same order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.inner import inner_numpy
from kernels.sampling.cpu import words_of_chunk
from kernels.sampling.cpu_borders import (
    BUCKETS_PER_UNIT,
    CHUNK,
    NUM_BUCKETS,
    allowed_row,
    argmax,
    border_of,
    exp,
    key_value,
    largest_of,
    options,
    sort_keys,
    token_key,
)
from kernels.sampling.extended import MIN_SLOPE, MIN_TEMPERATURE, MIROSTAT_SAMPLE
from kernels.sampling.philox import XTC_STREAM

_DROPPED = np.float32(-np.inf)
_LOWEST = np.float32(-3.4028235e38)
_LN2 = float(np.log(2.0))
_NO_LIMIT = np.uint64(0xFFFFFFFF)
_COIN_STREAM = np.uint32(XTC_STREAM)


@inner_numpy
def _sums(row):  # type: ignore[no-untyped-def]
    """Of what is left of a row whose largest value is 0: number, sum of exp, and sum of exp times value."""
    counts = np.zeros(CHUNK, np.int32)
    masses = np.zeros(CHUNK, np.float64)
    moments = np.zeros(CHUNK, np.float64)
    padded = np.empty(CHUNK, np.float32)
    for first in range(0, len(row), CHUNK):
        part = row[first : first + CHUNK]
        if largest_of(part) == _DROPPED:
            continue
        if len(part) < CHUNK:
            padded[:] = _DROPPED
            padded[: len(part)] = part
            part = padded
        for j in range(CHUNK):
            s = part[j]
            there = np.int32(s >= _LOWEST)
            weight = exp(s) * np.float32(there)
            counts[j] += there
            masses[j] += np.float64(weight)
            moments[j] += np.float64(weight) * np.float64(max(s, np.float32(-87.0)))
    count, mass, moment = 0, 0.0, 0.0
    for j in range(CHUNK):
        count += counts[j]
        mass += masses[j]
        moment += moments[j]
    return count, mass, moment


@inner_numpy
def _sigma_cut(row, highest, top_n_sigma):  # type: ignore[no-untyped-def]
    """The smallest logit within so many standard deviations of the largest."""
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
def _scale(row, highest, temperature, lowest):  # type: ignore[no-untyped-def]
    """(logit - highest) / temperature in place; logits below `lowest` are dropped."""
    for i in range(len(row)):
        s = (row[i] - highest) / temperature
        row[i] = s if row[i] >= lowest else _DROPPED


@inner_numpy
def _cut(row, lowest):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        row[i] = row[i] if row[i] >= lowest else _DROPPED


@inner_numpy
def _temperature(row, highest, temperature, reach, exponent):  # type: ignore[no-untyped-def]
    """By the entropy of the row at temperature 1."""
    shifted = np.empty(len(row), np.float32)
    for i in range(len(row)):
        shifted[i] = row[i] - highest
    count, mass, moment = _sums(shifted)
    share = 0.0
    if count > 1:
        share = min(max((np.log(mass) - moment / mass) / np.log(float(count)), 0.0), 1.0)
    low = max(float(temperature) - float(reach), 0.0)
    high = float(temperature) + float(reach)
    return np.float32(max(low + (high - low) * share ** float(exponent), MIN_TEMPERATURE))


@inner_numpy
def _keep_up_to(row, border):  # type: ignore[no-untyped-def]
    """Drops what comes after a key in order."""
    lowest = key_value(border)
    last = np.int64(border & _NO_LIMIT)
    _cut(row, lowest)
    for i in range(last + 1, len(row)):
        if row[i] == lowest:
            row[i] = _DROPPED


@inner_numpy
def _typical_border(row, mean, target):  # type: ignore[no-untyped-def]
    """The key, by distance from the mean, of the token with which the mass reaches the target."""
    masses = np.zeros(NUM_BUCKETS, np.float64)
    counts = np.zeros(NUM_BUCKETS, np.int64)
    weights = np.empty(CHUNK, np.float32)
    buckets = np.empty(CHUNK, np.int32)
    for first in range(0, len(row), CHUNK):
        part = row[first : first + CHUNK]
        if largest_of(part) == _DROPPED:
            continue
        for j in range(len(part)):
            weights[j] = exp(part[j])
            far = min(abs(part[j] - mean) * BUCKETS_PER_UNIT, np.float32(NUM_BUCKETS - 1))
            buckets[j] = np.int32(far)
        for j in range(len(part)):
            if part[j] > _DROPPED:
                masses[buckets[j]] += np.float64(weights[j])
                counts[buckets[j]] += 1
    reached, up_to = 0.0, 0.0
    chosen = 0
    for bucket in range(NUM_BUCKETS):
        if counts[bucket] > 0:
            chosen, reached = bucket, up_to
            up_to += masses[bucket]
            if up_to >= target:
                break
    keys = np.empty(counts[chosen], np.uint64)
    used = 0
    for token in range(len(row)):
        if row[token] > _DROPPED:
            far = min(abs(row[token] - mean) * BUCKETS_PER_UNIT, np.float32(NUM_BUCKETS - 1))
            if np.int32(far) == chosen and used < len(keys):
                keys[used] = token_key(row[token] - mean, token)
                used += 1
    sort_keys(keys)
    for i in range(len(keys)):
        reached += np.float64(exp(row[np.int64(keys[i] & _NO_LIMIT)]))
        if reached >= target:
            return keys[i]
    return keys[len(keys) - 1]


@inner_numpy
def _keep_typical(row, typical_p):  # type: ignore[no-untyped-def]
    _, mass, moment = _sums(row)
    mean = np.float32(moment / mass)
    border = _typical_border(row, mean, np.float64(typical_p) * mass)
    farthest = -key_value(border)
    last = np.int64(border & _NO_LIMIT)
    for i in range(len(row)):
        far = abs(row[i] - mean)
        row[i] = row[i] if far <= farthest else _DROPPED
    for i in range(last + 1, len(row)):
        if abs(row[i] - mean) == farthest:
            row[i] = _DROPPED
    largest = largest_of(row)
    for i in range(len(row)):
        row[i] = row[i] - largest


@inner_numpy
def _top_k_of_mu(row, mu):  # type: ignore[no-untyped-def]
    """See extended.top_k_of_mu; 0 where nothing is cut."""
    number = 0
    for i in range(len(row)):
        number += row[i] > _DROPPED
    if number < 2:
        return 1
    size = min(MIROSTAT_SAMPLE, number)
    border = border_of(row, np.float32(0.0), np.float32(1.0), size, 1.0, _DROPPED)
    lowest = key_value(border)
    keys = np.empty(size, np.uint64)
    used = 0
    for token in range(len(row)):
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
def _keep_unsurprising(row, best, mirostat, mu, log_mass):  # type: ignore[no-untyped-def]
    if mirostat == 2:
        _cut(row, np.float32(np.float64(log_mass) - np.float64(mu) * _LN2))
        row[best] = np.float32(0.0)
    else:
        top_k = _top_k_of_mu(row, mu)
        if top_k > 0:
            _keep_up_to(row, border_of(row, np.float32(0.0), np.float32(1.0), top_k, 1.0, _DROPPED))


@inner_numpy
def _drop_likeliest(row, log_threshold):  # type: ignore[no-untyped-def]
    """XTC of a row for which the coin has fallen."""
    _, mass, _ = _sums(row)
    lowest = max(np.float32(np.log(mass) + np.float64(log_threshold)), _LOWEST)
    least = np.float32(np.inf)
    last = -1
    for first in range(0, len(row), CHUNK):
        if largest_of(row[first : first + CHUNK]) >= lowest:
            for i in range(first, min(first + CHUNK, len(row))):
                if row[i] >= lowest and row[i] <= least:
                    least, last = row[i], i
    for first in range(0, len(row), CHUNK):
        if largest_of(row[first : first + CHUNK]) >= lowest:
            for i in range(first, min(first + CHUNK, len(row))):
                if row[i] >= lowest and i != last:
                    row[i] = _DROPPED


@njit(**options)
def extend_rows(  # type: ignore[no-untyped-def]
    logits, rows, temperature, log_min_p, top_k, top_p, typical_p, top_n_sigma, dynatemp_range, dynatemp_exponent,
    mirostat, mu, xtc_coin, log_xtc_threshold, key, position, choice, mask, mask_rows, start, end, log_masses,
):  # fmt: skip
    """extended.extend of rows[start:end]; the arguments are the fields of ExtendInputs."""
    words = np.empty(CHUNK, np.uint32)
    for e in range(start, end):
        row = logits[rows[e]]
        if mask_rows[e] >= 0:
            row[:] = allowed_row(row, mask[mask_rows[e]])
        best = argmax(row)
        if best < 0:
            continue
        highest = row[best]
        lowest = _DROPPED
        if top_n_sigma[e] > 0:
            lowest = _sigma_cut(row, highest, top_n_sigma[e])
        heat = temperature[e]
        if dynatemp_range[e] > 0:
            _cut(row, lowest)
            heat = _temperature(row, highest, heat, dynatemp_range[e], dynatemp_exponent[e])
        _scale(row, highest, heat, lowest)
        if mirostat[e] > 0:
            _, mass, _ = _sums(row)
            log_masses[e] = np.float32(np.log(mass))
            _keep_unsurprising(row, best, mirostat[e], mu[e], log_masses[e])
        else:
            if log_min_p[e] > _DROPPED:
                _cut(row, log_min_p[e])
            if typical_p[e] < 1.0:
                _keep_typical(row, typical_p[e])
            if top_k[e] > 0 or top_p[e] < 1.0:
                border = border_of(row, np.float32(0.0), np.float32(1.0), top_k[e], top_p[e], _DROPPED)
                _keep_up_to(row, border)
        if xtc_coin[e] > 0:
            words_of_chunk(0, position[e], choice[e], _COIN_STREAM, key[0, e], key[1, e], words)
            if np.int64(words[0] >> np.uint32(8)) < xtc_coin[e]:
                _drop_likeliest(row, log_xtc_threshold[e])
