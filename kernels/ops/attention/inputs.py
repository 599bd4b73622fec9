"""What every attention layer of a KV group reads besides queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.attention.cascade import CascadeWork


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Shapes and constants that do not change while a model is loaded; heads are those of this rank.

    Attributes:
        rotary_dim: leading dimensions of a head that rotate, pairs (i, i + rotary_dim / 2).
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap); None: no cap.
        window: a query sees the last `window` positions including its own; None: all.
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
    """T tokens of R requests; the tokens of a request are adjacent and in order.

    Attributes:
        positions: [T] int32.
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32, context including this step's tokens.
        slot_mapping: [T] int64, page * page_size + slot; -1: the token is not written.
        block_table: [R, max_pages] int32.
        rope_table: [max_positions, rotary_dim] float32: cosines, then sines, of each position.
        cascade: prefixes that decoding requests share, which a GPU may attend to once for all of them; None: none are
            known. The result is the same but for rounding, so deterministic mode takes no notice of it.
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
    """What one layer adds to the geometry that it shares with the others of its KV group.

    Attributes:
        q_norm, k_norm: [head_dim] float32 weights of the RMS norm of each query and key head before it is rotated;
            both or none.
        norm_eps: of that norm.
        sinks: [num_heads] float32: a score without a value that each head adds to its softmax; None: none.
    """

    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    sinks: torch.Tensor | None = None
