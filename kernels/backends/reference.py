"""Operations in plain PyTorch, on any device; the CPU and GPU backends override those for which they have kernels.

The class of each group of operations is also its interface. Shapes and dtypes are documented by the reference
functions in kernels/ops/<op>/reference.py.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.common.quantized import ActivationQuantization, Activations
from kernels.ops.activation import reference as activation_reference
from kernels.ops.activation.reference import Activation
from kernels.ops.attention import reference as attention_reference
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.embedding import reference as embedding_reference
from kernels.ops.logprobs import reference as logprobs_reference
from kernels.ops.logprobs.reference import LogprobTensors
from kernels.ops.norm import reference as norm_reference
from kernels.ops.sampling import extended
from kernels.ops.sampling import reference as sampling_reference
from kernels.ops.sampling.inputs import (
    AdjustInputs,
    AllowedInputs,
    BadWordsInputs,
    DryInputs,
    ExtendInputs,
    PenaltyInputs,
    SamplingInputs,
)
from kernels.ops.speculative import reference as speculative_reference
from kernels.ops.speculative.reference import DraftInputs, Verified


class DecoderOps:
    """Operations of a decoder other than its linear layers."""

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, scale: float | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Look up embeddings; see kernels/ops/embedding."""
        return embedding_reference.embed(token_ids, weight, scale, dtype)

    def add_rms_norm(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        quantization: ActivationQuantization | None = None,
    ) -> Activations:
        """Add to the residual and normalize it; see kernels/ops/norm."""
        return norm_reference.add_rms_norm(delta, residual, weight, eps, dtype, quantization)

    def activation_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, quantization: ActivationQuantization | None = None
    ) -> Activations:
        """Apply the gated activation; see kernels/ops/activation."""
        return activation_reference.activation_and_mul(gate_up, activation, quantization)

    def prepare_attention(self, inputs: AttentionInputs, geometry: AttentionGeometry) -> Any:
        """Prepare, once per step and KV group, the argument of `paged_attention`."""
        return inputs, geometry

    def paged_attention(self, qkv: torch.Tensor, pages: KVPages, prepared: Any, layer: LayerConstants) -> torch.Tensor:
        """Write keys and values to their pages and attend to the context; see kernels/ops/attention."""
        inputs, geometry = prepared
        return attention_reference.paged_attention(qkv, pages, inputs, geometry, layer)


class SamplingOps:
    """Operations of the sampler; see kernels/ops/sampling, penalties and logprobs."""

    def compile(self) -> None:
        """Compile all kernels; another thread may call the operations meanwhile."""

    def compile_usual(self) -> None:
        """Compile the kernels that most requests need; the others may follow at their first use."""

    def adjust(self, logits: torch.Tensor, inputs: AdjustInputs) -> None:
        """Add biases and mask single tokens in place."""
        sampling_reference.adjust(logits, inputs)

    def penalize(self, logits: torch.Tensor, inputs: PenaltyInputs) -> None:
        """Apply repetition, presence and frequency penalties in place."""
        sampling_reference.penalize(logits, inputs)

    def penalize_repetitions(self, logits: torch.Tensor, inputs: DryInputs) -> None:
        """Apply the DRY penalty in place."""
        extended.penalize_repetitions(logits, inputs)

    def allow_only(self, logits: torch.Tensor, inputs: AllowedInputs) -> None:
        """Mask all tokens but the allowed ones in place."""
        sampling_reference.allow_only(logits, inputs)

    def forbid_words(self, logits: torch.Tensor, inputs: BadWordsInputs) -> None:
        """Mask the last token of each forbidden word in place."""
        sampling_reference.forbid_words(logits, inputs)

    def extend(self, logits: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
        """Apply the rare filters in place; see kernels/ops/sampling/extended.py."""
        return extended.extend(logits, inputs)

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """Sample one token per row."""
        return sampling_reference.sample(logits, inputs)

    def update_mirostat_mu(
        self, logits: torch.Tensor, inputs: ExtendInputs, log_mass: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return mirostat's mu after the sampled tokens."""
        return extended.update_mirostat_mu(logits, inputs, log_mass, token_ids)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Compute the log-probabilities of tokens and of the likeliest alternatives."""
        return logprobs_reference.compute_logprobs(logits, token_ids, num_top)


class SpeculativeOps:
    """Verification of drafts; see kernels/ops/speculative."""

    def compile(self) -> None:
        """Compile all kernels; another thread may call the operations meanwhile."""

    def verify(self, token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
        """Accept the drafts that equal the sampled tokens. On a GPU, the host reads nothing."""
        return speculative_reference.verify(token_ids, drafts, cu_rows)

    def add_kept(
        self, output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Count the accepted tokens for the penalties."""
        speculative_reference.add_kept(output_counts, slots, token_ids, kept)

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """Return the distributions that tokens are drawn from, [S, vocab] float32."""
        return speculative_reference.probabilities(logits, inputs).float()

    def reject(self, logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
        """Accept or replace drafts by rejection sampling."""
        return speculative_reference.reject(logits, inputs, drafts)
