"""Properties of a model that determine the layout of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that share a sliding window and therefore a block table.

    Attributes:
        layers: Indices of the layers.
        window: Sliding window in tokens; None for full attention.
    """

    layers: tuple[int, ...]
    window: int | None = None


class KVGeometry(Protocol):
    """Shape of a model's keys and values; worker.model.spec.DecoderSpec implements it."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads."""

    @property
    def head_dim(self) -> int:
        """Values per head."""

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Partition of the layers into KV groups."""
