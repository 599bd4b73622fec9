"""Order of the tokens of a row without sorting it, and the borders of filters; shared by the compiled CPU kernels.

Tokens are counted in buckets of their scaled logit, and only the bucket that contains a filter's border is sorted.
The functions release the GIL.
"""

from __future__ import annotations

import numpy as np

from kernels.common.cpu.simd import inner_numpy
from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT

SHIFT = np.uint64(32)
CHUNK = 64  # tokens that are processed together
NUM_BUCKETS = 2048
BUCKETS_PER_UNIT = np.float32(64.0)  # the last bucket holds everything 32 or more below the largest
_NO_BORDER = (np.uint64(0x7F7FFFFF) << SHIFT) | np.uint64(0xFFFFFFFF)
_LOG2E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)

options = {"nogil": True, "cache": True, "error_model": "numpy"}


@inner_numpy
def key_range(bits):  # type: ignore[no-untyped-def]
    """Return the smallest and the largest float32 of a row, as int32 keys that compare like the floats.

    Comparisons of floats are not vectorized because of NaN. As keys, positive NaN sorts above +inf and negative NaN
    below -inf.
    """
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for i in range(len(bits)):
        key = np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    return low, high


@inner_numpy
def key_float(key):  # type: ignore[no-untyped-def]
    """Return the float32 of a key of `key_range`."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@inner_numpy
def word_float(word):  # type: ignore[no-untyped-def]
    """Return the float32 with the bits of a 32-bit word."""
    return np.int32(word).view(np.float32)


@inner_numpy
def largest_of(values):  # type: ignore[no-untyped-def]
    """Return the maximum of values without NaN."""
    _, high = key_range(values.view(np.int32))
    return key_float(high)


@inner_numpy
def num_chunks(size):  # type: ignore[no-untyped-def]
    """Return the number of chunks of a row."""
    return (size + CHUNK - 1) // CHUNK


@inner_numpy
def fill_maxima(row, maxima):  # type: ignore[no-untyped-def]
    """Fill `maxima`, [num_chunks] float32, with the largest value of each chunk; return the result of `key_range`."""
    bits = row.view(np.int32)
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    whole = len(row) // CHUNK
    for c in range(whole):
        part = bits[c * CHUNK : (c + 1) * CHUNK]
        least = np.int32(0x7FFFFFFF)
        most = np.int32(-0x80000000)
        # The loop of key_range, which takes four times as long if the compiler does not know the number of values.
        for j in range(CHUNK):
            key = np.int32(part[j] ^ ((part[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            least = min(least, key)
            most = max(most, key)
        maxima[c] = key_float(most)
        low = min(low, least)
        high = max(high, most)
    if whole < len(maxima):
        least, most = key_range(bits[whole * CHUNK :])
        maxima[whole] = key_float(most)
        low = min(low, least)
        high = max(high, most)
    return low, high


@inner_numpy
def argmax(row, maxima):  # type: ignore[no-untyped-def]
    """Return the lowest id of the largest logit, and fill `maxima` as fill_maxima does.

    The result is NOT_USABLE if the row has NaN or +inf, and NOTHING_LEFT if all logits are -inf.
    """
    low, high = fill_maxima(row, maxima)
    minus_infinity = np.int32(-0x7F800001)
    if low < minus_infinity or high >= np.int32(0x7F800000):
        return NOT_USABLE
    if high == minus_infinity:
        return NOTHING_LEFT
    largest = key_float(high)
    for c in range(len(maxima)):
        if maxima[c] == largest:
            for i in range(c * CHUNK, len(row)):
                if row[i] == largest:
                    return i
    return NOT_USABLE


@inner_numpy
def token_key(scaled, token):  # type: ignore[no-untyped-def]
    """Return a key that sorts by scaled logit (<= 0) in descending order, then by id."""
    bits = np.float32(abs(scaled)).view(np.uint32)
    return (np.uint64(bits) << SHIFT) | np.uint64(token)


@inner_numpy
def key_value(key):  # type: ignore[no-untyped-def]
    """Return the scaled logit of a key of `token_key`."""
    return -np.uint32(key >> SHIFT).view(np.float32)


@inner_numpy
def bucket_of(scaled):  # type: ignore[no-untyped-def]
    """Return the bucket of a scaled logit."""
    return np.int32(min(np.float32(-scaled * BUCKETS_PER_UNIT), np.float32(NUM_BUCKETS - 1)))


@inner_numpy
def exp(x):  # type: ignore[no-untyped-def]
    """Compute 2**n * polynomial of the remainder (Cephes' expf), without a call, so that it is vectorized.

    Values below -87 give the result of -87, which is negligible in sums of probabilities.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@inner_numpy
def last_chunk(row, whole):  # type: ignore[no-untyped-def]
    """Return the tokens after the last whole chunk, padded with minus infinity.

    Functions that compute exponentials are called twice, for the whole chunks and for this one. A single call for
    chunks of either kind would double the cost of the exponentials.
    """
    padded = np.empty(CHUNK, np.float32)
    # A loop, because numpy's ways to fill a slice take more than a tenth of a second to compile.
    for i in range(CHUNK):
        token = whole * CHUNK + i
        padded[i] = row[token] if token < len(row) else np.float32(-np.inf)
    return padded


@inner_numpy
def _count_chunks(row, maxima, highest, temperature, lowest, last_bucket, counts, masses):  # type: ignore[no-untyped-def]
    weights = np.empty(CHUNK, np.float32)
    buckets = np.empty(CHUNK, np.int32)
    for c in range(len(maxima)):
        largest = (maxima[c] - highest) / temperature
        if largest < lowest or bucket_of(largest) > last_bucket:
            continue
        part = row[c * CHUNK : (c + 1) * CHUNK]
        for i in range(CHUNK):
            weights[i] = exp((part[i] - highest) / temperature)
        for i in range(CHUNK):
            buckets[i] = bucket_of((part[i] - highest) / temperature)
        for i in range(CHUNK):
            if (part[i] - highest) / temperature >= lowest and buckets[i] <= last_bucket:
                counts[buckets[i]] += 1
                masses[buckets[i]] += weights[i]


@inner_numpy
def count_buckets(row, maxima, highest, temperature, lowest, last_bucket, counts, masses):  # type: ignore[no-untyped-def]
    """Count the tokens at or above `lowest` by bucket, up to the last bucket, and sum their probability mass.

    The mass of the largest token is 1.
    """
    whole = len(row) // CHUNK
    _count_chunks(row, maxima[:whole], highest, temperature, lowest, last_bucket, counts, masses)
    if whole < len(maxima):
        rest = last_chunk(row, whole)
        _count_chunks(rest, maxima[whole:], highest, temperature, lowest, last_bucket, counts, masses)


@inner_numpy
def sort_keys(keys):  # type: ignore[no-untyped-def]
    """Sort in place, best first.

    A shell sort is enough for few keys; numpy's sorts take seconds to compile.
    """
    gap = 1
    while gap < len(keys) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, len(keys)):
            key = keys[i]
            j = i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
        gap //= 3


