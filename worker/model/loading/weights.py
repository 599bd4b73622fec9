"""Weights by canonical name, in the format of the file, sliced for a tensor-parallel rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from worker.quant.raw_weight import RawWeight


class WeightSource(ABC):
    """The tensors of a model by canonical name.

    Names: embed.weight; layers.{i}.{attn_norm,q,k,v,o,mlp_norm,gate,up,down}.weight, with .bias where the spec says
    so; layers.{i}.{q_norm,k_norm}.weight with spec.qk_norm; norm.weight; head.weight (absent where tied).
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """All canonical names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError for a name that is not there."""

    @abstractmethod
    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        """Reads a tensor, or `rows` and `cols` of it (step 1); only the rows asked for are read from the file.

        A quantized format keeps its format where the slice begins and ends at blocks or groups; otherwise it comes as
        f32. Where output features are not the slowest dimension in the file, the whole tensor is read.

        Raises:
            KeyError: no such tensor.
            ModelFileError: the file could not be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files. Weights that were read stay valid."""

    def __contains__(self, name: str) -> bool:
        return name in set(self.names())
