"""Linear layers on the CPU: weights of 4, 8 or 16 bits in panels of 16 output features, any number of rows.

Threads share units of two panels. Up to FEW_ROWS rows, a unit's weights are unpacked for each group of rows. For more
rows, they are unpacked once into memory of the thread and multiplied by all rows of a chunk from there. The results of
a unit pass through float32 tiles into one of the `Result`s.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch
from numba import cfunc, literally, types
from numba.extending import register_jitable

from kernels.common.cpu.bf16 import supported as processor_supported
from kernels.common.cpu.pool import Kernel, num_threads
from kernels.common.cpu.simd import (
    WIDTH,
    atomic_add,
    inner,
    store_f32,
    vadd,
    vload,
    vmul,
    vsilu,
    vstore,
    vsum,
)
from kernels.ops.linear_panels.layout import PanelWeight
from kernels.ops.linear_panels.micro import BLOCK, DOT_ROWS, VALUE_ROWS, block_bytes, dot, dot_values, unpack

FEW_ROWS = 32
"""Maximum number of rows for which weights are unpacked per group of rows (docs/performance-log.md)."""
CHUNK_ROWS = 512
"""Rows that are multiplied at once, so that inputs and outputs stay in the caches."""


class Result(enum.IntEnum):
    """The use of sums plus bias."""

    BFLOAT16 = 0
    FLOAT32 = 1
    ADD = 2
    """Add them to float32 values."""
    GATE = 3
    """Treat the features as two halves; write SiLU of the first times the second, as bfloat16."""


_BFLOAT16, _FLOAT32, _GATE = int(Result.BFLOAT16), int(Result.FLOAT32), int(Result.GATE)
_PANEL_ROW = 4 * WIDTH
"""Bytes of a panel's results for one row in a tile."""
_TILE_ROW = 2 * _PANEL_ROW
_LEAST_PART = 96
"""Minimum number of rows for which unpacking a unit's weights once more costs little."""


def supported(num_in: int) -> bool:
    """Return True if this processor has the instructions and the kernel supports this number of inputs."""
    return processor_supported() and num_in % BLOCK == 0


def scratch_bytes(num_in: int) -> int:
    """Return the bytes of memory that one thread needs: two panels of values and a tile."""
    return values_bytes(num_in) + max(DOT_ROWS, VALUE_ROWS) * _TILE_ROW


def values_bytes(num_in: int) -> int:
    """Return the bytes of two panels of bfloat16 values."""
    return 2 * num_in * WIDTH * 2


register_jitable(values_bytes)


