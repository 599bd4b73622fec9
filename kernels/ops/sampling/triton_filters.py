"""Borders at which min_p, top_k and top_p cut a row of logits, found without a sort by bisecting an interval of keys.

The key of a token is the bits of -scaled as an integer, with scaled = (logit - largest) / temperature <= 0. Keys order
the tokens from the likeliest down. A border is a key and the number of tokens with this key that pass, lowest ids
first. kernels/ops/sampling/README.md has the definitions. `row` is the tuple (vocabulary size, pointer to the logits,
pointer to the mask, number of tokens that the mask covers, largest logit, temperature) of a row, and `noise` that of
triton_random.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.sampling.triton_random import NO_TOKEN, noisy_best, words_of_ids, words_of_tokens

ALL = tl.constexpr(2**31 - 1)
"""Larger than every key; as a number of equal tokens, all of them."""
_MINUS_INFINITY = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-3.0e38)
_MANY = tl.constexpr(1.0e9)


@triton.jit
def masked_logits(p_row, p_words, masked, vocab, b_token, MASK: tl.constexpr):
    """Load logits of tokens, minus infinity beyond the vocabulary and where the grammar's mask has no bit.

    `masked` is the number of tokens that the mask covers: all or none.
    """
    b_inside = b_token < vocab
    b_logit = tl.load(p_row + b_token, mask=b_inside, other=_MINUS_INFINITY)
    if MASK:
        b_word = tl.load(p_words + b_token // 32, mask=b_token < masked, other=-1)
        b_logit = tl.where((b_word >> (b_token % 32)) & 1 != 0, b_logit, _MINUS_INFINITY)
    return b_logit


@triton.jit
def scaled_tokens(row, b_token, MASK: tl.constexpr):
    """Return the scaled logits of tokens."""
    vocab, p_row, p_words, masked, highest, temperature = row
    return tl.div_rn(masked_logits(p_row, p_words, masked, vocab, b_token, MASK) - highest, temperature)


@triton.jit
def key_of(scaled):
    """Return the key of a scaled logit, or of a tile of them."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def value_of(key):
    """Return the scaled logit of a key."""
    return -key.to(tl.float32, bitcast=True)


@triton.jit
def last_key(log_min_p):
    """Return the last key that passes min_p; tokens without probability never pass."""
    return key_of(tl.maximum(log_min_p, _LOWEST))


