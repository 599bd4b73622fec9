"""Weights by canonical name, in the format of the file, sliced for a tensor-parallel rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from worker.quant.raw_weight import RawWeight


class WeightSource(ABC):
    """Tensors of a model by canonical name.

    Names: embed.weight; layers.{i}.{attn_norm,q,k,v,o,mlp_norm,gate,up,down}.weight, with .bias if the specification
    says so; layers.{i}.{q_norm,k_norm}.weight with spec.qk_norm; norm.weight; head.weight (absent if tied).
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return all canonical names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor. Raises KeyError for an unknown name."""

    @abstractmethod
    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        """Read a tensor, or `rows` and `cols` of it (step 1); only the requested rows are read from the file.

        A quantized format is kept if the slice begins and ends at blocks or groups; otherwise the result is f32. If
        output features are not the slowest dimension in the file, the whole tensor is read.

        Raises:
            KeyError: There is no such tensor.
            ModelFileError: The file could not be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files. Weights that were read remain valid."""

    def __contains__(self, name: str) -> bool:
        return name in set(self.names())
