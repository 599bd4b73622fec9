"""Shapes of the rotation and KV-write kernel for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.attention.cases import Case, make_step
from kernels.ops.attention.kv_pages import KVFormat

FORMATS: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")

CASES = [
    Case("three heads per KV head", [(1, 200), (5, 0), (1, -1), (7, 121)]),
    Case("one head per KV head", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=4),
    Case("one KV head", [(1, 40), (3, 9)], num_heads=5, num_kv_heads=1),
    Case("norms", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=2, qk_norm=True),
    Case("heads of 80", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=2, head_dim=80, rotary_dim=80),
    Case("heads of 96", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=2, head_dim=96, rotary_dim=96),
    Case("heads of 128", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=2, head_dim=128, rotary_dim=128),
    Case("heads of 256", [(2, 40)], num_heads=4, num_kv_heads=2, head_dim=256, rotary_dim=256, qk_norm=True),
    Case("partial rotation of a head", [(1, 40), (3, 9)], num_heads=4, num_kv_heads=2, head_dim=80, rotary_dim=32),
    Case("most rotates, normed", [(3, 9)], num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=48, qk_norm=True),
    Case("pages of 24", [(1, 177), (4, 9)], page_size=24),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the shapes of Llama 3.1 8B.

    The steps decode 1, 64 and 256 requests or process a chunk of 8192 tokens, with bf16 and fp8 cells.
    """
    from kernels.ops.rope_kv.triton import rope_kv

    found = []
    shapes: list[tuple[int, KVFormat]] = [(1, "dense"), (64, "dense"), (256, "dense"), (256, "fp8"), (8192, "dense")]
    for tokens, kv_format in shapes:
        requests = [(max(1, tokens // scale), 0)]
        case = Case("", requests, 32, 8, 128, 128, 16, 128**-0.5)
        steps = [make_step(case, torch.bfloat16, kv_format, device) for _ in range(4)]
        runs = tuple(
            lambda step=step: rope_kv(step.qkv, step.pages, step.inputs, step.geometry, step.layer) for step in steps
        )
        cell = 128 * (1 if kv_format == "fp8" else 2)
        num_bytes = requests[0][0] * (48 * 256 + 32 * 256 + 16 * cell + 512)
        found.append(Benchmark(f"rope_kv {tokens} tokens kv={kv_format}", runs, num_bytes))
    return found
