"""The draft in torch, for training: a few layers of the target between the target's embedding and head.

The same arithmetic as worker/model/decoder.py, on whole texts and without a cache. Weights are in the layout of the
target's file, so that they can be written as they are. One matrix is added: what layers in the middle of the target
say is not yet said as its head wants it, but much of it is a linear map away (Belrose et al. 2023, "tuned lens"). The
map is learned between the last norm and the head, and becomes part of the head when the draft is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from shared.errors import ConfigurationError
from worker.kv.geometry import KVGroupSpec
from worker.model.families import required_shapes
from worker.model.loading.weights import WeightSource
from worker.model.rope import rope_table
from worker.model.spec import DecoderSpec

PROJECTION = "projection"
"""Name of the map from the last norm to the target's head."""
_VOCABULARY = ("embed.weight", "head.weight")
"""These are not trained: they are most of a small model, and few texts touch all of their rows."""


def draft_spec(target: DecoderSpec, layers: Sequence[int]) -> DecoderSpec:
    """The draft of these layers of the target.

    Raises:
        ConfigurationError: the target has not these layers, or has what the draft's training does not know.
    """
    if not layers or not all(0 <= layer < target.num_layers for layer in layers):
        raise ConfigurationError(f"the target has layers 0 to {target.num_layers - 1}; the draft cannot have {layers}")
    if len(target.kv_groups) > 1:
        raise ConfigurationError("the target has layers with and without a window, which a draft cannot have yet")
    if target.attention_softcap is not None or target.logits_softcap is not None or target.embedding_scale is not None:
        raise ConfigurationError("the target has soft caps or a scaled embedding, which a draft cannot have yet")
    # A draft without the target's window is as good: what it proposes is verified, and training texts are shorter.
    group = KVGroupSpec(layers=tuple(range(len(layers))))
    return dataclasses.replace(target, num_layers=len(layers), kv_groups=(group,))


def target_name(name: str, layers: Sequence[int]) -> str:
    """The target's name for a tensor of the draft."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(layers[int(parts[1])])
    return ".".join(parts)


class Draft:
    """A Llama-like decoder.

    Attributes:
        spec: of the draft.
        trained: name -> float32 weight that learns: canonical ones, and PROJECTION, [hidden, hidden].
        embedding, head: [vocab, hidden], the target's.
    """

    def __init__(self, spec: DecoderSpec, weights: WeightSource, layers: Sequence[int], dtype: torch.dtype) -> None:
        """Reads the layers of the target. dtype: of the products in training; sums and norms are float32."""

        def read(name: str) -> torch.Tensor:
            return weights.get(target_name(name, layers)).dequantize(torch.float32)

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
        """Of `written`: the head is no longer the embedding."""
        return dataclasses.replace(self.spec, tie_word_embeddings=False)

    @torch.no_grad()
    def written(self) -> dict[str, torch.Tensor]:
        """Canonical name -> float32 weight of all that a decoder needs but the embedding, which is the target's."""
        weights = {name: weight.detach() for name, weight in self.trained.items() if name != PROJECTION}
        weights["head.weight"] = self.head.float() @ self.trained[PROJECTION]
        return weights

    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, L] ids of texts from their beginning -> [B, L, hidden], as the target's head takes it."""
        cosines, sines = rope_table(self.spec.rope, token_ids.shape[1]).chunk(2, dim=-1)
        x = F.embedding(token_ids, self.embedding)
        for i in range(self.spec.num_layers):
            x = x + self._attention(i, self._norm(f"layers.{i}.attn_norm", x), cosines, sines)
            x = x + self._feed_forward(i, self._norm(f"layers.{i}.mlp_norm", x))
        return F.linear(self._norm("norm", x).to(self._dtype), self.trained[PROJECTION].to(self._dtype))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32, or [n, len(rows)] of some tokens."""
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
        """Rotary position embedding of [B, heads, L, head_dim]; dimensions beyond rotary_dim stay."""
        rotary, rest = x[..., : self.spec.rope.rotary_dim], x[..., self.spec.rope.rotary_dim :]
        if self.spec.rope.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            turned = torch.stack((a * cosines - b * sines, b * cosines + a * sines), dim=-1).flatten(-2)
        else:
            a, b = rotary.chunk(2, dim=-1)
            turned = torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)
        return torch.cat((turned, rest), dim=-1)

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
