"""The linear layers of a model alone, by the best kernel for each number of rows: the ceiling of its speed.

It uses none of Pelton's own code, so that a slow choice there cannot lower the ceiling. Candidates are torch's bf16
product, oneDNN's with weights packed once, and the weight-only int8 and int4 products (which keep activations in
bf16; int4 has an int8 head, as no file's head is coarser). Projections that read the same input are one matrix.
Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_INT4_GROUP = 32
Product = Callable[[Tensor], object]


@dataclass(frozen=True)
class LinearShapes:
    """Sizes of a Llama-like decoder; the defaults are those of SmolLM2-135M."""

    num_layers: int = 30
    hidden_size: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152

    def layer(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's matrices: query-key-value, output, gate-up, down."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (query + 2 * key_value, self.hidden_size),
            (self.hidden_size, query),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]

    def head(self) -> tuple[int, int]:
        """(out, in) of the product with the vocabulary."""
        return (self.vocab_size, self.hidden_size)


def _plain(weight: Tensor, rows: int) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


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


# Rows from which the weight-only products are far behind everywhere and only cost time to measure.
_MAX_WEIGHT_ONLY_ROWS = 64

_KERNELS: dict[str, tuple[Callable[[Tensor, int], Product], Callable[[Tensor, int], Product]]] = {
    "bf16": (_plain, _plain),
    "bf16 packed": (_packed, _packed),
    "int8 weights": (_int8, _int8),
    "int4 weights": (_int4, _int8),
}


@dataclass(frozen=True)
class Ceiling:
    """Tokens per second of the best kernel at a number of rows, and without the head (as a prompt needs it)."""

    rows: int
    kernel: str
    tokens_per_second: float
    tokens_per_second_without_head: float


def measure(shapes: LinearShapes, rows: Sequence[int], seconds: float) -> list[tuple[str, list[Ceiling]]]:
    """Times each kernel at each number of rows; kernels that this processor lacks are left out.

    Args:
        seconds: spent on each figure, over at least five passes; the fastest counts.
    """
    torch.manual_seed(0)
    matrices = [torch.randn(shape, dtype=torch.bfloat16) * 0.02 for shape in shapes.layer() * shapes.num_layers]
    head = torch.randn(shapes.head(), dtype=torch.bfloat16) * 0.02
    results = []
    for name, (layer_kernel, head_kernel) in _KERNELS.items():
        ceilings = []
        try:
            for count in rows:
                if "weights" in name and count > _MAX_WEIGHT_ONLY_ROWS:
                    continue
                layers = [layer_kernel(matrix, count) for matrix in matrices]
                ceilings.append(_ceiling(name, layers, head_kernel(head, count), shapes, count, seconds))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            print(f"{name}: left out: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        results.append((name, ceilings))
    return results


def best(results: Sequence[tuple[str, Sequence[Ceiling]]]) -> list[Ceiling]:
    """The fastest kernel for each number of rows."""
    found: dict[int, Ceiling] = {}
    for _, ceilings in results:
        for ceiling in ceilings:
            known = found.get(ceiling.rows)
            if known is None or ceiling.tokens_per_second > known.tokens_per_second:
                found[ceiling.rows] = ceiling
    return [found[rows] for rows in sorted(found)]


def _ceiling(
    name: str, layers: list[Product], head: Product, shapes: LinearShapes, rows: int, seconds: float
) -> Ceiling:
    widths = [num_in for _, num_in in shapes.layer()] * shapes.num_layers
    inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16) for width in {*widths, shapes.hidden_size}}

    def run_layers() -> None:
        for product, width in zip(layers, widths):
            product(inputs[width])

    layers_time = _best_seconds(run_layers, seconds)
    head_time = _best_seconds(lambda: head(inputs[shapes.hidden_size]), seconds / 4)
    return Ceiling(rows, name, rows / (layers_time + head_time), rows / layers_time)


def _best_seconds(run: Callable[[], object], seconds: float) -> float:
    """Time of the fastest pass: other programs on the machine can only make a ceiling lower than it is."""
    run()
    best_time, passes = float("inf"), 0
    end = time.perf_counter() + seconds
    while passes < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best_time = min(best_time, time.perf_counter() - start)
        passes += 1
    return best_time


def main() -> None:
    """Measures the default model's shapes."""
    parser = argparse.ArgumentParser(prog="ceiling", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    with torch.inference_mode():
        results = measure(LinearShapes(), options.rows, options.seconds)
    print("tokens/s".ljust(14) + "".join(f"{rows:>9}" for rows in options.rows))
    for name, ceilings in results:
        speeds = {ceiling.rows: f"{ceiling.tokens_per_second:.0f}" for ceiling in ceilings}
        print(name.ljust(14) + "".join(f"{speeds.get(rows, '-'):>9}" for rows in options.rows))
    found = {
        ceiling.rows: {
            "kernel": ceiling.kernel,
            "tokens_per_second": ceiling.tokens_per_second,
            "tokens_per_second_without_head": ceiling.tokens_per_second_without_head,
        }
        for ceiling in best(results)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
