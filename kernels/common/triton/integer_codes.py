"""Integer weights in kernels: codes of 4 and 8 bits in the layout of kernels/ops/weight_values/layout.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.common.triton.launch import INTERPRETED

USES_ASSEMBLY: bool = not (INTERPRETED or torch.version.hip is not None)
"""True if kernels decode with instructions of NVIDIA's GPUs: the constexpr ASM."""
CODE_BLOCK = tl.constexpr(128)  # inputs of a block of the layout
CODE_STEP = tl.constexpr(32)  # inputs of a slot: a nibble of each of a block's 16-bit words, or 32 bytes
# Two nibbles of two 16-bit words become two bfloat16 128 + code, or two float16 1024 + code, in one register.
PAIRS_BF16 = tl.constexpr(
    ["lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"]
    + [f"{{ .reg .b32 t; shr.b32 t, $1, {s}; lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }}" for s in (4, 8, 12)]
)
PAIRS_FP16 = tl.constexpr(
    ["lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;"]
    + [f"{{ .reg .b32 t; shr.b32 t, $1, {s}; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }}" for s in (4, 8, 12)]
)

# Four bytes become four numbers. bfloat16's mantissa has 7 bits: 128 + the low 7, less 128 or 256 by the highest.
BYTES_BF16 = tl.constexpr(
    "{ .reg .b32 two, low, high, minus; mov.b32 minus, 0xbf80bf80; "
    + " ".join(
        f"prmt.b32 two, $2, 0, {chosen}; lop3.b32 low, two, 0x007f007f, 0x43004300, 0xea; "
        f"lop3.b32 high, two, 0x00800080, 0x43804380, 0x6a; fma.rn.bf16x2 {target}, high, minus, low;"
        for target, chosen in (("$0", "0x4140"), ("$1", "0x4342"))
    )
    + " }"
)
# float16 of 1024 + code, less 1152.
BYTES_FP16 = tl.constexpr(
    "{ .reg .b32 two, middle; mov.b32 middle, 0x64806480; "
    "prmt.b32 two, $2, 0x64646464, 0x4140; sub.f16x2 $0, two, middle; "
    "prmt.b32 two, $2, 0x64646464, 0x4342; sub.f16x2 $1, two, middle; }"
)


@triton.jit
def decode_integers(words, SLOT: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr):
    """Decode code - 2 ** (BITS - 1) of a slot to TYPE exactly.

    words: int16 that hold a nibble of each of 4 slots, or uint8 of one slot.
    """
    ZERO: tl.constexpr = 1 << (BITS - 1)
    if BITS == 4 and TYPE == tl.bfloat16:  # noqa: SIM300 - tl.bfloat16 is the constant
        if ASM:
            biased = tl.inline_asm_elementwise(
                PAIRS_BF16[SLOT], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            biased = (((words >> (SLOT * 4)) & 15) | 0x4300).to(TYPE, bitcast=True)
        values = (biased - (128.0 + ZERO)).to(TYPE)
    elif BITS == 4 and TYPE == tl.float16:  # noqa: SIM300
        if ASM:
            biased = tl.inline_asm_elementwise(
                PAIRS_FP16[SLOT], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            biased = (((words >> (SLOT * 4)) & 15) | 0x6400).to(TYPE, bitcast=True)
        values = (biased - (1024.0 + ZERO)).to(TYPE)
    elif BITS == 8 and ASM and TYPE == tl.bfloat16:  # noqa: SIM300
        values = tl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif BITS == 8 and ASM and TYPE == tl.float16:  # noqa: SIM300
        values = tl.inline_asm_elementwise(BYTES_FP16, "=r,=r,r", [words], dtype=tl.float16, is_pure=True, pack=4)
    else:
        code = words.to(tl.int32)
        if BITS == 4:
            code = (code >> (SLOT * 4)) & 15
        # float32 of 2**23 + code: cheaper than a conversion, which has a quarter of the rate.
        values = ((code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)).to(TYPE)
    return values


@triton.jit
def group_of_slot(i_block, SLOT: tl.constexpr, group_blocks, GROUP: tl.constexpr):
    """Return the group of a block's slot, int64. GROUP: 32, 64, or 128 if a group has `group_blocks` whole blocks."""
    if GROUP == CODE_BLOCK:
        i_group = i_block // group_blocks
    else:
        i_group = i_block * (CODE_BLOCK // GROUP) + SLOT * CODE_STEP // GROUP
    return tl.cast(i_group, tl.int64)
