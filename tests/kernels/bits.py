"""Results that must not depend on the batch: bit for bit on a GPU."""

from __future__ import annotations

import torch

from kernels.common.tolerances import TOLERANCES


def assert_same_bits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """In the interpreter nearly so: numpy sums a row of a product by where it lies in its tile, on some processors."""
    if actual.is_cuda:
        assert torch.equal(actual, wanted)
        return
    relative, absolute = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, wanted, rtol=relative, atol=absolute)
