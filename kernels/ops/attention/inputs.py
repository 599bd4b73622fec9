"""Inputs of an attention layer besides queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.attention.cascade import CascadeWork


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Shapes and constants that are fixed while a model is loaded; head counts are per tensor-parallel rank.

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of key-value heads.
        head_dim: Values per head.
        rotary_dim: Leading dimensions of a head that are rotated, in pairs (i, i + rotary_dim / 2).
        page_size: Tokens per page.
        scale: Factor of the scores.
        softcap: Scores become softcap * tanh(score / softcap); None for no cap.
        window: A query sees the last `window` positions including its own; None for all positions.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Step inputs for T tokens of R requests; the tokens of a request are adjacent and in order.

    Attributes:
        positions: [T] int32.
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32, context including this step's tokens.
        slot_mapping: [T] int64, page * page_size + slot; -1 for tokens that are not written.
        block_table: [R, max_pages] int32.
        rope_table: [max_positions, rotary_dim] float32: cosines, then sines, of each position.
        max_seqlen_q: Largest number of tokens of a request.
        max_seqlen_k: Largest context.
        cascade: Prefixes shared by decoding requests. A GPU may attend to each of them once for all its requests.
            None if no shared prefix is known. The result is the same except for rounding, so deterministic mode
            ignores it.
    """

    positions: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    rope_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cascade: CascadeWork | None = None


@dataclass(frozen=True, slots=True)
class LayerConstants:
    """Constants of one layer beyond the geometry of its KV group.

    Attributes:
        q_norm: [head_dim] float32 weights of the RMS norm of each query head before rotation; None without k_norm.
        k_norm: The same for key heads.
        norm_eps: Epsilon of that norm.
        sinks: [num_heads] float32: a score without a value that each head adds to its softmax; None for no sinks.
    """

    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    sinks: torch.Tensor | None = None
