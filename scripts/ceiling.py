"""Ceiling of a model's speed on the processor: a roofline of the memory and of the matrix products.

A step takes at least the time in which the memory delivers the weights (4 bits in the layers, 8 in the head) and the
keys and values, and the time of its operations at the rate of torch's fastest large product. The rates are measured
without any of Pelton's code. Prints a table and, as the last line, JSON with milliseconds by number of rows.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable

import torch

from scripts._bench.gpu_check_model import step_cost
from scripts._bench.measurements import Roofline
from shared.arguments import Parser
from shared.settings import WorkerSettings
from worker.executor.resolve import cache_directory
from worker.model.loading.open_model import open_model
from worker.model.spec import DecoderSpec

_READ_VALUES = 1 << 26  # 256 MiB, more than any cache
_PRODUCT_ROWS, _PRODUCT_SIZE = 512, 2048
_HEAD_BYTES = 1 + 2 / 32


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


@functools.cache
def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(_PRODUCT_ROWS, _PRODUCT_SIZE).to(dtype), torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE).to(dtype)


@torch.inference_mode()
def measure(seconds: float) -> Roofline:
    """Measure the processor: the time to read memory, and that of a product in float32 and in bfloat16."""
    memory = torch.ones(_READ_VALUES)
    reading = fastest_seconds(memory.sum, seconds / 2)
    product = min(
        fastest_seconds(functools.partial(torch.nn.functional.linear, *_operands(dtype)), seconds / 4)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return Roofline("cpu", memory.nbytes / reading, 2 * _PRODUCT_ROWS * _PRODUCT_SIZE**2 / product, measured=True)


def ceiling_ms(machine: Roofline, spec: DecoderSpec, num_requests: int, tokens: int, context: int) -> float:
    """Return the minimum milliseconds of a step that computes the last `tokens` of the `context` of each request."""
    cost = step_cost(spec, num_requests, tokens, context - tokens, "int4", head_bytes=_HEAD_BYTES)
    return machine.floor_ms(cost.num_bytes, cost.num_operations)


def main() -> None:
    """Measure the ceiling of a model."""
    parser = Parser(prog="ceiling", description=__doc__)
    parser.add_argument("--model", default="", help="path of the model; empty for the default model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="requests of decode steps")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="tokens of prompts")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    files = open_model(options.model, cache_directory(WorkerSettings()))
    files.weights.close()
    machine = measure(options.seconds)
    print(f"memory {machine.bandwidth / 1e9:.1f} GB/s, products {machine.operations / 1e12:.2f} TFLOP/s")
    found = {
        "decode_ms": {rows: ceiling_ms(machine, files.spec, rows, 1, 1) for rows in options.rows},
        "prefill_ms": {tokens: ceiling_ms(machine, files.spec, 1, tokens, tokens) for tokens in options.prompts},
    }
    for kind, times in found.items():
        for rows, ms in times.items():
            print(f"{kind.removesuffix('_ms'):8}{rows:6} rows{ms:9.2f} ms{rows / ms * 1e3:9.0f} tokens/s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
