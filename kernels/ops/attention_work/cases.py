"""Batches for the test and the benchmark of the work list."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.attention_work.inputs import AttentionWork, make_work


@dataclass(frozen=True)
class Case:
    """Requests as (query tokens, context including them, shared prefix)."""

    name: str
    requests: tuple[tuple[int, int, int], ...]
    max_decode_queries: int = 4
    prefill_tile: int = 32
    window: int | None = None
    scratch_rows: int = 4096

    def lengths(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return cu_seqlens_q [R + 1], seq_lens [R], and shared_lens [R] or None if there are no shared prefixes."""
        queries, contexts, shared = (torch.tensor(column, dtype=torch.int32) for column in zip(*self.requests))
        bounds = torch.zeros(len(self.requests) + 1, dtype=torch.int32)
        bounds[1:] = queries.cumsum(0)
        return bounds.to(device), contexts.to(device), shared.to(device) if bool(shared.any()) else None

    def make_work(self, device: torch.device) -> AttentionWork:
        """Return buffers that are just large enough for the case."""
        return make_work(
            len(self.requests),
            max(1, sum(queries for queries, _, _ in self.requests)),
            device,
            max_decode_queries=self.max_decode_queries,
            prefill_tile=self.prefill_tile,
            window=self.window,
            scratch_rows=self.scratch_rows,
        )


MIXED = ((1, 1, 0), (1, 256, 0), (1, 257, 0), (70, 70, 0), (4, 5000, 0), (5, 5, 0), (1, 0, 0), (33, 900, 0), (0, 9, 0))
LONG = ((1, 900, 0), (1, 40_000, 0), (2, 16_385, 0), (3, 16_384, 0), (1, 131_072, 0), (1, 2_000_000_000, 0))

CASES = [
    Case("one token", ((1, 1, 0),)),
    Case("mixed", MIXED),
    Case("nothing decodes", MIXED, max_decode_queries=0),
    Case("only single queries decode, small tiles", MIXED, max_decode_queries=1, prefill_tile=8),
    Case("padding only", ((1, 0, 0),) * 3),
    Case("long", LONG),
    Case("window", MIXED + LONG, window=300),
    Case("window of one", MIXED + LONG, window=1),
    Case("scratch for some requests", LONG, scratch_rows=100),
    Case("no scratch", MIXED + LONG, scratch_rows=0),
    Case("shared", ((1, 1000, 512), (2, 700, 512), (1, 300, 0), (40, 600, 0), (1, 40_000, 32_768), (1, 513, 512))),
    Case("shared, scratch for some requests", ((1, 1000, 512), (2, 700, 512), (1, 20_000, 512)), scratch_rows=82),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks: 256 decoding requests, and a prefill of 8192 tokens together with some decoding requests."""
    from kernels.ops.attention_work.triton import build_work

    batches = {
        "decode 256": ((1, 4096, 0),) * max(1, 256 // scale),
        "prefill 8192 + decode 31": ((8192 // scale, 8192 // scale, 0), *((1, 4096, 0),) * max(1, 31 // scale)),
    }
    found = []
    for name, requests in batches.items():
        case = Case(name, requests)
        bounds, contexts, _ = case.lengths(device)
        work = case.make_work(device)
        written = 16 * sum(16 if queries == 1 else queries // 64 for queries, _, _ in requests)

        def run(bounds: torch.Tensor = bounds, contexts: torch.Tensor = contexts, work: AttentionWork = work) -> None:
            build_work(bounds, contexts, work)

        found.append(Benchmark(f"attention_work {name}", (run,), 8 * len(requests) + written))
    return found
