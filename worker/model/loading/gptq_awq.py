"""Weights quantized by GPTQ (Frantar et al. 2022) and AWQ (Lin et al. 2023), as their tools write them.

In both, value = (code - zero) * scale. Zero and scale belong to `group_size` consecutive inputs of an output feature.

        GPTQ   qweight [in * bits / 32, out]: word i holds inputs i * 32 / bits and following, the first in the lowest
        bits qzeros  [groups, out * bits / 32]: packed likewise along out; stored minus one unless the format is
               gptq_v2 scales  [groups, out]; g_idx [in]: group of each input, if they were quantized in another order
        AWQ    qweight [in, out / 8]: nibble i of word c holds output 8 * c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
               qzeros  [groups, out / 8]: in the same order, unchanged; scales [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shared.errors import ModelFileError
from worker.model.loading.checkpoint import QuantizedModule, factors_of, need
from worker.model.loading.fields import Fields, readable
from worker.model.loading.safetensors_reader import StoredTensor
from worker.quant.raw_weight import CodeFormat, Factors, RawWeight, bounds, slice_columns, slice_rows

_SCALES = ("F16", "BF16", "F32")
_MAX_GROUP = 1 << 20
# Position of each output feature of a word among its nibbles.
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed words, lowest bits first: [n, w] int32 -> [n, w * 32 / bits] uint8; bits is 4 or 8."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    codes = torch.empty((*packed.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.flatten(-2)


def _weight(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, group: int, columns: torch.Tensor | None
) -> RawWeight:
    """Return [out, in] codes with [out, groups] zeros and scales as a weight."""
    name: CodeFormat = "u4" if bits == 4 else "u8"
    extra = {
        "scale": Factors(scales.contiguous(), 1, group),
        "minimum": Factors(-(zeros.float() * scales.float()), 1, group),
    }
    return RawWeight(name, (codes.shape[0], codes.shape[1]), codes, extra, columns)


def _group_size(config: Fields) -> int:
    """Return the inputs of a group; 0 if all inputs form one group."""
    size = config.integer("group_size", low=-1, high=_MAX_GROUP)
    if size == 0:
        raise config.error("group_size", "is 0; -1 for whole rows or a positive number is needed")
    return max(size, 0)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Tensors that form a weight of [num_inputs, num_outputs] values, and the number of inputs in a group."""

    codes: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    num_inputs: int
    num_outputs: int
    group: int

    @staticmethod
    def find(
        name: str,
        tensors: Mapping[str, StoredTensor],
        group: int,
        *,
        word_rows: int,
        word_cols: int,
        word_zeros: int,
    ) -> _Packed:
        """Find the tensors of a module.

        Args:
            name: Name of the module.
            tensors: Tensors of the module, by their name within it.
            group: Number of inputs in a group; 0 for all.
            word_rows: Number of inputs whose codes share a word.
            word_cols: Number of outputs whose codes share a word.
            word_zeros: Number of outputs whose zero points share a word.

        Raises:
            ModelFileError: A tensor is missing or has an unexpected shape.
        """
        codes = need(name, tensors, "qweight", ("I32",))
        if len(codes.shape) != 2 or codes.shape[1] * word_cols % word_zeros or not all(codes.shape):
            raise ModelFileError(
                f"tensor {readable(name)}.qweight has the shape {codes.shape}, which is not a packed matrix"
            )
        num_inputs, num_outputs = codes.shape[0] * word_rows, codes.shape[1] * word_cols
        group = group or num_inputs
        if num_inputs % group:
            raise ModelFileError(f"{readable(name)}: {num_inputs} inputs are not a whole number of groups of {group}")
        groups = num_inputs // group
        zeros = need(name, tensors, "qzeros", ("I32",), (groups, num_outputs // word_zeros))
        scales = need(name, tensors, "scales", _SCALES, (groups, num_outputs))
        return _Packed(codes, zeros, scales, num_inputs, num_outputs, group)


class GPTQ:
    """Checkpoints of quant_method gptq."""

    def __init__(self, config: Fields) -> None:
        self._bits = config.integer("bits", low=1, high=32)
        if self._bits not in (4, 8):
            raise config.error("bits", f"is {self._bits}; supported are 4, 8")
        self._group = _group_size(config)
        self._zero_offset = 1 if config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0

    def module(self, name: str, tensors: Mapping[str, StoredTensor]) -> QuantizedModule | None:
        """See QuantizedCheckpoint."""
        if "qweight" not in tensors:
            return None
        in_word = 32 // self._bits
        packed = _Packed.find(name, tensors, self._group, word_rows=in_word, word_cols=1, word_zeros=in_word)
        num_inputs, num_outputs, group = packed.num_inputs, packed.num_outputs, packed.group
        order = need(name, tensors, "g_idx", ("I32",), (num_inputs,)) if "g_idx" in tensors else None

        def read(rows: slice | None, cols: slice | None) -> RawWeight:
            start, stop = bounds(rows, num_outputs)
            columns = None if order is None else _sorted_columns(order.read(), group, name)
            codes = unpack_words(packed.codes.read()[:, start:stop].T, self._bits)
            if columns is not None:
                codes = codes[:, columns]
            zeros = unpack_words(packed.zeros.read(), self._bits)[:, start:stop].T.to(torch.int32) + self._zero_offset
            weight = _weight(codes, zeros, factors_of(packed.scales)[:, start:stop].T, self._bits, group, columns)
            return slice_columns(weight, cols)

        leaves = frozenset({"qweight", "qzeros", "scales", "g_idx"})
        return QuantizedModule(shape=(num_outputs, num_inputs), leaves=leaves, read=read)


def _sorted_columns(group_of: torch.Tensor, group: int, module: str) -> torch.Tensor | None:
    """Return the inputs sorted by group, or None if they are in order. Raises ModelFileError if group sizes differ."""
    expected = torch.arange(group_of.shape[0]) // group
    if torch.equal(group_of.long(), expected):
        return None
    columns = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[columns].long(), expected):
        raise ModelFileError(f"tensor {readable(module)}.g_idx does not name groups of {group} inputs each")
    return columns


class AWQ:
    """Checkpoints of quant_method awq."""

    def __init__(self, config: Fields) -> None:
        bits = config.integer("bits", low=1, high=32)
        if bits != 4:
            raise config.error("bits", f"is {bits}; 4 is supported")
        config.choice("version", ("gemm", "GEMM"), "gemm")
        if not config.boolean("zero_point", True):
            raise config.error("zero_point", "is false; only checkpoints with zero points are supported")
        self._group = _group_size(config)

    def module(self, name: str, tensors: Mapping[str, StoredTensor]) -> QuantizedModule | None:
        """See QuantizedCheckpoint."""
        if "qweight" not in tensors:
            return None
        packed = _Packed.find(name, tensors, self._group, word_rows=1, word_cols=8, word_zeros=8)
        num_inputs, group = packed.num_inputs, packed.group

        def read(rows: slice | None, cols: slice | None) -> RawWeight:
            inputs = slice(*bounds(cols, num_inputs))
            if inputs.start % group or inputs.stop % group:  # cut within a group: made dense below
                inputs = slice(0, num_inputs)
            of_groups = slice(inputs.start // group, inputs.stop // group)
            codes = _awq_codes(packed.codes.read(inputs))
            zeros = _awq_codes(packed.zeros.read(of_groups))
            weight = _weight(codes, zeros, factors_of(packed.scales, of_groups).T, 4, group, None)
            weight = slice_rows(weight, rows)
            return weight if inputs == slice(*bounds(cols, num_inputs)) else slice_columns(weight, cols)

        leaves = frozenset({"qweight", "qzeros", "scales"})
        return QuantizedModule(shape=(packed.num_outputs, num_inputs), leaves=leaves, read=read)


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Unpack [n, w] int32 -> [w * 8, n] uint8: a row for each output."""
    packed = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    codes = torch.empty((words.shape[1], 8, words.shape[0]), dtype=torch.uint8)
    for output, nibble in enumerate(_AWQ_NIBBLE):
        half = packed[..., nibble // 2].T
        codes[:, output] = half >> 4 if nibble % 2 else half & 15
    return codes.flatten(0, 1)
