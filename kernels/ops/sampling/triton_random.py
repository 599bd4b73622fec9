"""Philox and Gumbel noise in Triton, bit for bit as docs/randomness.md defines them.

Kernels that call these functions are launched with enable_fp_fusion=False. `noise` is the tuple (position, choice, low
and high word of the key) of a row, all uint32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.sampling import philox

_M0 = tl.constexpr(philox.MULTIPLIER_0)
_M1 = tl.constexpr(philox.MULTIPLIER_1)
_W0 = tl.constexpr(philox.WEYL_0)
_W1 = tl.constexpr(philox.WEYL_1)
_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)
_STREAM = philox.STREAM
_ULP_OF_UNIFORM = tl.constexpr(2.0**-24)
_ULP_OF_MANTISSA = tl.constexpr(2.0**-23)
_MINUS_LN2 = tl.constexpr(-0.6931472)
_LOG2_BIAS = tl.constexpr(151.001)
NO_TOKEN = tl.constexpr(2**31 - 1)
_MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def philox_words(b_counter, noise, STREAM: tl.constexpr = _STREAM):
    """Return the four uint32 words of each uint32 counter."""
    c0 = b_counter
    c1, c2, k0, k1 = noise
    c3 = tl.full((), STREAM, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + _W0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_of_tokens(b_counter, noise, STREAM: tl.constexpr = _STREAM):
    """Return the words of consecutive tokens, four from each counter."""
    w0, w1, w2, w3 = philox_words(b_counter, noise, STREAM)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of_ids(b_token, noise, STREAM: tl.constexpr = _STREAM):
    """Return the words of arbitrary tokens."""
    w0, w1, w2, w3 = philox_words((b_token // 4).to(tl.uint32), noise, STREAM)
    b_low = tl.where(b_token % 2 == 0, w0, w1)
    b_high = tl.where(b_token % 2 == 0, w2, w3)
    return tl.where(b_token % 4 < 2, b_low, b_high)


@triton.jit
def gumbel(word):
    """Return the noise of a word, using two float64 logarithms."""
    uniform = ((word >> 8).to(tl.float64) + 0.5) * _ULP_OF_UNIFORM
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel_bound(b_word):
    """Return an upper bound of the noise of each word without a logarithm; it is close where the noise is large.

    -log(-log(u)) <= -log(1 - u). Exponent and linear mantissa give a lower bound of log2(1 - u).
    """
    b_rest = ((b_word ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) + 0.5
    b_log2 = b_rest.to(tl.int32, bitcast=True).to(tl.float32) * _ULP_OF_MANTISSA - _LOG2_BIAS
    return b_log2 * _MINUS_LN2


@triton.jit
def noisy_best(b_scaled, b_word, b_token, b_in, best, best_id):
    """Return the largest of `best` and scaled + noise over the selected tokens of a tile; the lowest id wins a tie.

    Noise is computed only for tokens whose bound reaches the best result so far, usually one or two per tile.
    """
    b_bound = tl.where(b_in, b_scaled + gumbel_bound(b_word), _MINUS_INFINITY)
    b_bits = b_word.to(tl.int32, bitcast=True)
    bound = tl.max(b_bound, axis=0)
    while (bound >= best) & (bound > _MINUS_INFINITY):
        token = tl.min(tl.where(b_bound == bound, b_token, NO_TOKEN), axis=0)
        b_this = b_in & (b_token == token)
        scaled = tl.sum(tl.where(b_this, b_scaled, 0.0), axis=0)
        word = tl.sum(tl.where(b_this, b_bits, 0), axis=0).to(tl.uint32, bitcast=True)
        noisy = scaled + gumbel(word)
        better = (noisy > best) | ((noisy == best) & (token < best_id))
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, token, best_id)
        b_bound = tl.where(b_this, _MINUS_INFINITY, b_bound)
        bound = tl.max(b_bound, axis=0)
    return best, best_id