@triton.jit
def cut_of(b_key, limit, CAPACITY: tl.constexpr):
    """Return a key up to which a tile has at most CAPACITY tokens.

    The number is at least CAPACITY // 2 if enough keys differ.
    """
    low = tl.full((), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    high = limit
    while (high - low > 1) & (count < CAPACITY // 2):
        middle = low + (high - low) // 2
        up_to = tl.sum((b_key <= middle).to(tl.int32), axis=0)
        fits = up_to <= CAPACITY
        low = tl.where(fits, middle, low)
        count = tl.where(fits, up_to, count)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def tile_border(b_key, b_weight, high, target):
    """Return the smallest key up to which the weights of a tile reach `target`, and the float64 sum before it.

    The weights up to `high` must reach the target.
    """
    low = tl.full((), -1, tl.int32)
    below = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = low + (high - low) // 2
        total = tl.sum(tl.where(b_key <= middle, b_weight, 0.0), axis=0)
        reached = total.to(tl.float64) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
        below = tl.where(reached, below, total)
    return high, below.to(tl.float64)


@triton.jit
def row_sums(row, first, second, third, by_mass, MASK: tl.constexpr, TILE: tl.constexpr):
    """Return float64 counts, or masses relative to the likeliest token, of a row's tokens up to each of three keys."""
    b_first = tl.zeros((TILE,), tl.float32)
    b_second = tl.zeros((TILE,), tl.float32)
    b_third = tl.zeros((TILE,), tl.float32)
    for start in range(0, row[0], TILE):
        b_scaled = scaled_tokens(row, start + tl.arange(0, TILE), MASK)
        b_key = key_of(b_scaled)
        b_weight = tl.where(by_mass, tl.exp(b_scaled), 1.0)
        b_first += tl.where(b_key <= first, b_weight, 0.0)
        b_second += tl.where(b_key <= second, b_weight, 0.0)
        b_third += tl.where(b_key <= third, b_weight, 0.0)
    return (
        tl.sum(b_first, axis=0).to(tl.float64),
        tl.sum(b_second, axis=0).to(tl.float64),
        tl.sum(b_third, axis=0).to(tl.float64),
    )


@triton.jit
def row_border(row, low, high, below, target, by_mass, MASK: tl.constexpr, TILE: tl.constexpr):
    """Find the border as tile_border does, over the whole row; each pass leaves a quarter of the interval.

    The sum up to `low` is `below`, which is less than `target`.
    """
    while high - low > 1:
        quarter = tl.maximum((high - low) // 4, 1)
        first = low + quarter
        second = low + (high - low) // 2
        third = high - quarter
        up_to_first, up_to_second, up_to_third = row_sums(row, first, second, third, by_mass, MASK, TILE)
        in_first = up_to_first >= target
        in_second = up_to_second >= target
        in_third = up_to_third >= target
        high = tl.where(in_first, first, tl.where(in_second, second, tl.where(in_third, third, high)))
        low = tl.where(in_first, low, tl.where(in_second, first, tl.where(in_third, second, third)))
        up_to_low = tl.where(in_second, up_to_first, tl.where(in_third, up_to_second, up_to_third))
        below = tl.where(in_first, below, up_to_low)
    return high, below


@triton.jit
def equals_needed(target, below, key):
    """Return how many tokens of one key, at least one, raise the mass from `below` to `target`."""
    weight = tl.exp(value_of(key)).to(tl.float64)
    needed = tl.ceil((target - below) / tl.where(weight > 0.0, weight, 1.0))
    needed = tl.where(weight > 0.0, needed, _MANY)  # a key without mass is the last that passes
    return tl.minimum(tl.maximum(needed, 1.0), _MANY).to(tl.int32)


@triton.jit
def id_of_rank(b_in, b_token, rank, vocab):
    """Return the id of the token with the given rank (from 1), by id, among the selected tokens of a tile."""
    low = tl.full((), -1, tl.int32)
    high = vocab - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((b_in & (b_token <= middle)).to(tl.int32), axis=0) >= rank
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def filter_border(row, top_k, top_p, limit, reach, count, mass, b_key, MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the last key that passes top_k and top_p, and how many tokens with this key pass.

    `count` tokens of the row, with a total of `mass`, pass min_p. The tile holds all keys of the row up to `reach`.
    """
    b_known = b_key <= reach
    b_weight = tl.where(b_known, tl.exp(value_of(b_key)), 0.0)
    num_known = tl.sum(b_known.to(tl.int32), axis=0)
    mass_known = tl.sum(b_weight, axis=0).to(tl.float64)
    border = limit
    equals = tl.full((), ALL, tl.int32)
    if (top_k > 0) & (top_k < count):
        wanted = top_k.to(tl.float64)
        if top_k <= num_known:
            border, below = tile_border(b_key, b_known.to(tl.float32), reach, wanted)
        else:
            border, below = row_border(row, reach, limit, num_known.to(tl.float64), wanted, False, MASK, TILE)
        equals = (wanted - below).to(tl.int32)
        if border <= reach:
            smaller = tl.sum(tl.where(b_key < border, b_weight, 0.0), axis=0).to(tl.float64)
        else:
            last = border - 1
            smaller, _, _ = row_sums(row, last, last, last, True, MASK, TILE)
        mass = smaller + equals.to(tl.float64) * tl.exp(value_of(border)).to(tl.float64)
    if top_p < 1.0:
        target = top_p * mass
        if (border <= reach) | (mass_known >= target):
            last, below = tile_border(b_key, b_weight, tl.minimum(border, reach), target)
        else:
            last, below = row_border(row, reach, border, mass_known, target, True, MASK, TILE)
        needed = equals_needed(target, below, last)
        equals = tl.where(last < border, needed, tl.minimum(needed, equals))
        border = last
    return border, equals


@triton.jit
def passing_mass(row, border, equals, limit, reach, mass, b_key, MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the float64 mass of a row's tokens up to a border.

    `mass` is the mass of all tokens up to `limit`. The tile holds all keys up to `reach`.
    """
    if (border < limit) | (equals < ALL):
        # At most `equals` of the tokens at the border pass; there may be fewer of them.
        if border <= reach:
            b_mass = tl.exp(value_of(b_key))
            below = tl.sum(tl.where(b_key < border, b_mass, 0.0), axis=0).to(tl.float64)
            at_border = tl.sum(tl.where(b_key == border, b_mass, 0.0), axis=0).to(tl.float64)
        else:
            below, up_to, _ = row_sums(row, border - 1, border, border, True, MASK, TILE)
            at_border = up_to - below
        passing = equals.to(tl.float64) * tl.exp(value_of(border)).to(tl.float64)
        mass = below + tl.minimum(passing, at_border)
    return mass


@triton.jit
def tokens_within_border(b_key, border, equals, seen):
    """Return which tokens of a row's next tile pass the border, and the number of tokens at the border so far."""
    b_equal = (b_key == border).to(tl.int32)
    b_rank = seen + tl.cumsum(b_equal, axis=0)
    return (b_key < border) | ((b_key == border) & (b_rank <= equals)), seen + tl.sum(b_equal, axis=0)


@triton.jit
def candidates_within_border(b_key, b_token, border, equals, vocab):
    """Return which tokens of a tile in any order pass a border, all of whose tokens are in the tile."""
    b_equal = b_key == border
    last_id = vocab
    if equals < tl.sum(b_equal.to(tl.int32), axis=0):
        last_id = id_of_rank(b_equal, b_token, equals, vocab)
    return (b_key < border) | (b_equal & (b_token <= last_id))


@triton.jit
def best_of_row(row, border, equals, noise, MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the best noisy token up to a border, searching the whole row."""
    best = tl.full((), _MINUS_INFINITY, tl.float32)
    best_id = tl.full((), NO_TOKEN, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, row[0], TILE):
        b_token = start + tl.arange(0, TILE)
        b_scaled = scaled_tokens(row, b_token, MASK)
        b_in, seen = tokens_within_border(key_of(b_scaled), border, equals, seen)
        b_counter = (start // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
        b_word = words_of_tokens(b_counter, noise)
        best, best_id = noisy_best(b_scaled, b_word, b_token, b_in, best, best_id)
    return best_id


@triton.jit
def best_of_candidates(b_key, b_token, border, equals, vocab, noise):
    """Return the best noisy token up to a border, all of whose tokens are in the tile."""
    b_in = candidates_within_border(b_key, b_token, border, equals, vocab)
    b_word = words_of_ids(b_token, noise)
    none = tl.full((), NO_TOKEN, tl.int32)
    _, best_id = noisy_best(value_of(b_key), b_word, b_token, b_in, tl.full((), _MINUS_INFINITY, tl.float32), none)
    return best_id
