"""Interface of quantization schemes, and the choice of a scheme for a linear layer; the only place that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.linear_panels.cpu import Result
from shared.errors import ConfigurationError
from worker.quant.dense import DenseScheme, InvariantScheme
from worker.quant.eight_bit import Fp8Scheme, Int8Scheme
from worker.quant.onednn_packed import OneDNNPackedScheme, packed_linears_supported
from worker.quant.panels import PanelScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.weight_only import WeightOnlyScheme


class LinearScheme(Protocol):
    """Storage and product of one weight [out_features, in_features].

    Attributes:
        input_quantization: Quantization that `apply` expects of its input, known after `after_load`; None for
            none.
    """

    input_quantization: ActivationQuantization | None

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate the storage that `load_rows` fills."""

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Fill the output features from `start` on with those of `raw`, in `order` ([rows] int64) if given.

        Every output feature is filled once before `after_load`.
        """

    def after_load(self) -> None:
        """Convert to the kernel's layout, once, and free memory that was needed only for loading."""

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute [T, in_features] -> [T, out_features] of the same dtype.

        A scheme that was created for unrounded results returns float32.
        """


def linear_scheme(
    dtype: torch.dtype,
    device: torch.device,
    raws: Sequence[RawWeight] = (),
    *,
    deterministic: bool = False,
    unrounded: bool = False,
) -> LinearScheme:
    """Return the fastest scheme for a layer.

    Args:
        dtype: Dtype of the activations, and of dense weights.
        device: Device of the weights.
        raws: Parts that will be loaded.
        deterministic: The result of a row must not depend on the batch.
        unrounded: Return float32 results if the scheme supports it.

    Raises:
        ConfigurationError: Deterministic mode is requested but not available.
    """
    if device.type == "cpu":
        if PanelScheme.accepts(dtype, raws):
            return PanelScheme(raws, result=Result.FLOAT32 if unrounded else Result.BFLOAT16, fixed=deterministic)
        if deterministic:
            raise ConfigurationError(
                "--deterministic on the CPU needs --dtype bfloat16, a processor with AVX512-BF16, and layers whose "
                "inputs are a multiple of 32"
            )
        return OneDNNPackedScheme(dtype) if packed_linears_supported(dtype) else DenseScheme(dtype, device)
    if WeightOnlyScheme.accepts(dtype, raws):
        return WeightOnlyScheme(dtype, device, raws, fixed=deterministic)
    if Fp8Scheme.accepts(dtype, raws):
        return Fp8Scheme(dtype, device, raws, fixed=deterministic)
    if Int8Scheme.accepts(dtype, raws):
        return Int8Scheme(dtype, device)
    return InvariantScheme(dtype, device) if deterministic else DenseScheme(dtype, device)
