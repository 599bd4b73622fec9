"""Decoder-only transformer described by a DecoderSpec."""

from __future__ import annotations

from typing import Any

import torch

from kernels.backends.reference import DecoderOps
from kernels.backends.select import select_ops
from kernels.common.quantized import ActivationQuantization, Activations, dense
from kernels.ops.attention.inputs import AttentionInputs
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.decoder_layers.cpu import DecoderLayers, Shape, supported
from kernels.ops.decoder_layers.inputs import LayerWeights, Linear
from worker.kv.storage import KVStorage
from worker.model.attention import Attention, attention_geometry
from worker.model.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from worker.model.forward_batch import ForwardBatch
from worker.model.linear import ColumnParallelLinear, Part, Placement, RowParallelLinear, split_evenly
from worker.model.loading.model_files import WeightSource
from worker.model.rope import rope_table
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext


class RMSNorm:
    """Addition of a block's output to the residual stream, and normalization.

    Attributes:
        weight: [hidden] float32.
    """

    def __init__(
        self,
        weights: WeightSource,
        name: str,
        spec: DecoderSpec,
        place: Placement,
        ops: DecoderOps,
        quantization: ActivationQuantization | None = None,
    ) -> None:
        """Load the norm `name`. `quantization` is what the next layer expects of its input; None for none."""
        self.weight = weights.get(name).dequantize(torch.float32).to(place.device)
        self._eps = spec.norm_eps
        self._dtype = place.dtype
        self._ops = ops
        self._quantization = quantization

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor) -> Activations:
        """Add delta to the residual in place; return the normalized residual, [T, hidden]."""
        return self._ops.add_rms_norm(delta, residual, self.weight, self._eps, self._dtype, self._quantization)


class FeedForward:
    """Gated feed-forward block of one layer."""

    def __init__(self, spec: DecoderSpec, layer: int, weights: WeightSource, place: Placement, ops: DecoderOps) -> None:
        prefix = f"layers.{layer}"
        rows = split_evenly(spec.intermediate_size, place.parallel)
        self._ops = ops
        self._activation = spec.activation
        parts = [Part(f"{prefix}.gate", rows), Part(f"{prefix}.up", rows)]
        bias = spec.mlp_bias
        self._gate_up = ColumnParallelLinear(weights, parts, bias=bias, place=place)
        self._down = RowParallelLinear(weights, f"{prefix}.down", rows, bias=bias, place=place)

    @property
    def panels(self) -> tuple[Linear, Linear] | None:
        """Both projections for the operation that computes all layers at once.

        None if it does not support the block.
        """
        gate_up, down = self._gate_up.panels, self._down.panels
        if gate_up is None or down is None or self._activation != "silu":
            return None
        return gate_up, down

    @property
    def input_quantization(self) -> ActivationQuantization | None:
        """Quantization that the block expects of its input; None for none."""
        return self._gate_up.input_quantization

    def __call__(self, x: Activations) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""
        quantization = self._down.input_quantization
        return self._down(self._ops.activation_and_mul(self._gate_up(x), self._activation, quantization))


