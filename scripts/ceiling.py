"""Ceiling of a model's speed: its linear layers alone, with the fastest kernel for each number of rows.

It uses none of Pelton's code, so that a slow choice there cannot lower the ceiling. Candidates are torch's bf16
product, oneDNN's product with prepacked weights, and the weight-only int8 and int4 products, which keep activations in
bf16. Layers and head use the fastest kernel each; the head is not int4, because no model file stores it with less than
8 bits. Projections of the same input are one matrix. Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.arguments import Parser

_INT4_GROUP = 32
Product = Callable[[Tensor], object]


@dataclass(frozen=True)
class LinearShapes:
    """Sizes of a Llama-like decoder, by default those of SmolLM2-135M."""

    num_layers: int = 30
    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152

    def layer(self) -> list[tuple[int, int]]:
        """Return (out, in) of the matrices of a layer: query-key-value, output, gate-up, down."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (query + 2 * key_value, self.hidden_size),
            (self.hidden_size, query),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    def head(self) -> tuple[int, int]:
        """Return (out, in) of the head."""
        return (self.vocab_size, self.hidden_size)


def _plain(weight: Tensor, rows: int) -> Product:
    copy = weight.clone()  # a copy per layer, otherwise all layers would read the same memory from the cache
    return lambda x: torch.nn.functional.linear(x, copy)


def _packed(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _int8(weight: Tensor, rows: int) -> Product:
    values = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.full((weight.shape[0],), 1e-3, dtype=torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, values, scales)


def _int4(weight: Tensor, rows: int) -> Product:
    num_out, num_in = weight.shape
    values = torch.randint(0, 16, (num_out, num_in), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 2)
    scales = torch.full((num_in // _INT4_GROUP, num_out, 2), 1e-3, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, _INT4_GROUP, scales)


@dataclass(frozen=True)
class Kernel:
    """Implementation of the matrix product.

    Attributes:
        name: Name in the table.
        prepare: Function from a matrix and the number of rows to a product; it packs the matrix if necessary.
        max_rows: Rows above which the kernel is far slower than others and is not measured.
        multiplies_head: True if the head may be stored in this format.
    """

    name: str
    prepare: Callable[[Tensor, int], Product]
    max_rows: int = sys.maxsize
    multiplies_head: bool = True


KERNELS = (
    Kernel("bf16", _plain),
    Kernel("bf16 packed", _packed),
    Kernel("int8 weights", _int8, max_rows=64),
    Kernel("int4 weights", _int4, max_rows=64, multiplies_head=False),
)


class Matrices:
    """Matrices of a model; one layer is stored, and each kernel makes its own copies for all layers."""

    def __init__(self, shapes: LinearShapes) -> None:
        self.shapes = shapes
        self._layer = [torch.randn(shape, dtype=torch.bfloat16) * 0.02 for shape in shapes.layer()]
        self._head = torch.randn(shapes.head(), dtype=torch.bfloat16) * 0.02

    def layers(self, kernel: Kernel, rows: int) -> Callable[[], object]:
        """Return a pass over all layers. Raises an error of torch if the processor does not support the kernel."""
        products = [(kernel.prepare(m, rows), m.shape[1]) for _ in range(self.shapes.num_layers) for m in self._layer]
        inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16) for _, width in products}

        def run() -> None:
            for product, width in products:
                product(inputs[width])

        return run

    def head(self, kernel: Kernel, rows: int) -> Callable[[], object]:
        """Return the product with the head."""
        product, x = kernel.prepare(self._head, rows), torch.randn(rows, self._head.shape[1], dtype=torch.bfloat16)
        return lambda: product(x)


@dataclass(frozen=True)
class Timing:
    """Seconds of the fastest pass of a kernel; infinite if it was not measured."""

    kernel: Kernel
    layers: float
    head: float


@dataclass(frozen=True)
class Ceiling:
    """Seconds of the fastest pass over `rows` rows of the layers and `head_rows` rows of the head."""

    rows: int
    head_rows: int
    kernel: Kernel
    head_kernel: Kernel
    layers_seconds: float
    head_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of a pass over all matrices."""
        return self.layers_seconds + self.head_seconds

    def lowered(self, layers_seconds: float, head_seconds: float) -> Ceiling:
        """Return the ceiling with a new measurement where it is faster; other programs can only slow a pass down."""
        layers, head = min(self.layers_seconds, layers_seconds), min(self.head_seconds, head_seconds)
        return replace(self, layers_seconds=layers, head_seconds=head)

    def entry(self) -> dict[str, object]:
        """Return the figures for JSON."""
        return {
            "kernel": self.kernel.name,
            "head_kernel": self.head_kernel.name,
            "layers_seconds": self.layers_seconds,
            "head_seconds": self.head_seconds,
            "tokens_per_second": self.rows / self.seconds,
            "tokens_per_second_without_head": self.rows / self.layers_seconds,
        }


@torch.inference_mode()
def time_kernels(matrices: Matrices, rows: int, head_rows: int, seconds: float) -> list[Timing]:
    """Time each kernel that is suitable for the rows and supported by the processor.

    Args:
        matrices: Matrices of the model.
        rows: Rows of the layers.
        head_rows: Rows of the head.
        seconds: Time per kernel for the layers, and a quarter of it for the head; at least three passes.
    """
    timings = []
    for kernel in KERNELS:
        layers = head = float("inf")
        try:
            if rows <= kernel.max_rows:
                layers = fastest_seconds(matrices.layers(kernel, rows), seconds)
            if kernel.multiplies_head and head_rows <= kernel.max_rows:
                head = fastest_seconds(matrices.head(kernel, head_rows), seconds / 4)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            print(f"{kernel.name}: skipped: {str(error).splitlines()[0]}", file=sys.stderr)
        timings.append(Timing(kernel, layers, head))
    return timings


def best(timings: Sequence[Timing], rows: int, head_rows: int) -> Ceiling:
    """Return the fastest kernel for the layers and for the head."""
    layers = min(timings, key=lambda timing: timing.layers)
    head = min(timings, key=lambda timing: timing.head)
    return Ceiling(rows, head_rows, layers.kernel, head.kernel, layers.layers, head.head)


def fastest_seconds(run: Callable[[], object], seconds: float, passes: int = 3) -> float:
    """Return the time of the fastest of at least `passes` passes, after a warm-up pass."""
    run()
    found, end = float("inf"), time.perf_counter() + seconds
    while passes > 0 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
        passes -= 1
    return found


def main() -> None:
    """Measure the shapes of the default model."""
    parser = Parser(prog="ceiling", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure")
    options = parser.parse_args()
    matrices = Matrices(LinearShapes())
    found = {rows: time_kernels(matrices, rows, rows, options.seconds) for rows in options.rows}
    ceilings = {rows: best(timings, rows, rows) for rows, timings in found.items()}
    print("tokens/s".ljust(22) + "".join(f"{rows:>9}" for rows in options.rows))
    for part in ("layers", "head"):
        for index, kernel in enumerate(KERNELS):
            speeds = [rows / getattr(timings[index], part) for rows, timings in found.items()]
            cells = "".join(f"{speed:9.0f}" if speed else f"{'-':>9}" for speed in speeds)
            print(f"{part}, {kernel.name}".ljust(22) + cells)
    print("best of both".ljust(22) + "".join(f"{rows / one.seconds:9.0f}" for rows, one in ceilings.items()))
    print(json.dumps({rows: one.entry() for rows, one in ceilings.items()}))


if __name__ == "__main__":
    main()
