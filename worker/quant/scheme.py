"""How a linear layer stores its weights and multiplies by them. One scheme a file; `select` picks one."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from worker.quant.raw_weight import RawWeight


class LinearScheme(Protocol):
    """Storage and product of one weight [out_features, in_features].

    Attributes:
        input_quantization: how `apply` wants its input, known after `after_load`; None: as it is.
    """

    input_quantization: ActivationQuantization | None

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocates what `load_rows` fills."""
        ...

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Fills the output features from `start` on with those of `raw`, in `order` ([rows] int64) where it is given.

        Every output feature is filled once before `after_load`.
        """
        ...

    def after_load(self) -> None:
        """Transcodes to the kernel's layout, once; frees what was only needed for loading."""
        ...

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, in_features] -> [T, out_features] of the same dtype, or float32 from a scheme that was told so."""
        ...
