"""Integer weights with unquantized activations: GGUF's block formats, GPTQ and AWQ, converted to one layout at load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.common.quantized import ActivationQuantization, Activations, dense
from kernels.ops.weight_values import layout
from worker.quant.gguf_formats import BLOCK as GGUF_BLOCK
from worker.quant.gguf_formats import unpack_blocks
from worker.quant.raw_weight import RawWeight

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of activations that the kernel supports."""

# Bits of the codes of a format, and the code that stands for about 0: codes are stored relative to it.
_BITS = {"q4_0": 4, "q4_1": 4, "u4": 4, "q5_0": 8, "q5_1": 8, "q8_0": 8, "u8": 8}
_CENTRES = {"q4_0": 8, "q4_1": 8, "u4": 8, "q5_0": 16, "q5_1": 16, "q8_0": 0, "u8": 128}


@dataclass(frozen=True, slots=True)
class _Codes:
    """Rows of a weight: value = (codes - centre) * scales + minimums.

    Attributes:
        codes: [rows, in] int8 or uint8.
        scales: [rows, groups] float32.
        minimums: [rows, groups] float32.
        centre: Code that is subtracted.
        group: Inputs of a group.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    centre: int
    group: int


def group_of(raws: Sequence[RawWeight]) -> int | None:
    """Return the group size into which all parts of a layer can be divided (0 for all inputs).

    None if the kernel supports none.
    """
    if any(raw.format not in _BITS for raw in raws):
        return None
    groups = {_group(raw) for raw in raws}
    if groups == {raws[0].shape[1]}:
        return 0
    group = math.gcd(*groups)
    group = group if group % layout.BLOCK == 0 else math.gcd(group, layout.BLOCK)
    return group if group >= layout.STEP else None


def _group(raw: RawWeight) -> int:
    """Return the group size of one weight."""
    if "scale" not in raw.extra:
        return GGUF_BLOCK
    return raw.extra["scale"].cols or raw.shape[1]


class WeightOnlyScheme:
    """Weights of 4 or 8 bits on a GPU.

    Args:
        dtype: Dtype of the activations.
        device: Device of the weights.
        raws: Parts that will be loaded; the layer has the bits of the widest, and groups that suit all.
        fixed: The result of a row does not depend on the batch.
    """

    weight: layout.PackedWeight
    """Weight for the kernel, available after `after_load`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, raws: Sequence[RawWeight], fixed: bool) -> None:
        group = group_of(raws)
        if group is None:
            raise ValueError("the weights are not quantized in groups that the kernel supports")
        self.input_quantization: ActivationQuantization | None = None
        self._device = device
        self._fixed = fixed
        self._group = group
        self._bits = max(_BITS[raw.format] for raw in raws)
        # Inputs in another order are permuted once for all parts of the layer; see `accepts`.
        columns = raws[0].columns
        self._columns = None if columns is None else columns.to(device)
        self._num_in = 0
        self._words = self._scales = self._minimums = torch.empty(0)
        from kernels.ops.linear_weight_only.triton import linear  # a CPU runs without triton

        self._linear = linear

    @staticmethod
    def accepts(dtype: torch.dtype, raws: Sequence[RawWeight]) -> bool:
        """Return True if a layer of these parts can be kept as integers; otherwise it is dense."""
        if dtype not in DTYPES or not raws or group_of(raws) is None:
            return False
        first = raws[0].columns
        return all((raw.columns is None) == (first is None) for raw in raws) and (
            first is None or all(raw.columns is not None and torch.equal(raw.columns, first) for raw in raws)
        )

    def create_weights(self, out_features: int, in_features: int) -> None:
        """Allocate words on the device. Factors stay in float32 until all are loaded."""
        self._num_in = in_features
        self._words = layout.empty_words(out_features, in_features, self._bits, self._device)
        groups = layout.num_groups(in_features, self._group)
        self._scales = torch.zeros((groups, out_features), device=self._device)
        self._minimums = torch.zeros((groups, out_features), device=self._device)

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        """Convert output features."""
        part = _taken_apart(raw.take_rows(order))
        stop = start + part.codes.shape[0]
        shift = (1 << (self._bits - 1)) - part.centre
        # As bytes, whose sums wrap around, so that negative codes are correct.
        codes = part.codes.to(self._device).view(torch.uint8) + shift
        layout.pack_rows(self._words, start, codes)
        repeats = part.group // self._group if self._group else 1
        for target, values in ((self._scales, part.scales), (self._minimums, part.minimums)):
            spread = values.to(self._device).repeat_interleave(repeats, dim=1)
            target[: spread.shape[1], start:stop] = spread.T

    def after_load(self) -> None:
        """Round the factors to float16 if scales lose nothing by it, and drop minimums that are all 0."""
        narrow = bool((self._scales.half().float() == self._scales).all())
        factors = torch.float16 if narrow else torch.float32
        minimums = self._minimums.to(factors) if bool(self._minimums.any()) else None
        self.weight = layout.PackedWeight(
            self._words,
            self._scales.to(factors),
            minimums,
            self._bits,
            self._group,
            self._num_in,
            layout.new_counters(self._words.shape[1], self._device),
        )
        self._scales = self._minimums = torch.empty(0)

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, accumulated in float32."""
        x = dense(x)
        if self._columns is not None:
            x = x.index_select(1, self._columns)
        return self._linear(x, self.weight, bias, self._fixed)


def _taken_apart(raw: RawWeight) -> _Codes:
    """Return the codes and factors of a quantized weight."""
    centre = _CENTRES[raw.format]
    if raw.format in ("u4", "u8"):
        scale = raw.extra["scale"]
        scales = scale.values.float()
        minimums = scales * centre
        if "minimum" in raw.extra:
            minimums = minimums + raw.extra["minimum"].values
        return _Codes(raw.data, scales, minimums, centre, _group(raw))
    blocks = unpack_blocks(raw.format, raw.data)
    scales = blocks.scales.float()
    minimums = scales * (centre - blocks.zero_point)
    if blocks.minimums is not None:
        minimums = minimums + blocks.minimums.float()
    return _Codes(blocks.codes.flatten(1), scales, minimums, centre, GGUF_BLOCK)