@inner_numpy
def sorted_bucket(row, maxima, highest, temperature, lowest, bucket, count):  # type: ignore[no-untyped-def]
    """Return the keys of the tokens of one bucket, best first."""
    keys = np.empty(count, np.uint64)
    used = 0
    for c in range(len(maxima)):
        largest = (maxima[c] - highest) / temperature
        if largest < lowest or bucket_of(largest) > bucket:
            continue
        for token in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
            s = (row[token] - highest) / temperature
            if s >= lowest and bucket_of(s) == bucket:
                keys[used] = token_key(s, token)
                used += 1
    sort_keys(keys[:used])
    return keys[:used]


@inner_numpy
def bucket_of_top_k(maxima, highest, temperature, top_k, counts):  # type: ignore[no-untyped-def]
    """Return a bucket that is not before the bucket of the k-th token: the bucket of the k-th largest chunk maximum."""
    for c in range(len(maxima)):
        counts[bucket_of((maxima[c] - highest) / temperature)] += 1
    reached = 0
    for bucket in range(NUM_BUCKETS):
        reached += counts[bucket]
        counts[bucket] = 0
        if reached >= top_k:
            counts[bucket:] = 0
            return bucket
    return NUM_BUCKETS - 1


@inner_numpy
def masked_row(logits, mask, mask_rows, r, masked):  # type: ignore[no-untyped-def]
    """Return row `r` of the logits; if it has a mask, apply it in the buffer `masked`."""
    row = logits[r]
    if mask_rows[r] >= 0:
        mask_row(row, mask[mask_rows[r]], masked)
        row = masked
    return row


@inner_numpy
def row_border(row, maxima, highest, temperature, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    """Return the key of the last token that passes the filters, without buckets if only min_p applies."""
    if top_k > 0 or top_p < 1.0:
        return border_of(row, maxima, highest, temperature, top_k, top_p, log_min_p)
    if log_min_p > np.float32(-np.inf):
        return token_key(log_min_p, np.uint64(0xFFFFFFFF))
    return _NO_BORDER


@inner_numpy
def border_of(row, maxima, highest, temperature, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    """Return the key of the last token that passes the filters; `maxima` is filled by `argmax`."""
    counts = np.zeros(NUM_BUCKETS, np.int64)
    masses = np.zeros(NUM_BUCKETS, np.float64)
    # A token at -inf is never kept, because it has no probability.
    lowest = max(log_min_p, np.float32(-3.0e38))
    last_bucket = NUM_BUCKETS - 1
    if 0 < top_k <= len(row) // CHUNK:
        last_bucket = bucket_of_top_k(maxima, highest, temperature, top_k, counts)
    count_buckets(row, maxima, highest, temperature, lowest, last_bucket, counts, masses)
    last_key = token_key(lowest, np.uint64(0xFFFFFFFF))
    total = 0.0
    kept = 0
    for bucket in range(NUM_BUCKETS):
        if top_k > 0 and kept + counts[bucket] >= top_k:
            keys = sorted_bucket(row, maxima, highest, temperature, lowest, bucket, counts[bucket])
            last_key = keys[top_k - kept - 1]
            for i in range(top_k - kept):
                total += np.exp(np.float64(key_value(keys[i])))
            break
        kept += counts[bucket]
        total += masses[bucket]
    if top_p >= 1.0:
        return last_key
    target = top_p * total
    reached = 0.0
    for bucket in range(NUM_BUCKETS):
        if counts[bucket] > 0 and reached + masses[bucket] >= target:
            keys = sorted_bucket(row, maxima, highest, temperature, lowest, bucket, counts[bucket])
            for i in range(len(keys)):
                reached += np.exp(np.float64(key_value(keys[i])))
                if reached >= target or i == len(keys) - 1:
                    return min(last_key, keys[i])
        reached += masses[bucket]
    return last_key


@inner_numpy
def mask_row(row, words, result):  # type: ignore[no-untyped-def]
    """Copy the row with minus infinity where the mask has no bit; `result` may be the row itself."""
    for token in range(len(row)):
        bit = (np.uint32(words[token // 32]) >> np.uint32(token % 32)) & np.uint32(1)
        result[token] = row[token] if bit else np.float32(-np.inf)
