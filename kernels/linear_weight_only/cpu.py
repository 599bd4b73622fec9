"""Integer weights times a few rows of activations on the CPU: weights are read once, as they are stored.

A few rows wait for memory, not for products: 4 bits a weight are read in a third of the time of 16. Weights are
computed in float32 and rounded to bfloat16, the same values that a dense bfloat16 weight has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from numba import cfunc, njit, types

from kernels.cpu.pool import Kernel, num_threads
from kernels.cpu.simd import atomic_add
from kernels.linear_weight_only.micro import BLOCK, CODE_BYTES, dot_rows, supported, write_blocks

MAX_ROWS = 8
"""From 10 to 12 on oneDNN's products of dense weights are as fast (docs/performance-log.md)."""

__all__ = [
    "BLOCK",
    "CODE_BYTES",
    "MAX_ROWS",
    "CpuWeight",
    "FewRowsLinear",
    "block_values",
    "few_rows_linear",
    "supported",
]


class CpuWeight:
    """A weight [out, in] as codes in blocks of 32 inputs: value = code * scale + minimum.

    Args:
        codes: [out, in / 32, 16] uint8 for 4 bits, inputs 0..15 of a block in the low halves of its bytes and 16..31 in
            the high halves, as in GGUF; [out, in / 32, 32] int8 for 8 bits.
        factors: float32, [out, in / 32] scales, or [out, in / 32, 2] scales and minimums.

    Raises ValueError where the number of inputs is no multiple of 64.
    """

    def __init__(self, codes: torch.Tensor, factors: torch.Tensor) -> None:
        self.num_out, self.num_in = codes.shape[0], codes.shape[1] * BLOCK
        if self.num_in % (2 * BLOCK):
            raise ValueError(f"the kernel takes two blocks of {BLOCK} inputs at a time, not {self.num_in} inputs")
        self.bits = 4 if codes.dtype is torch.uint8 else 8
        self.has_minimum = factors.dim() == 3
        self.codes = codes.contiguous()
        self.factors = factors.contiguous()

    @classmethod
    def pack(cls, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> CpuWeight:
        """From one code an input: codes [out, in], uint8 0..15 or int8; scales and minimums [out, in / 32] float32."""
        blocks = codes.view(codes.shape[0], -1, BLOCK)
        packed = blocks[..., :16] | blocks[..., 16:] << 4 if codes.dtype is torch.uint8 else blocks
        return cls(packed, scales if minimums is None else torch.stack((scales, minimums), dim=-1))


@njit(inline="always")
def dot_any(
    bits: Any,
    minimum: Any,
    add: Any,
    rows: Any,
    x: Any,
    row_bytes: Any,
    codes: Any,
    factors: Any,
    num_blocks: Any,
    bias: Any,
    out: Any,
    out_bytes: Any,
) -> None:
    """`dot_rows` for 1 to 8 rows, by the smallest variant that takes them."""
    if rows == 1:
        dot_rows(bits, minimum, add, 1, x, 1, row_bytes, codes, factors, num_blocks, bias, out, out_bytes)
    elif rows == 2:
        dot_rows(bits, minimum, add, 2, x, 2, row_bytes, codes, factors, num_blocks, bias, out, out_bytes)
    elif rows <= 4:
        dot_rows(bits, minimum, add, 4, x, rows, row_bytes, codes, factors, num_blocks, bias, out, out_bytes)
    else:
        dot_rows(bits, minimum, add, 8, x, rows, row_bytes, codes, factors, num_blocks, bias, out, out_bytes)


@njit(inline="always")
def share_out(
    bits: Any,
    minimum: Any,
    add: Any,
    rows: Any,
    x: Any,
    num_in: Any,
    codes: Any,
    factors: Any,
    bias: Any,
    out: Any,
    num_out: Any,
    pieces: Any,
    counter: Any,
) -> int:
    """One thread's part of x @ weight.T + bias; see `dot_rows`. Returns how many of the pieces it has done.

    Each is one long piece of the weight: the processor fetches ahead, and threads meet once.
    """
    num_blocks = num_in // 32
    code_bytes = num_blocks * (16 if bits == 4 else 32)
    factor_bytes = num_blocks * (8 if minimum == 1 else 4)
    element = 4 if add == 1 else 2
    size = (num_out + pieces - 1) // pieces
    done = 0
    while True:
        piece = atomic_add(counter, 1)
        if piece >= pieces:
            break
        for n in range(piece * size, min(piece * size + size, num_out)):
            b = bias + n * 2 if bias != 0 else 0
            dot_any(
                bits, minimum, add, rows, x, num_in * 2, codes + n * code_bytes, factors + n * factor_bytes,
                num_blocks, b, out + n * element, num_out * element,
            )  # fmt: skip
        done += 1
    return done


def compile_linear(bits: int, minimum: int) -> Any:
    """The kernel for weights of 4 or 8 bits; minimum: 1 where blocks have one."""

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def linear(block: Any) -> None:
        share_out(
            bits, minimum, 0, block[7], block[0], block[5], block[1], block[2], block[3], block[4], block[6], block[8],
            block[31],
        )  # fmt: skip

    return linear


def compile_values(bits: int, minimum: int) -> Any:
    """The kernel that writes a weight's values."""
    code_bytes = CODE_BYTES[bits]
    factor_bytes = 8 if minimum else 4

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def values(block: Any) -> None:
        codes, factors, out, num_blocks, share, counters = block[0], block[1], block[2], block[3], block[4], block[31]
        while True:
            first = atomic_add(counters, 1) * share
            if first >= num_blocks:
                break
            count = min(share, num_blocks - first)
            c, f = codes + first * code_bytes, factors + first * factor_bytes
            write_blocks(bits, minimum, c, f, count, out + first * 64)

    return values


class BlockValues:
    """Weights of 4 or 8 bits as dense ones."""

    def __init__(self, bits: int, has_minimum: bool) -> None:
        self._function = compile_values(bits, int(has_minimum))
        self._kernel = Kernel(self._function.address)
        self._threads = num_threads()

    def __call__(self, weight: CpuWeight) -> torch.Tensor:
        """[out, in] bfloat16, computed in float32 and rounded once."""
        out = torch.empty((weight.num_out, weight.num_in), dtype=torch.bfloat16)
        block = self._kernel.block
        block[0] = weight.codes.data_ptr()
        block[1] = weight.factors.data_ptr()
        block[2] = out.data_ptr()
        block[3] = out.numel() // BLOCK
        block[4] = -(-block[3] // self._threads)
        self._kernel.run(self._threads)
        return out


class FewRowsLinear:
    """The op for weights of 4 or 8 bits."""

    def __init__(self, bits: int, has_minimum: bool) -> None:
        self._function = compile_linear(bits, int(has_minimum))
        self._kernel = Kernel(self._function.address)
        self._threads = num_threads()

    def __call__(self, x: torch.Tensor, weight: CpuWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, in] bfloat16, contiguous, T in 1..8 -> x @ weight.T + bias, [T, out] bfloat16."""
        rows = x.shape[0]
        out = torch.empty((rows, weight.num_out), dtype=torch.bfloat16)
        block = self._kernel.block
        block[0] = x.data_ptr()
        block[1] = weight.codes.data_ptr()
        block[2] = weight.factors.data_ptr()
        block[3] = 0 if bias is None else bias.data_ptr()
        block[4] = out.data_ptr()
        block[5] = weight.num_in
        block[6] = weight.num_out
        block[7] = rows
        block[8] = self._threads
        self._kernel.run(self._threads)
        return out


@functools.cache
def few_rows_linear(bits: int, has_minimum: bool) -> FewRowsLinear:
    """The op, compiled or read from numba's cache at its first use: one for all layers."""
    return FewRowsLinear(bits, has_minimum)


@functools.cache
def block_values(bits: int, has_minimum: bool) -> BlockValues:
    """Likewise."""
    return BlockValues(bits, has_minimum)
