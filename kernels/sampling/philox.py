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


def gumbel_noise(key: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of every token.

    u = ((word >> 8) + 0.5) / 2**24 lies in (0, 1), but in float32 its largest value rounds to 1, whose noise is
    infinite; so both logarithms are taken in float64, and the result is rounded to float32 once.

    Args:
        key: [2, S] int64; choice, position: [S] int64.

    Returns:
        [S, vocab_size] float32.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=key.device).expand(key.shape[1], -1)
    stream = torch.full_like(blocks, STREAM)
    counter = torch.stack(
        (blocks, position.unsqueeze(1).expand_as(blocks), choice.unsqueeze(1).expand_as(blocks), stream), dim=-1
    )
    words = philox4x32(counter, key.t().unsqueeze(1)).flatten(1)[:, :vocab_size]
    uniform = ((words >> 8).double() + 0.5) * 2.0**-24
    return (-torch.log(-torch.log(uniform))).float()
