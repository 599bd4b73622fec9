"""Draft model in torch for training: the first layers of the target between the target's embedding and head.

It computes the same as worker/model/decoder.py, but on whole texts and without a cache. Weights have the layout of the
target's file, so that they can be written unchanged. One matrix is added between the last norm and the head: hidden
states of middle layers differ from those that the head expects mostly by a linear map (Belrose et al. 2023, "tuned
lens"). The map is trained, and multiplied into the head when the draft is written.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from shared.errors import ConfigurationError
from worker.kv.geometry import KVGroupSpec
from worker.model.families import required_shapes
from worker.model.loading.model_files import WeightSource
from worker.model.rope import rope_table
from worker.model.spec import DecoderSpec

PROJECTION = "projection"
"""Name of the linear map between the last norm and the head."""
_VOCABULARY = ("embed.weight", "head.weight")
"""Not trained, because they are most of a small model and few texts use all of their rows."""


def draft_spec(target: DecoderSpec, num_layers: int) -> DecoderSpec:
    """Return the spec of a draft with the first layers of the target.

    Raises:
        ConfigurationError: The target does not have so many layers, or has a feature that training does not support.
    """
    if not 0 < num_layers <= target.num_layers:
        raise ConfigurationError(f"--layers {num_layers}: the target has {target.num_layers} layers")
    if len(target.kv_groups) > 1:
        raise ConfigurationError("the target has layers with and without a window, which is not supported")
    # The target's sliding window is omitted: drafts are verified, and training texts are shorter than it.
    group = KVGroupSpec(layers=tuple(range(num_layers)))
    return dataclasses.replace(target, num_layers=num_layers, kv_groups=(group,))


class Draft:
    """Llama-like decoder, initialized from the first layers of the target.

    Args:
        spec: Spec of the draft.
        weights: Weights of the target.
        dtype: Type of the matrix products; sums and norms are float32.

    Attributes:
        spec: Spec of the draft.
        trained: Name -> trained float32 weight, including PROJECTION, [hidden, hidden].
        embedding: [vocab, hidden], the target's embedding.
        head: [vocab, hidden], the target's head.
    """

    def __init__(self, spec: DecoderSpec, weights: WeightSource, dtype: torch.dtype) -> None:

        def read(name: str) -> torch.Tensor:
            return weights.get(name).dequantize(torch.float32)

        self.spec = spec
        self._dtype = dtype
        self.embedding = read("embed.weight")
        head = self.embedding if spec.tie_word_embeddings else read("head.weight")
        self.head = head.to(dtype)
        self.trained = {
            name: torch.nn.Parameter(read(name)) for name in required_shapes(spec) if name not in _VOCABULARY
        }
        self.trained[PROJECTION] = torch.nn.Parameter(torch.eye(spec.hidden_size))

    @property
    def written_spec(self) -> DecoderSpec:
        """Spec of the weights of `written`, whose head is not the embedding."""
        return dataclasses.replace(self.spec, tie_word_embeddings=False)

    @torch.no_grad()
    def written(self) -> dict[str, torch.Tensor]:
        """Return the float32 weights of a decoder by canonical name, without the embedding."""
        weights = {name: weight.detach() for name, weight in self.trained.items() if name != PROJECTION}
        weights["head.weight"] = self.head.float() @ self.trained[PROJECTION]
        return weights

    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the input of the target's head, [B, L, hidden], from token ids, [B, L]."""
        cosines, sines = rope_table(self.spec.rope, token_ids.shape[1]).chunk(2, dim=-1)
        x = F.embedding(token_ids, self.embedding)
        for i in range(self.spec.num_layers):
            x = x + self._attention(i, self._norm(f"layers.{i}.attn_norm", x), cosines, sines)
            x = x + self._feed_forward(i, self._norm(f"layers.{i}.mlp_norm", x))
        return F.linear(self._norm("norm", x).to(self._dtype), self.trained[PROJECTION].to(self._dtype))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Compute float32 logits from [n, hidden]: [n, vocab], or [n, len(rows)] for some tokens."""
        head = self.head if rows is None else self.head[rows]
        return F.linear(hidden.to(self._dtype), head).float()

    def _attention(self, layer: int, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        spec, prefix = self.spec, f"layers.{layer}"

        def heads(name: str, count: int) -> torch.Tensor:  # [B, count, L, head_dim]
            projected = self._linear(f"{prefix}.{name}", x).float()
            return projected.view(*projected.shape[:2], count, spec.head_dim).transpose(1, 2)

        q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
        if spec.qk_norm:
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        q, k = (self._rotate(one, cosines, sines).to(self._dtype) for one in (q, k))
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.to(self._dtype).repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return self._linear(f"{prefix}.o", out.transpose(1, 2).flatten(2)).float()

    def _rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Apply rotary position embedding to [B, heads, L, head_dim]; dimensions from rotary_dim on are unchanged."""
        rotary, rest = x[..., : self.spec.rope.rotary_dim], x[..., self.spec.rope.rotary_dim :]
        if self.spec.rope.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            rotated = torch.stack((a * cosines - b * sines, b * cosines + a * sines), dim=-1).flatten(-2)
        else:
            a, b = rotary.chunk(2, dim=-1)
            rotated = torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)
        return torch.cat((rotated, rest), dim=-1)

    def _feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}"
        gate, up = self._linear(f"{prefix}.gate", x), self._linear(f"{prefix}.up", x)
        match self.spec.activation:
            case "silu":
                gate = F.silu(gate)
            case "gelu":
                gate = F.gelu(gate)
            case "gelu_tanh":
                gate = F.gelu(gate, approximate="tanh")
        return self._linear(f"{prefix}.down", gate * up).float()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.trained.get(f"{name}.bias")
        weight = self.trained[f"{name}.weight"].to(self._dtype)
        out: torch.Tensor = F.linear(x.to(self._dtype), weight, None if bias is None else bias.to(self._dtype))
        return out

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.trained[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)
