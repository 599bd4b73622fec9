"""The randomness of sampling: from a request's seed to the words that key the noise. docs/randomness.md defines it."""

from __future__ import annotations

from kernels.ops.sampling.philox import STREAM, gumbel_noise, philox4x32

__all__ = ["STREAM", "gumbel_noise", "philox4x32", "seed_words"]


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a signed 64-bit seed (two's complement): the Philox key."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
