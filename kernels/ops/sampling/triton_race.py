"""Choice of a token in proportion to weights: the largest weight / -log(u), in registers or over a row of logits.

kernels/ops/speculative/README.md has the definitions. Kernels that call these functions are launched with
enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.sampling.philox import ACCEPT_STREAM, REPLACE_STREAM
from kernels.ops.sampling.triton_filters import (
    candidates_within_border,
    key_of,
    scaled_tokens,
    tokens_within_border,
    value_of,
)
from kernels.ops.sampling.triton_random import NO_TOKEN, philox_words, words_of_ids, words_of_tokens

_ACCEPT = tl.constexpr(ACCEPT_STREAM)
_REPLACE = tl.constexpr(REPLACE_STREAM)
_ULP_OF_UNIFORM = tl.constexpr(2.0**-24)
_ROUNDED_UP = tl.constexpr(1.0 + 2.0**-20)
_MAX_FACTOR = tl.constexpr(2.0**25 * (1.0 + 2.0**-20))
"""Largest factor applied to a weight: -log(u) >= 1 - u >= 2**-25."""


@triton.jit
def accept_number(noise):
    """Return the uniform float64 in (0, 1) that decides whether a draft is accepted."""
    zero = tl.full((), 0, tl.uint32)
    word, _, _, _ = philox_words(zero, noise, _ACCEPT)
    return ((word >> 8).to(tl.float64) + 0.5) * _ULP_OF_UNIFORM


@triton.jit
def race(b_share, b_word, b_token, best, best_id):
    """Return the largest of `best` (float64) and share / -log(u) over a tile, and its id; the lowest id wins a tie.

    Tokens with a share of 0 are ignored. The bound share / (1 - u) needs no logarithm, so a logarithm is computed only
    for
    tokens whose bound reaches the best result so far.
    """
    b_rest = (((b_word ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) + 0.5) * _ULP_OF_UNIFORM
    b_bound = b_share / b_rest * _ROUNDED_UP
    b_bits = b_word.to(tl.int32, bitcast=True)
    bound = tl.max(b_bound, axis=0)
    while (bound.to(tl.float64) >= best) & (bound > 0.0):
        token = tl.min(tl.where(b_bound == bound, b_token, NO_TOKEN), axis=0)
        b_this = (b_bound > 0.0) & (b_token == token)
        share = tl.sum(tl.where(b_this, b_share, 0.0), axis=0)
        word = tl.sum(tl.where(b_this, b_bits, 0), axis=0).to(tl.uint32, bitcast=True)
        uniform = ((word >> 8).to(tl.float64) + 0.5) * _ULP_OF_UNIFORM
        ratio = share.to(tl.float64) / -tl.log(uniform)
        better = (ratio > best) | ((ratio == best) & (token < best_id))
        best = tl.where(better, ratio, best)
        best_id = tl.where(better, token, best_id)
        b_bound = tl.where(b_this, 0.0, b_bound)
        bound = tl.max(b_bound, axis=0)
    return best, best_id


@triton.jit
def residual_weights(b_scaled, b_token, b_in, residual, DRAFTED: tl.constexpr):
    """Return exp(scaled) * inverse of the selected tokens, minus their probability in the draft's distribution.

    `residual` is the tuple (inverse, id of a token that is left out or -1, pointer to the draft's distribution, number
    of tokens in that distribution: all or none).
    """
    inverse, left_out, p_chances, num_chances = residual
    b_share = tl.where(b_in & (b_token != left_out), tl.exp(b_scaled) * inverse, 0.0)
    if DRAFTED:
        b_chance = tl.load(p_chances + b_token, mask=(b_share > 0.0) & (b_token < num_chances), other=0.0)
        b_share = tl.where(b_share > b_chance, b_share - b_chance, 0.0)  # a NaN probability leaves 0
    return b_share


@triton.jit
def first_of_candidates(b_key, b_token, border, equals, vocab, residual, noise, DRAFTED: tl.constexpr):
    """Draw a token if all that pass are in the tile; NO_TOKEN if all shares are 0."""
    b_in = candidates_within_border(b_key, b_token, border, equals, vocab)
    b_share = residual_weights(value_of(b_key), b_token, b_in, residual, DRAFTED)
    b_word = words_of_ids(b_token, noise, _REPLACE)
    none = tl.full((), NO_TOKEN, tl.int32)
    _, best_id = race(b_share, b_word, b_token, tl.full((), 0.0, tl.float64), none)
    return best_id


@triton.jit
def first_of_row(row, border, equals, residual, noise, DRAFTED: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr):
    """Draw a token from the whole row; tiles that cannot win need no random words."""
    best = tl.full((), 0.0, tl.float64)
    best_id = tl.full((), NO_TOKEN, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, row[0], TILE):
        b_token = start + tl.arange(0, TILE)
        b_scaled = scaled_tokens(row, b_token, MASK)
        b_in, seen = tokens_within_border(key_of(b_scaled), border, equals, seen)
        b_share = residual_weights(b_scaled, b_token, b_in, residual, DRAFTED)
        if tl.max(b_share, axis=0).to(tl.float64) * _MAX_FACTOR >= best:
            b_counter = (start // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
            b_word = words_of_tokens(b_counter, noise, _REPLACE)
            best, best_id = race(b_share, b_word, b_token, best, best_id)
    return best_id


@triton.jit
def rank_in_row(row, key, token, MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the number of a row's tokens up to `token` that have the given key."""
    b_count = tl.zeros((TILE,), tl.int32)
    for start in range(0, row[0], TILE):
        b_token = start + tl.arange(0, TILE)
        b_scaled = scaled_tokens(row, b_token, MASK)
        b_count += ((key_of(b_scaled) == key) & (b_token <= token)).to(tl.int32)
    return tl.sum(b_count, axis=0)
