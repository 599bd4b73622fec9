"""Block formats of GGUF tensors: sizes in a file, and values.

Layouts follow the GGML type list in the GGUF specification. A block holds 32 consecutive values of a row. Nibbles are
stored with values 0..15 in the low halves of 16 bytes and values 16..31 in the high halves.

        q4_0: f16 scale, 16 bytes of nibbles                      value = scale * (nibble - 8)
        q4_1: f16 scale, f16 minimum, 16 bytes of nibbles         value = scale * nibble + minimum
        q5_0: f16 scale, u32 fifth bits, 16 bytes of nibbles      value = scale * (code - 16)
        q5_1: f16 scale, f16 minimum, u32 fifth bits, 16 bytes    value = scale * code + minimum
        q8_0: f16 scale, 32 signed bytes                          value = scale * code
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch

WeightFormat = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]

BLOCK = 32


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """Sizes of a format: `block` consecutive values of a row take `block_bytes` bytes."""

    block: int
    block_bytes: int


FORMATS: dict[str, FormatInfo] = {
    "f32": FormatInfo(1, 4),
    "f16": FormatInfo(1, 2),
    "bf16": FormatInfo(1, 2),
    "q8_0": FormatInfo(BLOCK, 34),
    "q4_0": FormatInfo(BLOCK, 18),
    "q4_1": FormatInfo(BLOCK, 20),
    "q5_0": FormatInfo(BLOCK, 22),
    "q5_1": FormatInfo(BLOCK, 24),
}

PLAIN_DTYPES: dict[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# Type ids of GGUF tensors. Ids 4, 5, 31-33 and 36-38 belonged to withdrawn types.
GGML_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

SUPPORTED_TYPES: dict[int, WeightFormat] = {
    number: cast(WeightFormat, name.lower()) for number, name in GGML_TYPE_NAMES.items() if name.lower() in FORMATS
}

_RECORDS: dict[str, npt.DTypeLike] = {
    "q8_0": np.dtype([("scale", "<f2"), ("codes", "i1", 32)]),
    "q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)]),
    "q5_0": np.dtype([("scale", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)]),
    "q5_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)]),
}
_ZERO_POINTS = {"q8_0": 0, "q4_0": 8, "q4_1": 0, "q5_0": 16, "q5_1": 0}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Components of a quantized matrix: value = scales * (codes - zero_point) + minimums, block by block.

    Attributes:
        codes: [rows, num_blocks, 32], int8 for q8_0, otherwise uint8; packed codes are [rows, num_blocks, 16], two
            per byte.
        scales: [rows, num_blocks], float16 as in the file.
        minimums: [rows, num_blocks], float16; None if the format has none.
        zero_point: Subtracted from each code.
        fifth: [rows, num_blocks, 4] uint8, fifth bits of packed codes; bit j of the little-endian word belongs to
            value j. None if codes have four or eight bits, or are not packed.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    zero_point: int
    fifth: torch.Tensor | None = None


def row_bytes(weight_format: str, num_values: int) -> int:
    """Return the bytes of one row. Raises ValueError if the row is not a whole number of blocks."""
    info = FORMATS[weight_format]
    if num_values % info.block:
        raise ValueError(
            f"a row of {num_values} values is not a whole number of {weight_format} blocks of {info.block}"
        )
    return num_values // info.block * info.block_bytes


def split_blocks(weight_format: str, data: torch.Tensor) -> Blocks:
    """Split rows into components. Codes stay packed and are views of `data`.

    Args:
        weight_format: Format of the rows.
        data: [rows, row bytes], uint8, contiguous, on the CPU.
    """
    records = data.numpy().view(_RECORDS[weight_format])  # [rows, num_blocks]
    names = records.dtype.names or ()
    return Blocks(
        codes=torch.from_numpy(records["codes"]),
        scales=torch.from_numpy(records["scale"].copy()),
        minimums=torch.from_numpy(records["minimum"].copy()) if "minimum" in names else None,
        zero_point=_ZERO_POINTS[weight_format],
        fifth=torch.from_numpy(records["fifth"]) if "fifth" in names else None,
    )


def unpacked(blocks: Blocks) -> torch.Tensor:
    """Return [rows, num_blocks, 32] codes of blocks with packed codes; int8 for q8_0, otherwise uint8."""
    packed = blocks.codes
    if packed.shape[-1] == BLOCK:
        return packed.contiguous()
    codes = torch.empty((*packed.shape[:2], BLOCK), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., :16])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 16:])
    if blocks.fifth is not None:
        bits = np.unpackbits(blocks.fifth.numpy(), axis=-1, bitorder="little")
        codes |= torch.from_numpy(bits) << 4
    return codes


def unpack_blocks(weight_format: str, data: torch.Tensor) -> Blocks:
    """Split packed rows into components with one code per input; `data` as in `split_blocks`."""
    blocks = split_blocks(weight_format, data)
    return replace(blocks, codes=unpacked(blocks), fifth=None)


def dequantize(weight_format: str, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize packed rows in float32 and round once to `dtype`.

    Args:
        weight_format: Format of the rows.
        data: [rows, row bytes], uint8, contiguous, on the CPU.
        dtype: Dtype of the result.

    Returns:
        [rows, row values].
    """
    num_rows = data.shape[0]
    info = FORMATS[weight_format]
    out = torch.empty((num_rows, data.shape[1] // info.block_bytes * info.block), dtype=dtype)
    # Process some rows at a time, so that float32 intermediates stay in the processor's cache.
    step = max(1, (1 << 19) // max(1, out.shape[1]))
    for start in range(0, num_rows, step):
        blocks = unpack_blocks(weight_format, data[start : start + step])
        values = blocks.codes.to(torch.float32)
        if blocks.zero_point:
            values -= blocks.zero_point
        values *= blocks.scales.to(torch.float32)[..., None]
        if blocks.minimums is not None:
            values += blocks.minimums.to(torch.float32)[..., None]
        out[start : start + step] = values.reshape(values.shape[0], -1)
    return out
