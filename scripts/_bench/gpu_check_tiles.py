"""Part of gpu_check, on request: the tables' tiles beside others, at the shapes that decide a step's time.

What is fastest is not entered anywhere: a table is changed by hand, after a look at all the shapes that it serves.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from kernels.common.triton.benchmark import Benchmark
from scripts._bench.gpu_check_kernels import median_ms
from scripts._bench.gpu_check_machine import Roofline

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Tiles of one kernel.

    Attributes:
        folder: of kernels/.
        table: the function of its triton.py that chooses a tile, whatever its arguments.
        benchmarks: ends of names of the folder's benchmarks.
        tiles: arguments of the tile's class.
    """

    folder: str
    table: str
    benchmarks: tuple[str, ...]
    tiles: tuple[tuple[Any, ...], ...]


_DENSE_CELLS = ("1 x 1k kv=dense", "32 x 4k kv=dense", "256 x 1k kv=dense")
_SMALL_CELLS = ("32 x 4k kv=fp8", "32 x 4k kv=int8", "32 x 4k kv=int4")
_INT4_ROWS = tuple(f"int4 {layer} rows={rows}" for rows in (1, 16) for layer in ("qkv", "o", "gate_up", "down"))
_INT4_MANY = ("int4 qkv rows=64", "int4 gate_up rows=64", "int4 down rows=64")


def _eight_bits(kind: str, many: bool) -> tuple[str, ...]:
    """Names of products of 8 bits whose scales are of a kind, at few rows or many."""
    return tuple(
        f"{layer}{kind} rows={rows}"
        for rows in ((256, 2048) if many else (1, 16))
        for layer in ("o", "gate_up", "down")
    )


_WIDE = (
    (64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (128, 64, 128, 8, 4), (128, 64, 128, 4, 4), (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 4), (128, 256, 128, 8, 3),
)  # fmt: skip
_SKINNY = (
    (64, 32, 128, 4, 5), (64, 32, 128, 4, 8), (64, 32, 128, 4, 10), (64, 16, 128, 4, 8), (64, 64, 128, 4, 6),
    (16, 32, 128, 4, 8), (16, 16, 256, 4, 6), (64, 32, 256, 4, 4),
)  # fmt: skip

SWEEPS = (
    Sweep("attention_decode", "tile", _DENSE_CELLS, (
        (32, 4, 5, 4), (32, 4, 3, 4), (32, 4, 5, 6), (64, 4, 3, 3), (64, 4, 5, 2), (64, 8, 3, 3), (128, 8, 3, 2),
        (16, 2, 5, 8),
    )),
    Sweep("attention_decode", "tile", _SMALL_CELLS, (
        (32, 4, 7, 3), (64, 4, 5, 3), (64, 4, 3, 4), (64, 8, 3, 3), (128, 4, 3, 3), (128, 8, 3, 2), (128, 8, 5, 2),
    )),
    # Rows as in the table, for which the benchmarks' work lists are made.
    Sweep("attention_prefill", "tile", ("prompt of 2048", "prompt of 8192"), (
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 4),
    )),
    Sweep("attention_prefill", "tile", ("512 after 32768, fp8",), (
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2),
    )),
    Sweep("linear_weight_only", "tile", _INT4_ROWS, (
        (True, 16, 64, 2, 5, 256), (True, 16, 64, 4, 4, 528), (True, 16, 64, 4, 4, 1056), (True, 16, 64, 4, 3, 2112),
        (True, 16, 128, 4, 4, 1056), (True, 16, 32, 2, 4, 2112), (False, 16, 64, 4, 4, 528),
        (False, 16, 64, 4, 4, 1056), (False, 16, 128, 8, 3, 528),
    )),
    Sweep("linear_weight_only", "tile", _INT4_MANY, (
        (False, 64, 64, 4, 4, 132), (False, 64, 64, 4, 4, 528), (False, 64, 128, 8, 3, 264), (False, 32, 64, 4, 4, 528),
    )),
    Sweep("linear_fp8", "tile_for", _eight_bits(" channel", False), _SKINNY),
    Sweep("linear_fp8", "tile_for", _eight_bits(" channel", True), _WIDE),
    # With scales of blocks, a tile is as long as a block and not wider.
    Sweep("linear_fp8", "tile_for", _eight_bits(" block", False), tuple(tile for tile in _SKINNY if tile[2] == 128)),
    Sweep("linear_fp8", "tile_for", _eight_bits(" block", True), tuple(tile for tile in _WIDE if tile[1] <= 128)),
    Sweep("linear_int8", "tile_for", _eight_bits("", False), _SKINNY),
    Sweep("linear_int8", "tile_for", _eight_bits("", True), _WIDE),
)  # fmt: skip


_made: dict[str, Any] = {}


def compile_share(number: int, of: int, device: torch.device, sweeps: Sequence[Sweep] = SWEEPS) -> None:
    """Runs every `of`th choice once, so that Triton's cache has it."""
    choices = [(sweep, tile) for sweep in sweeps for tile in sweep.tiles]
    for sweep, tile in choices[number::of]:
        for benchmark in _benchmarks(sweep, device):
            with contextlib.suppress(Exception), _tile(sweep, tile):  # it is told where it is timed
                benchmark.runs[0]()


def measure(
    roofline: Roofline,
    device: torch.device,
    sweeps: Sequence[Sweep] = SWEEPS,
    timer: Callable[[Sequence[Callable[[], object]]], float] = median_ms,
) -> Iterator[Row]:
    """A row per benchmark and tile, the table's own first."""
    for sweep in sweeps:
        for benchmark in _benchmarks(sweep, device):
            floor = roofline.floor_ms(benchmark.num_bytes, benchmark.num_operations, benchmark.speed)
            for tile in (None, *sweep.tiles):
                row: Row = {"name": benchmark.name, "tile": "the table's" if tile is None else str(tile)}
                try:
                    with _tile(sweep, tile):
                        took = timer(benchmark.runs)
                except Exception as error:  # noqa: BLE001 - a tile may ask for more than there is
                    yield row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
                    continue
                yield row | {"ms": took, "floor_ms": floor, "share": floor / took}


def _benchmarks(sweep: Sweep, device: torch.device) -> list[Benchmark]:
    """Those of the folder are kept until another is asked for: making them takes seconds."""
    if _made.get("for") != (sweep.folder, device):
        _made.clear()
        _made["benchmarks"] = _module(sweep, "cases").benchmarks(device)
        _made["for"] = sweep.folder, device
    return [benchmark for benchmark in _made["benchmarks"] if benchmark.name.endswith(sweep.benchmarks)]


def _module(sweep: Sweep, name: str) -> Any:
    return importlib.import_module(f"kernels.ops.{sweep.folder}.{name}")


@contextlib.contextmanager
def _tile(sweep: Sweep, tile: tuple[Any, ...] | None) -> Iterator[None]:
    """The table gives this tile; None: its own."""
    if tile is None:
        yield
        return
    module = _module(sweep, "triton")
    chosen = module.Tile(*tile)
    with mock.patch.object(module, sweep.table, lambda *_, **__: chosen):
        yield
