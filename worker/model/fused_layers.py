"""All layers of a step as one operation on the CPU, if the model and the processor support it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops.attention.inputs import AttentionGeometry
from kernels.ops.decoder_layers.cpu import DecoderLayers, Shape, supported
from kernels.ops.decoder_layers.inputs import LayerWeights
from worker.kv.storage import KVStorage
from worker.model.spec import DecoderSpec


def fuse_layers(
    spec: DecoderSpec,
    geometry: AttentionGeometry,
    layers: Sequence[LayerWeights | None],
    kv: KVStorage,
    *,
    fixed: bool,
) -> DecoderLayers | None:
    """Return the layers as one operation, or None if a feature of the model is not supported.

    Args:
        spec: Specification of the model.
        geometry: Attention geometry of all layers.
        layers: Contribution of each layer; None for an unsupported layer.
        kv: KV cache that the operation will use, or one of the same kind.
        fixed: The result of a token is the same in every batch.
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
    return DecoderLayers(shape, fusable, fixed=fixed)
