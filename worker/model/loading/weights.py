"""Weights by canonical name, in the format of the file, sliced for a tensor-parallel rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from worker.quant.gguf_formats import FORMATS, PLAIN_DTYPES, WeightFormat, dequantize


@dataclass(frozen=True, slots=True)
class RawWeight:
    """A tensor, or a slice of one, as the file holds it.

    Attributes:
        format: f32, f16, bf16, or a block format of worker.quant.gguf_formats.
        shape: (out, in), or (n,) for vectors.
        data: plain formats: the values, [*shape] in the format's dtype. Block formats: [out, in / 32 * block bytes],
            uint8. Contiguous, on the CPU, in memory of our own.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    data: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, [*shape] in `dtype`, rounded once."""
        if self.format in PLAIN_DTYPES:
            return self.data.to(dtype)
        return dequantize(self.format, self.data, dtype).reshape(self.shape)


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

        A block format keeps its format where `cols` begins and ends at blocks; otherwise the slice comes as f32.

        Raises:
            KeyError: no such tensor.
            ModelFileError: the file could not be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files. Weights that were read stay valid."""

    def __contains__(self, name: str) -> bool:
        return name in set(self.names())


def bounds(part: slice | None, size: int) -> tuple[int, int]:
    """Start and end of a slice with step 1. Raises ValueError for any other step."""
    if part is None:
        return 0, size
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"slices of weights have step 1, not {step}")
    return start, max(start, stop)


def slice_columns(weight: RawWeight, cols: slice | None) -> RawWeight:
    """Columns of a matrix that was read with all of them."""
    if cols is None:
        return weight
    start, stop = bounds(cols, weight.shape[-1])
    if (start, stop) == (0, weight.shape[-1]):
        return weight
    shape = (*weight.shape[:-1], stop - start)
    info = FORMATS[weight.format]
    if start % info.block or stop % info.block:
        values = weight.dequantize(torch.float32)[..., start:stop].contiguous()
        return RawWeight("f32", shape, values)
    if weight.format in PLAIN_DTYPES:
        return RawWeight(weight.format, shape, weight.data[..., start:stop].contiguous())
    scale = info.block_bytes
    data = weight.data[:, start // info.block * scale : stop // info.block * scale].contiguous()
    return RawWeight(weight.format, shape, data)