class DecoderLayer:
    """Attention and feed-forward, each after a norm, around the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: int, weights: WeightSource, place: Placement, ops: DecoderOps) -> None:
        self._attention = Attention(spec, layer, weights, place, ops)
        self._feed_forward = FeedForward(spec, layer, weights, place, ops)
        # Each norm writes the input of the next linear layer: codes, if that layer multiplies codes.
        name, wanted = f"layers.{layer}.attn_norm.weight", self._attention.input_quantization
        self._attention_norm = RMSNorm(weights, name, spec, place, ops, wanted)
        name, wanted = f"layers.{layer}.mlp_norm.weight", self._feed_forward.input_quantization
        self._mlp_norm = RMSNorm(weights, name, spec, place, ops, wanted)

    @property
    def panels(self) -> LayerWeights | None:
        """The layer for the operation that computes all layers at once; None if it does not support the layer."""
        attention, feed_forward = self._attention.panels, self._feed_forward.panels
        if attention is None or feed_forward is None:
            return None
        return LayerWeights(self._attention_norm.weight, *attention, self._mlp_norm.weight, *feed_forward)

    def __call__(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        pages: KVPages,
        prepared: Any,
    ) -> torch.Tensor:
        """Compute one layer.

        `delta` is the previous layer's output, not yet in the residual; return this layer's output.
        """
        x = self._attention_norm(delta, residual)
        delta = self._attention(x, pages, prepared)
        return self._feed_forward(self._mlp_norm(delta, residual))


class Decoder:
    """Model of one rank.

    Args:
        spec: Specification of the model.
        weights: Weights of the model.
        parallel: Ranks.
        dtype: Dtype of weights and activations. The residual stream is float32 on the CPU, where it costs nothing.
        device: Device of the weights.
        deterministic: The result of a token must not depend on the batch or on how its prompt is split into
            chunks.
        max_model_len: Upper bound of positions.

    Raises:
        ModelFileError: A tensor is missing or has another shape than the specification implies.
        ConfigurationError: The model cannot be split over the ranks, or needs an unsupported feature.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: ParallelContext | None = None,
        max_model_len: int,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_model_len = max_model_len
        self._parallel = parallel or ParallelContext()
        self._ops = select_ops(self.device, deterministic=deterministic)
        self._residual_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self._groups = spec.kv_groups
        self._deterministic = deterministic
        self._fused: DecoderLayers | None = None
        self._group_of_layer = {layer: i for i, group in enumerate(self._groups) for layer in group.layers}
        place = Placement(dtype, self.device, self._parallel, deterministic)
        with torch.inference_mode():
            self._rope_table = rope_table(spec.rope, max_model_len).to(self.device)
            self._embedding = VocabularyParallelEmbedding(weights, spec.vocab_size, place, self._ops)
            self._layers = [DecoderLayer(spec, i, weights, place, self._ops) for i in range(spec.num_layers)]
            self._norm = RMSNorm(weights, "norm.weight", spec, place, self._ops)
            tied = self._embedding if spec.tie_word_embeddings else None
            self._head = VocabularyParallelHead(weights, spec.vocab_size, place, tied)

    def fuse_layers(self, kv: KVStorage) -> None:
        """Compute the layers of a step as one operation from now on, if the model and the processor support it.

        `kv` is the KV cache that the operation will use, or one of the same kind.
        """
        self._fused = None
        cells = kv.layers[0]
        layers = [layer.panels for layer in self._layers]
        fusable = [layer for layer in layers if layer is not None]
        one_kind = len(self._groups) == 1 and len(fusable) == len(layers)
        if self.device.type != "cpu" or not one_kind or cells.format != "dense":
            return
        shape = Shape(
            hidden=self.spec.hidden_size,
            intermediate=self.spec.intermediate_size,
            geometry=attention_geometry(self.spec, kv.page_size, self._groups[0].window, self._parallel),
            eps=self.spec.norm_eps,
            kv_dtype=cells.keys.dtype,
        )
        if shape.kv_dtype in (torch.float32, torch.bfloat16) and supported(shape, fusable):
            self._fused = DecoderLayers(shape, fusable, fixed=self._deterministic)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVStorage) -> torch.Tensor:
        """Compute a step and write its keys and values to their pages.

        Returns:
            [S, vocab] float32 logits of the tokens batch.logits_indices.
        """
        return self.logits(self.hidden_states(batch, kv))

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, kv: KVStorage) -> torch.Tensor:
        """Return the first part of `forward`: [S, hidden] of the tokens batch.logits_indices, after the last norm."""
        residual = self._embedding(batch.input_ids, self._residual_dtype)
        prepared = [self._prepare(batch, kv, group) for group in range(len(self._groups))]
        delta: torch.Tensor | None = None
        if self._fused is not None and residual.shape[0] > 0:
            self._fused(residual, kv.layers, prepared[0])
        else:
            for i, layer in enumerate(self._layers):
                delta = layer(delta, residual, kv.layers[i], prepared[self._group_of_layer[i]])
        # Only the requested rows go through the last norm and the head.
        wanted = batch.logits_indices
        residual = residual.index_select(0, wanted)
        delta = delta.index_select(0, wanted) if delta is not None else None
        return dense(self._norm(delta, residual))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the second part of `forward`: [S, hidden] -> [S, vocab] float32.

        The caller bounds its memory by slices.
        """
        return self._head(hidden)

    def _prepare(self, batch: ForwardBatch, kv: KVStorage, group: int) -> Any:
        inputs = AttentionInputs(
            positions=batch.positions,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            slot_mapping=batch.slot_mapping[group],
            block_table=batch.block_tables[group],
            rope_table=self._rope_table,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            cascade=batch.cascade if group == 0 else None,
        )
        geometry = attention_geometry(self.spec, kv.page_size, self._groups[group].window, self._parallel)
        return self._ops.prepare_attention(inputs, geometry)
