"""Log-probabilities on the CPU, compiled by numba; ids and ranks equal those of reference.py.

One pass finds the largest logit of each chunk of tokens, and another sums exponentials. Ranks and likeliest tokens
need only the chunks whose largest logit is high enough. The functions release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.common.cpu.row_threads import next_row
from kernels.common.cpu.simd import inner_numpy, inner_sums
from kernels.ops.logprobs.reference import LOWEST_LOGPROB
from kernels.ops.sampling.cpu_borders import CHUNK, SHIFT, argmax, exp, num_chunks, options

_LOWEST = np.float32(LOWEST_LOGPROB)
_LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)


@inner_sums
def _log_mass(row, highest):  # type: ignore[no-untyped-def]
    """Return the log of the sum of exp(logit - highest)."""
    mass = 0.0
    for i in range(len(row)):
        mass += np.float64(exp(row[i] - highest))
    return np.log(mass)


@inner_numpy
def _logprob(logit, highest, log_mass):  # type: ignore[no-untyped-def]
    value = np.float32(np.float64(logit - highest) - log_mass)
    return min(max(value, _LOWEST), np.float32(0.0))


@inner_numpy
def _rank(row, maxima, chosen):  # type: ignore[no-untyped-def]
    """Return one plus the number of larger logits."""
    rank = 1
    for c in range(len(maxima)):
        if maxima[c] > chosen:
            for i in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
                rank += row[i] > chosen
    return rank


@inner_numpy
def _order_key(logit, token):  # type: ignore[no-untyped-def]
    """Return a key that sorts by logit in descending order, then by id."""
    # The addition turns -0 into 0.
    bits = np.float32(logit + np.float32(0.0)).view(np.int32)
    upwards = np.uint32(bits) ^ (np.uint32(0x80000000) if bits >= 0 else np.uint32(0xFFFFFFFF))
    return (np.uint64(np.uint32(~upwards)) << SHIFT) | np.uint64(token)


@inner_numpy
def _fill_top(row, maxima, top_ids):  # type: ignore[no-untyped-def]
    """Fill `top_ids` with the likeliest tokens, best first; it is no longer than the row."""
    keys = np.full(len(top_ids), _LAST_KEY, np.uint64)
    last = len(keys) - 1
    for c in range(len(maxima)):
        # An equal logit with a higher id comes later, so the chunk's first id gives its best possible key.
        if _order_key(maxima[c], c * CHUNK) > keys[last]:
            continue
        for token in range(c * CHUNK, min((c + 1) * CHUNK, len(row))):
            key = _order_key(row[token], token)
            if key < keys[last]:
                i = last
                while i > 0 and keys[i - 1] > key:
                    keys[i] = keys[i - 1]
                    i -= 1
                keys[i] = key
    for i in range(len(keys)):
        top_ids[i] = np.int64(keys[i] & np.uint64(0xFFFFFFFF))


@njit(**options)
def logprob_rows(logits, token_ids, claims, logprobs, ranks, top_ids, top_logprobs):  # type: ignore[no-untyped-def]
    """Compute the log-probabilities of the rows that this thread claims, and fill the last four arguments.

    See reference.compute_logprobs. Token ids must not be negative.
    """
    maxima = np.empty(num_chunks(logits.shape[1]), np.float32)
    for _ in range(len(logits)):
        r = next_row(claims)
        if r < 0:
            break
        row = logits[r]
        best = argmax(row, maxima)
        if best < 0:
            logprobs[r] = _LOWEST
            ranks[r] = 1
            for i in range(top_ids.shape[1]):
                top_ids[r, i] = i
                top_logprobs[r, i] = _LOWEST
            continue
        highest = row[best]
        log_mass = _log_mass(row, highest)
        chosen = row[token_ids[r]]
        logprobs[r] = _logprob(chosen, highest, log_mass)
        ranks[r] = _rank(row, maxima, chosen)
        if top_ids.shape[1] > 0:
            _fill_top(row, maxima, top_ids[r])
        for i in range(top_ids.shape[1]):
            top_logprobs[r, i] = _logprob(row[top_ids[r, i]], highest, log_mass)
