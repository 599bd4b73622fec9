"""Interface of quantization schemes: storage of a linear layer's weight, and multiplication by it.

`select` chooses a scheme.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from worker.quant.raw_weight import RawWeight


class LinearScheme(Protocol):
    """Storage and product of one weight [out_features, in_features].

    Attributes:
        input_quantization: Quantization that `apply` expects of its input, known after `after_load`; None for
            none.
    """

    input_quantization: ActivationQuantization | None

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate the storage that `load_rows` fills."""
        ...

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Fill the output features from `start` on with those of `raw`, in `order` ([rows] int64) if given.

        Every output feature is filled once before `after_load`.
        """
        ...

    def after_load(self) -> None:
        """Convert to the kernel's layout, once, and free memory that was needed only for loading."""
        ...

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute [T, in_features] -> [T, out_features] of the same dtype.

        A scheme that was created for unrounded results returns float32.
        """
        ...
