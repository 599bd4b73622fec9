"""The choice of a scheme for a linear layer; the only place that makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops.linear_panels.cpu import Result
from shared.errors import ConfigurationError
from worker.quant.dense import DenseScheme
from worker.quant.fp8 import Fp8Scheme
from worker.quant.int8 import Int8Scheme
from worker.quant.invariant import InvariantScheme
from worker.quant.onednn_packed import OneDNNPackedScheme
from worker.quant.panels import PanelScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.scheme import LinearScheme
from worker.quant.weight_only import WeightOnlyScheme


def packed_linears_supported(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies packed weights of this dtype natively on this processor.

    In float32 they take half to two thirds of the time of torch's own linear.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.float32:
        return True
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


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
