"""A weight as stored in a file (values, blocks, or codes with factors), its values and its slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from worker.quant.gguf_formats import FORMATS, PLAIN_DTYPES, FormatInfo, WeightFormat, dequantize

CodeFormat = Literal["u4", "u8", "int8", "fp8"]
"""u4, u8: only weights are quantized, codes 0..15 or 0..255, one uint8 each. int8, fp8 (float8_e4m3fn): activations
are quantized too."""
RawFormat = WeightFormat | CodeFormat

# Approximate number of values processed at a time, so that float32 intermediates stay in the processor's cache.
_STEP = 1 << 19


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers that each belong to a rectangle of a weight.

    Attributes:
        values: [ceil(out / rows), ceil(in / cols)], floating point.
        rows: Output features of a rectangle; 0 for all of them.
        cols: Input features of a rectangle; 0 for all of them.
    """

    values: torch.Tensor
    rows: int
    cols: int

    def by_row(self, rows: slice) -> torch.Tensor:
        """Return float32 values for each of these output features, or a single row that applies to all."""
        values = self.values.float()
        return values[torch.arange(rows.start, rows.stop) // self.rows] if self.rows else values

    def spread(self, rows: slice, num_cols: int) -> torch.Tensor:
        """Return float32 values for these output features and the input features.

        A dimension has size 1 if one value applies to all of its features.
        """
        values = self.by_row(rows)
        return values.repeat_interleave(self.cols, dim=1)[:, :num_cols] if self.cols else values

    def part(self, axis: int, start: int, stop: int, size: int) -> Factors | None:
        """Return the factors of a slice along an axis of `size`.

        None if the slice begins or ends within a rectangle.
        """
        extent = (self.rows, self.cols)[axis]
        if extent == 0:
            return self
        if start % extent or (stop % extent and stop != size):
            return None
        count = -(-stop // extent) - start // extent
        return replace(self, values=self.values.narrow(axis, start // extent, count).contiguous())


@dataclass(frozen=True, slots=True)
class RawWeight:
    """A tensor, or a slice of one, in the format of the file.

    Attributes:
        format: f32, f16, bf16; a block format of worker.quant.gguf_formats; or codes (CodeFormat).
        shape: (out, in), or (n,) for vectors.
        data: Plain formats: values, [*shape] in the format's dtype. Block formats: [out, in / 32 * block bytes],
            uint8. Codes: [out, in]. Contiguous, on the CPU, in memory of our own.
        extra: For codes: "scale", and "minimum" if the format has one; value = code * scale + minimum.
            "input_scale" [1, 1] if the checkpoint fixes the scale of the activations.
        columns: [in] int64; column i of the codes is input feature columns[i]. None for columns in order.
    """

    format: RawFormat
    shape: tuple[int, ...]
    data: torch.Tensor
    extra: Mapping[str, Factors] = field(default_factory=dict)
    columns: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if `data` contains the values themselves."""
        return self.format in PLAIN_DTYPES

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, [*shape] in `dtype`, computed in float32 and rounded once."""
        if self.format in PLAIN_DTYPES:
            return self.data.to(dtype)
        if self.format in FORMATS:
            return dequantize(self.format, self.data, dtype).reshape(self.shape)
        num_rows, num_cols = self.shape
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _STEP // max(1, num_cols))
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            values = self.data[rows].float() * self.extra["scale"].spread(rows, num_cols)
            if "minimum" in self.extra:
                values += self.extra["minimum"].spread(rows, num_cols)
            out[rows] = values
        if self.columns is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.columns, out)

    def take_rows(self, order: torch.Tensor | None) -> RawWeight:
        """Return output features in another order ([n] int32 or int64), or some of them; the weight itself for None."""
        if order is None:
            return self
        shape = (order.shape[0], *self.shape[1:])
        if any(factors.rows > 1 for factors in self.extra.values()):
            return RawWeight("f32", shape, self.dequantize(torch.float32).index_select(0, order))
        extra = {
            name: replace(one, values=one.values.index_select(0, order)) if one.rows else one
            for name, one in self.extra.items()
        }
        return replace(self, shape=shape, data=self.data.index_select(0, order), extra=extra)

    def zero_rows(self, count: int) -> RawWeight:
        """Return `count` output features of the same format with value 0."""
        extra = {}
        for name, one in self.extra.items():
            num_values = -(-count // one.rows) if one.rows else one.values.shape[0]
            extra[name] = replace(one, values=one.values.new_zeros((num_values, one.values.shape[1])))
        data = self.data.new_zeros((count, *self.data.shape[1:]))
        return replace(self, shape=(count, *self.shape[1:]), data=data, extra=extra)


def slice_rows(weight: RawWeight, rows: slice | None) -> RawWeight:
    """Return output features (step 1) of a weight that was read completely."""
    start, stop = bounds(rows, weight.shape[0])
    if (start, stop) == (0, weight.shape[0]):
        return weight
    shape = (stop - start, *weight.shape[1:])
    extra = _parts(weight, 0, start, stop)
    if extra is None:
        return RawWeight("f32", shape, weight.dequantize(torch.float32)[start:stop].contiguous())
    return replace(weight, shape=shape, data=weight.data[start:stop].contiguous(), extra=extra)


def slice_columns(weight: RawWeight, cols: slice | None) -> RawWeight:
    """Return input features (step 1) of a matrix that was read completely; f32 if its format cannot be cut there."""
    start, stop = bounds(cols, weight.shape[-1])
    if (start, stop) == (0, weight.shape[-1]):
        return weight
    shape = (*weight.shape[:-1], stop - start)
    info = FORMATS[weight.format] if weight.format in FORMATS else FormatInfo(1, 1)
    extra = _parts(weight, len(weight.shape) - 1, start, stop)
    if start % info.block or stop % info.block or extra is None or weight.columns is not None:
        values = weight.dequantize(torch.float32)[..., start:stop].contiguous()
        return RawWeight("f32", shape, values)
    scale = 1 if weight.plain else info.block_bytes
    data = weight.data[..., start // info.block * scale : stop // info.block * scale].contiguous()
    return replace(weight, shape=shape, data=data, extra=extra)


def bounds(part: slice | None, size: int) -> tuple[int, int]:
    """Return start and end of a slice with step 1. Raises ValueError for other steps."""
    if part is None:
        return 0, size
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"slices of weights must have step 1, not {step}")
    return start, max(start, stop)


def _parts(weight: RawWeight, axis: int, start: int, stop: int) -> dict[str, Factors] | None:
    """Return the factors of a slice; None if one of them cannot be cut there."""
    parts = {}
    for name, one in weight.extra.items():
        part = one.part(axis, start, stop, weight.shape[axis])
        if part is None:
            return None
        parts[name] = part
    return parts
