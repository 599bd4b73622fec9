"""Decode steps of a few tokens on the CPU: all layers as one op, where the model and the processor allow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention.inputs import AttentionGeometry
from kernels.few_rows_layers.cpu import FewRowsLayers, Shape, supported
from kernels.few_rows_layers.inputs import LayerWeights
from kernels.linear_weight_only.cpu import MAX_ROWS
from worker.kv.storage import KVStorage
from worker.model.spec import DecoderSpec

__all__ = ["MAX_ROWS", "fuse_layers"]


def fuse_layers(
    spec: DecoderSpec, geometry: AttentionGeometry, layers: Sequence[LayerWeights | None], kv: KVStorage
) -> FewRowsLayers | None:
    """The layers as one op, or None where something of the model is not covered.

    Args:
        geometry: of all layers' attention.
        layers: what each layer would bring; None where it has what the op has not.
        kv: that the op will be used with, or one of the same kind.
    """
    first = kv.layers[0]
    fusable = [layer for layer in layers if layer is not None]
    shape = Shape(
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        geometry=geometry,
        eps=spec.norm_eps,
        kv_dtype=first.keys.dtype,
    )
    plain = first.format == "dense" and len(spec.kv_groups) == 1 and len(fusable) == len(layers)
    if not plain or first.keys.dtype not in (torch.float32, torch.bfloat16) or not supported(shape, fusable):
        return None
    return FewRowsLayers(shape, fusable)
