"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and the Gumbel noise made of it.

The definition, which docs/randomness.md states with test vectors, is part of Pelton's interface: the noise of a token
is a pure function of (seed, choice, position, token id).
"""

from __future__ import annotations

import torch

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10
STREAM = 0x504C544E
"""Last word of the counter ("PLTN"); other uses of the generator take another word."""
XTC_STREAM = 0x58544321
"""Of the coin that XTC tosses ("XTC!")."""
ACCEPT_STREAM = 0x41434350
"""Of the number that decides whether a draft is accepted ("ACCP")."""
REPLACE_STREAM = 0x5245504C
"""Of the token that takes the place of a rejected draft ("REPL")."""
MAX_NOISE = 17.4
"""Above the largest noise, -log(-log(1 - 2**-25)) = 17.33."""
_MASK = 0xFFFFFFFF


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Ten rounds on 32-bit words held in int64.

    Args:
        counter: [..., 4] int64.
        key: [..., 2] int64; its leading dimensions are the counter's, or broadcast to them.

    Returns:
        [..., 4] int64.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(NUM_ROUNDS):
        # int64 products wrap around; their 64 bits are those of the unsigned product.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _MASK) ^ c1 ^ k0,
            product_1 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + WEYL_0) & _MASK
        k1 = (k1 + WEYL_1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform_noise(
    key: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, vocab_size: int, stream: int
) -> torch.Tensor:
    """A number in (0, 1) for every token, on a stream: ((word >> 8) + 0.5) / 2**24.

    Args:
        key: [2, S] int64; choice, position: [S] int64.

    Returns:
        [S, vocab_size] float64.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=key.device).expand(key.shape[1], -1)
    streams = torch.full_like(blocks, stream)
    counter = torch.stack(
        (blocks, position.unsqueeze(1).expand_as(blocks), choice.unsqueeze(1).expand_as(blocks), streams), dim=-1
    )
    words = philox4x32(counter, key.t().unsqueeze(1)).flatten(1)[:, :vocab_size]
    return ((words >> 8).double() + 0.5) * 2.0**-24


def gumbel_noise(key: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of every token.

    The largest uniform number would round to 1 in float32, whose noise is infinite; so both logarithms are taken in
    float64, and the result is rounded to float32 once.

    Args:
        key: [2, S] int64; choice, position: [S] int64.

    Returns:
        [S, vocab_size] float32.
    """
    return (-torch.log(-torch.log(uniform_noise(key, choice, position, vocab_size, STREAM)))).float()