@inner
def block_sums(x: Any, rows: Any, num_in: Any, out: Any) -> None:
    """Write the sum of each row of x over each block to `out`, float32 [rows, num_in / 32]."""
    for i in range(rows * (num_in // BLOCK)):
        at = x + i * 2 * BLOCK
        store_f32(out + i * 4, vsum(vadd(vload(at, 1), vload(at + 32, 1))))


@inner
def _dot(
    bits: Any,
    minimum: Any,
    rows: Any,
    x: Any,
    x_bytes: Any,
    sums: Any,
    sums_bytes: Any,
    panel: Any,
    blocks: Any,
    tile: Any,
) -> None:
    """Call `dot` for 1 to DOT_ROWS rows, in the smallest variant that supports them."""
    literally(bits)
    literally(minimum)
    if rows == 1:
        dot(bits, minimum, 1, x, x_bytes, sums, sums_bytes, panel, blocks, rows, tile, _TILE_ROW)
    elif rows == 2:
        dot(bits, minimum, 2, x, x_bytes, sums, sums_bytes, panel, blocks, rows, tile, _TILE_ROW)
    elif rows <= 4:
        dot(bits, minimum, 4, x, x_bytes, sums, sums_bytes, panel, blocks, rows, tile, _TILE_ROW)
    elif rows <= 8:
        dot(bits, minimum, 8, x, x_bytes, sums, sums_bytes, panel, blocks, rows, tile, _TILE_ROW)
    else:
        dot(bits, minimum, DOT_ROWS, x, x_bytes, sums, sums_bytes, panel, blocks, rows, tile, _TILE_ROW)


@inner
def _group(rows: Any) -> Any:
    """Return the number of rows of the next call of `dot`; a few absent rows cost less than another call."""
    if rows > 12:
        return min(rows, DOT_ROWS)
    if rows > 6:
        return min(rows, 8)
    if rows > 2:
        return min(rows, 4)
    return rows


@inner
def _write(result: Any, rows: Any, tile: Any, bias: Any, out: Any, num_out: Any, first: Any, second: Any) -> None:
    """Write a tile [rows, 32] to the features from first and from second on; second is negative if there is none."""
    if result == _GATE:
        for row in range(rows):
            gate, up = vload(tile + row * _TILE_ROW, 0), vload(tile + row * _TILE_ROW + _PANEL_ROW, 0)
            if bias != 0:
                gate, up = vadd(gate, vload(bias + first * 2, 1)), vadd(up, vload(bias + second * 2, 1))
            vstore(out + row * num_out + first * 2, vmul(vsilu(gate), up), 1)
        return
    for row in range(rows):
        for half in range(2 if second >= 0 else 1):
            feature = second if half else first
            value = vload(tile + row * _TILE_ROW + half * _PANEL_ROW, 0)
            if bias != 0:
                value = vadd(value, vload(bias + feature * 2, 1))
            if result == _BFLOAT16:
                vstore(out + (row * num_out + feature) * 2, value, 1)
            elif result == _FLOAT32:
                vstore(out + (row * num_out + feature) * 4, value, 0)
            else:
                at = out + (row * num_out + feature) * 4
                vstore(at, vadd(vload(at, 0), value), 0)


@inner
def share_out(
    bits: Any,
    minimum: Any,
    result: Any,
    few: Any,
    rows: Any,
    x: Any,
    num_in: Any,
    sums: Any,
    panels: Any,
    bias: Any,
    out: Any,
    num_out: Any,
    threads: Any,
    counter: Any,
    scratch: Any,
) -> Any:
    """Compute one thread's part of `result` of x @ weight.T + bias.

    Return the number of finished pieces, of `num_pieces`.

    Literals: bits, minimum (1 if blocks have one). few: weights are unpacked for each group of rows; each thread takes
    one long piece of the weight, and the sums of `block_sums` are read. Otherwise a thread takes one unit at a time.
    num_out is a multiple of 16; x has at most CHUNK_ROWS rows.
    """
    literally(bits)
    literally(minimum)
    blocks = num_in // BLOCK
    x_bytes, sums_bytes = num_in * 2, blocks * 4
    panel_bytes = blocks * block_bytes(bits, minimum)
    num_panels = num_out // WIDTH
    units = _units(result, num_out)
    tickets = num_pieces(result, few, rows, num_out, threads)
    size = (units + tickets - 1) // tickets if few else 1
    share = rows if few else (rows * units + tickets - 1) // tickets
    out_bytes = num_out if result == _GATE else num_out * (2 if result == _BFLOAT16 else 4)
    tile = scratch + values_bytes(num_in)
    unpacked = scratch + values_bytes(num_in) // 2
    done = 0
    while True:
        ticket = atomic_add(counter, 1)
        if ticket >= tickets:
            break
        begin, start = (ticket * size, 0) if few else (ticket % units, ticket // units * share)
        end, stop = min(begin + size, units), min(start + share, rows)
        for unit in range(begin, end):
            one = unit if result == _GATE else 2 * unit
            two = one + units if result == _GATE else one + 1
            two = two if two < num_panels else -1
            first = panels + one * panel_bytes
            second = panels + two * panel_bytes if two >= 0 else first
            if not few and bits != 16:
                unpack(bits, minimum, first, blocks, scratch)
                if two >= 0:
                    unpack(bits, minimum, second, blocks, unpacked)
                first, second = scratch, unpacked
            row = start
            while row < stop:
                at, target = x + row * x_bytes, out + row * out_bytes
                if few:
                    count = _group(stop - row)
                    own = sums + row * sums_bytes
                    _dot(bits, minimum, count, at, x_bytes, own, sums_bytes, first, blocks, tile)
                    if two >= 0:
                        _dot(bits, minimum, count, at, x_bytes, own, sums_bytes, second, blocks, tile + _PANEL_ROW)
                else:
                    count = min(stop - row, VALUE_ROWS)
                    dot_values(at, x_bytes, first, second, num_in // 2, count, tile, _TILE_ROW)
                _write(result, count, tile, bias, target, num_out, one * WIDTH, two * WIDTH)
                row += count
        done += 1
    return done


@inner
def _units(result: Any, num_out: Any) -> Any:
    """Return the number of units, which are pairs of panels."""
    panels = num_out // WIDTH
    return panels // 2 if result == _GATE else (panels + 1) // 2


@inner
def num_pieces(result: Any, few: Any, rows: Any, num_out: Any, threads: Any) -> Any:
    """Return the number of pieces in `share_out` of all threads.

    Units, or parts of their rows if there are many threads.
    """
    if few:
        return threads
    units = _units(result, num_out)
    return units * max(1, min(rows // _LEAST_PART, (2 * threads + units - 1) // units))


def compile_linear(bits: int, minimum: int) -> Any:
    """Compile the kernel of the operation."""

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def linear(block: Any) -> None:
        x, panels, bias, out, num_in, num_out, rows, threads = (
            block[0], block[1], block[2], block[3], block[4], block[5], block[6], block[7],
        )  # fmt: skip
        counters = block[31]
        own = block[8] + atomic_add(counters + 8, 1) * block[9]
        few, result = block[10] != 0, block[12]
        sums = own + block[11]
        if few and minimum == 1:
            block_sums(x, rows, num_in, sums)
        share_out(bits, minimum, result, few, rows, x, num_in, sums, panels, bias, out, num_out, threads, counters, own)

    return linear


class PanelLinear:
    """The operation for weights of one kind.

    Args:
        bits: 4, 8 or 16.
        minimum: Blocks have a minimum.
        result: BFLOAT16 or FLOAT32.
    """

    def __init__(self, bits: int, minimum: bool, result: Result) -> None:
        self._function = compile_linear(bits, int(minimum))
        self._kernel = Kernel(self._function.address)
        self._threads = num_threads()
        self._own = torch.empty(0, dtype=torch.uint8)
        self._kernel.block[12] = int(result)
        self._dtype = torch.bfloat16 if result is Result.BFLOAT16 else torch.float32

    def __call__(
        self, x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None, *, fixed: bool = False
    ) -> torch.Tensor:
        """Compute x @ weight.T + bias, [T, out].

        Args:
            x: [T, in] bfloat16, contiguous.
            weight: The weight.
            bias: bfloat16, as long as all panels; or None.
            fixed: Sum in the same order for any number of rows.
        """
        rows = x.shape[0]
        out = torch.empty((rows, weight.panels.shape[0] * WIDTH), dtype=self._dtype)
        few = fixed or rows <= FEW_ROWS
        for start in range(0, rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            self._multiply(x[chunk], weight, bias, out[chunk], few)
        return out if out.shape[1] == weight.num_out else out[:, : weight.num_out].contiguous()

    def _multiply(
        self, x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None, out: torch.Tensor, few: bool
    ) -> None:
        rows = x.shape[0]
        scratch = scratch_bytes(weight.num_in)
        needed = scratch + (rows * weight.num_in // BLOCK * 4 if few else 0)
        needed = -(-needed // 64) * 64
        if self._own.numel() < needed * self._threads:
            self._own = torch.empty(needed * self._threads, dtype=torch.uint8)
        self._kernel.store(0, x, weight.panels, bias, out, weight.num_in, out.shape[1], rows, self._threads)
        self._kernel.store(8, self._own, needed, int(few), scratch)
        self._kernel.run(self._threads)


@functools.cache
def panel_linear(bits: int, minimum: bool, result: Result) -> PanelLinear:
    """Return the operation, one for all layers and models of a process.

    It is compiled, or read from numba's cache, at its first use. It keeps no state between calls except memory that
    grows. Only one call may run at a time, so all calls come from the engine's thread.
    """
    return PanelLinear(bits, minimum, result)
