"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and Gumbel noise made from it.

docs/randomness.md states the definition with test vectors. It is part of Pelton's interface: the noise of a token is a
pure function of (seed, choice, position, token id).
"""

from __future__ import annotations

import torch

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10
STREAM = 0x504C544E
"""Last word of the counter ("PLTN"); each use of the generator has its own word."""
XTC_STREAM = 0x58544321
"""Stream of the coin that XTC tosses ("XTC!")."""
ACCEPT_STREAM = 0x41434350
"""Stream of the number that decides whether a draft is accepted ("ACCP")."""
REPLACE_STREAM = 0x5245504C
"""Stream of the token that replaces a rejected draft ("REPL")."""
MAX_NOISE = 17.4
"""Upper bound of the noise; the largest noise is -log(-log(1 - 2**-25)) = 17.33."""
_MASK = 0xFFFFFFFF


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Run ten rounds on 32-bit words held in int64.

    Args:
        counter: [..., 4] int64.
        key: [..., 2] int64; its leading dimensions equal those of `counter` or broadcast to them.

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
    """Return a uniform number in (0, 1) for every token on a stream: ((word >> 8) + 0.5) / 2**24.

    Args:
        key: [2, S] int64.
        choice: [S] int64.
        position: [S] int64.
        vocab_size: Number of tokens.
        stream: Last word of the counter.

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
    """Return standard Gumbel noise for every token.

    In float32 the largest uniform number would round to 1, whose noise is infinite. Both logarithms are therefore
    computed in float64, and the result is rounded to float32 once.

    Args:
        key: [2, S] int64.
        choice: [S] int64.
        position: [S] int64.
        vocab_size: Number of tokens.

    Returns:
        [S, vocab_size] float32.
    """
    return (-torch.log(-torch.log(uniform_noise(key, choice, position, vocab_size, STREAM)))).float()
