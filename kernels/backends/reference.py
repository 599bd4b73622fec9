"""Operations in plain PyTorch, on any device; the CPU and GPU backends override those for which they have kernels.

The class of each group of operations is also its interface. The reference functions in kernels/ops/<op>/reference.py
and kernels/ops/sampling/extended.py document the operations.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.ops.activation import reference as activation_reference
from kernels.ops.attention import reference as attention_reference
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVPages
from kernels.ops.embedding import reference as embedding_reference
from kernels.ops.logprobs import reference as logprobs_reference
from kernels.ops.norm import reference as norm_reference
from kernels.ops.sampling import extended
from kernels.ops.sampling import reference as sampling_reference
from kernels.ops.sampling.inputs import (
    SamplingInputs,
)
from kernels.ops.speculative import reference as speculative_reference


class DecoderOps:
    """Operations of a decoder other than its linear layers."""

    embed = staticmethod(embedding_reference.embed)
    add_rms_norm = staticmethod(norm_reference.add_rms_norm)
    activation_and_mul = staticmethod(activation_reference.activation_and_mul)

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

    adjust = staticmethod(sampling_reference.adjust)
    penalize = staticmethod(sampling_reference.penalize)
    penalize_repetitions = staticmethod(extended.penalize_repetitions)
    allow_only = staticmethod(sampling_reference.allow_only)
    forbid_words = staticmethod(sampling_reference.forbid_words)
    extend = staticmethod(extended.extend)
    sample = staticmethod(sampling_reference.sample)
    update_mirostat_mu = staticmethod(extended.update_mirostat_mu)
    logprobs = staticmethod(logprobs_reference.compute_logprobs)


class SpeculativeOps:
    """Verification of drafts; see kernels/ops/speculative."""

    def compile(self) -> None:
        """Compile all kernels; another thread may call the operations meanwhile."""

    verify = staticmethod(speculative_reference.verify)
    add_kept = staticmethod(speculative_reference.add_kept)
    reject = staticmethod(speculative_reference.reject)

    def probabilities(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """Return the distributions that tokens are drawn from, [S, vocab] float32."""
        return speculative_reference.probabilities(logits, inputs).float()
