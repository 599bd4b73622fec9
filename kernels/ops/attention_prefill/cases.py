"""Shapes of prefill attention for tests and benchmarks."""

from __future__ import annotations

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.attention.cases import Case, make_step
from kernels.ops.attention.kv_pages import KVFormat

FORMATS: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")

CASES = [
    Case("a prompt", [(70, 0)], num_heads=4, num_kv_heads=2),
    Case("one token", [(1, 0)], num_heads=4, num_kv_heads=2),
    Case("ragged", [(1, 70), (33, 0), (1, -1), (0, 20), (5, 130), (1, -1)], num_heads=3, num_kv_heads=1),
    Case("around the tile size", [(31, 1), (32, 0), (65, 63)], num_heads=4, num_kv_heads=4),
    Case("seven heads per KV head", [(9, 40)], num_heads=7, num_kv_heads=1),
    Case("window", [(40, 0), (3, 90), (1, 150)], num_heads=2, num_kv_heads=1, window=20),
    Case("window of one", [(3, 40)], num_heads=2, num_kv_heads=1, window=1),
    Case("window of a tile", [(40, 100)], num_heads=2, num_kv_heads=1, window=64),
    Case("soft cap", [(20, 50)], num_heads=2, num_kv_heads=1, softcap=3.0),
    Case("sinks", [(20, 50), (1, 3)], num_heads=4, num_kv_heads=2, sinks=True),
    Case("sinks with a window", [(20, 80)], num_heads=2, num_kv_heads=1, window=9, sinks=True, softcap=20.0),
    Case("heads of 80", [(5, 70)], num_heads=2, num_kv_heads=1, head_dim=80, rotary_dim=80),
    Case("heads of 96", [(5, 70)], num_heads=2, num_kv_heads=1, head_dim=96, rotary_dim=96),
    Case("heads of 128", [(5, 70)], num_heads=2, num_kv_heads=1, head_dim=128, rotary_dim=128),
    Case("heads of 256", [(5, 40)], num_heads=2, num_kv_heads=1, head_dim=256, rotary_dim=256),
    Case("heads of 24", [(5, 70)], num_heads=2, num_kv_heads=1, head_dim=24, rotary_dim=24),
    Case("pages of 24", [(5, 177)], num_heads=2, num_kv_heads=1, page_size=24),
    Case("pages of 128", [(5, 177)], num_heads=2, num_kv_heads=1, page_size=128),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the shapes of Llama 3.1 8B.

    The batches are prompts of 2048 and 8192 tokens, many short prompts, a chunk after a long context, and fp8 cells.
    """
    from kernels.ops.attention_prefill.triton import attention_prefill, prefill_tile
    from kernels.ops.attention_work.inputs import make_work
    from kernels.ops.attention_work.triton import build_work

    shapes: list[tuple[str, list[tuple[int, int]], KVFormat]] = [
        ("prompt of 2048", [(2048, 0)], "dense"),
        ("prompt of 8192", [(8192, 0)], "dense"),
        ("16 prompts of 512", [(512, 0)] * 16, "dense"),
        ("512 after 32768", [(512, 32768)], "dense"),
        ("512 after 32768, fp8", [(512, 32768)], "fp8"),
    ]
    found = []
    for name, requests, kv_format in shapes:
        scaled = [(max(1, tokens // scale), before // scale) for tokens, before in requests]
        case = Case("", scaled, 32, 8, 128, 128, 16, 128**-0.5)
        runs = []
        for _ in range(2):
            step = make_step(case, torch.bfloat16, kv_format, device)
            # The step's own keys and values are not written here, so random data is stored. Zeros would take less
            # power, and therefore less time.
            for memory in (step.pages.keys, step.pages.values):
                memory.copy_(torch.randn(memory.shape, dtype=torch.bfloat16, device=device))
            for scales in (step.pages.key_scales, step.pages.value_scales):
                if scales is not None:
                    scales.fill_(1.0)
            tokens = step.qkv.shape[0]
            queries = step.qkv[:, : 32 * 128].contiguous().view(tokens, 32, 128)
            size = prefill_tile(step.geometry, step.pages, torch.bfloat16, device)
            work = make_work(len(scaled), tokens, device, max_decode_queries=0, prefill_tile=size)
            build_work(step.inputs.cu_seqlens_q, step.inputs.seq_lens, work)
            out = torch.empty((tokens, 32 * 128), dtype=torch.bfloat16, device=device)
            runs.append(
                lambda step=step, queries=queries, work=work, out=out: attention_prefill(
                    queries, step.pages, step.inputs, step.geometry, None, work, out
                )
            )
        pairs = sum(tokens * before + tokens * (tokens + 1) // 2 for tokens, before in scaled)
        cells = sum(tokens + before for tokens, before in scaled) * 16 * 128 * (1 if kv_format == "fp8" else 2)
        num_bytes = cells + 2 * 2 * 32 * 128 * sum(tokens for tokens, _ in scaled)
        found.append(Benchmark(f"attention_prefill {name}", tuple(runs), num_bytes, 4 * 32 * 128 * pairs))
    return found
