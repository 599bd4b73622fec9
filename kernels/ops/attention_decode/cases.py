"""Shapes of decode attention for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages, quantize_cells
from kernels.ops.attention_work.inputs import AttentionWork, DecodeScratch, make_scratch, make_work, max_decode_queries


@dataclass(frozen=True)
class Case:
    """Requests as pairs (query tokens, context including them); context 0 is padding of a captured graph."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    kv_format: KVFormat = "dense"
    dtype: torch.dtype = torch.float32
    max_queries: int | None = None
    scratch_rows: int = 64

    def geometry(self) -> AttentionGeometry:
        """Return the constants of the op."""
        return AttentionGeometry(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim,
            self.page_size,
            self.head_dim**-0.5,
            self.softcap,
            self.window,
        )

    def make_work(self, device: torch.device) -> AttentionWork:
        """Return the buffers of the case's work list."""
        queries = self.max_queries
        return make_work(
            len(self.requests),
            sum(queries for queries, _ in self.requests),
            device,
            max_decode_queries=max_decode_queries(self.num_heads, self.num_kv_heads) if queries is None else queries,
            prefill_tile=32,
            window=self.window,
            scratch_rows=self.scratch_rows,
        )


MIXED = ((1, 1), (1, 256), (1, 400), (3, 3), (1, 0), (4, 259), (9, 40), (2, 513))

CASES = [
    Case("one token", ((1, 1),)),
    Case("mixed", MIXED),
    Case("no scratch", MIXED, scratch_rows=0),
    Case("scratch for some requests", MIXED, scratch_rows=10),
    Case("padding only", ((1, 0), (1, 0))),
    Case("heads of 80", ((1, 300), (2, 17)), head_dim=80),
    Case("heads of 96", ((1, 300), (2, 17)), head_dim=96),
    Case("heads of 128", ((1, 300), (2, 17)), head_dim=128),
    Case("heads of 256", ((1, 300), (2, 17)), head_dim=256),
    Case("one query per KV head", ((1, 300), (11, 280)), num_heads=3, num_kv_heads=3),
    Case("one KV head", ((1, 300), (1, 20)), num_heads=20, num_kv_heads=1),
    Case("three queries per KV head", ((1, 300), (5, 290)), num_heads=6),
    Case("many queries", ((8, 300), (5, 257), (1, 9)), max_queries=8),
    Case("pages of 24", ((1, 300), (3, 100)), page_size=24),
    Case("pages of 256", ((1, 300), (3, 100)), page_size=256),
    Case("window", MIXED, window=100),
    Case("window of one", ((1, 300), (3, 300)), window=1),
    Case("window across splits", ((1, 900), (2, 520)), window=512),
    Case("soft cap", ((1, 300), (3, 100)), softcap=5.0),
    Case("sinks", MIXED, sinks=True),
    Case("window, soft cap and sinks", MIXED, window=300, softcap=20.0, sinks=True),
]


@dataclass(frozen=True)
class Tensors:
    """Arguments of the launcher; cells that belong to no request are NaN, or have a scale of NaN."""

    query: torch.Tensor
    pages: KVPages
    inputs: AttentionInputs
    sinks: torch.Tensor | None


def make_tensors(
    case: Case, device: torch.device, num_spare_pages: int = 2, seed: int = 0, *, cells_on: torch.device | None = None
) -> Tensors:
    """Return random tensors in pages of random order, the same on every device.

    Args:
        case: Shapes and constants.
        device: Device of the tensors.
        num_spare_pages: Number of pages that belong to no request.
        seed: Seed of the random numbers.
        cells_on: Device on which keys and values are generated, which saves time for gigabytes of benchmark data.
            The values then differ from those of the default, the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    values = generator if cells_on is None else torch.Generator(cells_on).manual_seed(seed)
    size = case.page_size
    counts = [-(-context // size) for _, context in case.requests]
    order = torch.randperm(sum(counts) + num_spare_pages, generator=generator, dtype=torch.int32)
    table = torch.full((len(counts), max(1, *counts)), 2**31 - 1, dtype=torch.int32)
    shape = (order.numel(), case.num_kv_heads, size, case.head_dim)
    cells = [torch.randn(shape, generator=values, device=values.device).to(case.dtype) for _ in range(2)]
    held = torch.zeros((order.numel(), size), dtype=torch.bool)
    start = 0
    for r, count in enumerate(counts):
        table[r, :count] = order[start : start + count]
        for i, page in enumerate(table[r, :count].tolist()):
            held[page, : case.requests[r][1] - i * size] = True
        start += count
    pages = _store(cells, ~held.to(values.device), case.kv_format, device)
    queries = torch.tensor([0] + [queries for queries, _ in case.requests], dtype=torch.int32)
    inputs = AttentionInputs(
        positions=torch.zeros(0, dtype=torch.int32, device=device),
        cu_seqlens_q=queries.cumsum(0, dtype=torch.int32).to(device),
        seq_lens=torch.tensor([context for _, context in case.requests], dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        block_table=table.to(device),
        rope_table=torch.zeros(0, device=device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=max(context for _, context in case.requests),
    )
    query = torch.randn((int(queries.sum()), case.num_heads, case.head_dim), generator=generator) * 2
    sinks = torch.randn(case.num_heads, generator=generator).to(device) if case.sinks else None
    return Tensors(query.to(case.dtype).to(device), pages, inputs, sinks)


def _store(cells: list[torch.Tensor], free: torch.Tensor, kv_format: KVFormat, device: torch.device) -> KVPages:
    """Return pages on the device whose unused cells are poisoned with NaN, or with a scale of NaN."""
    places = free.unsqueeze(1).expand(cells[0].shape[:3])
    if kv_format == "dense":
        keys, values = (tensor.masked_fill(places.unsqueeze(-1), float("nan")) for tensor in cells)
        return KVPages(keys.to(device), values.to(device))
    parts = []
    for tensor in cells:
        codes, scales = quantize_cells(tensor, kv_format)
        parts.append((codes.to(device), scales.masked_fill(places, float("nan")).to(device)))
    (keys, key_scales), (values, value_scales) = parts
    return KVPages(keys, values, key_scales, value_scales, kv_format)


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the heads of Llama-3.1-8B.

    The batches are uniform ones in every format, one long request, and one long request among short ones.
    """
    long = 131_072 if scale == 1 else 300
    batches: list[tuple[str, KVFormat, tuple[tuple[int, int], ...]]] = [
        ("1 x 1k", "dense", ((1, 1024 // scale),)),
        ("1 x 128k", "dense", ((1, long),)),
        ("32 x 4k", "dense", ((1, 4096 // scale),) * max(1, 32 // scale)),
        ("256 x 1k", "dense", ((1, 1024 // scale),) * max(1, 256 // scale)),
        ("128k + 31 x 4k", "dense", ((1, long), *((1, 4096 // scale),) * max(1, 31 // scale))),
        ("32 x 4k, 4 queries", "dense", ((4, 4096 // scale),) * max(1, 32 // scale)),
    ]
    even = batches[2][2]
    batches += [("32 x 4k", "fp8", even), ("32 x 4k", "int8", even), ("32 x 4k", "int4", even)]
    return [_benchmark(device, *batch) for batch in batches]


def _benchmark(
    device: torch.device, name: str, kv_format: KVFormat, requests: tuple[tuple[int, int], ...]
) -> Benchmark:
    from kernels.ops.attention_decode.triton import attention_decode
    from kernels.ops.attention_work.triton import build_work

    case = Case(name, requests, 32, 8, 128, kv_format=kv_format, dtype=torch.bfloat16, scratch_rows=8192)
    work = case.make_work(device)
    scratch = make_scratch(work.scratch_rows, case.num_heads, case.head_dim, device)
    runs = []
    for seed in range(2):
        tensors = make_tensors(case, device, seed=seed, cells_on=device)
        out = torch.empty_like(tensors.query)
        build_work(tensors.inputs.cu_seqlens_q, tensors.inputs.seq_lens, work)

        def run(tensors: Tensors = tensors, out: torch.Tensor = out, scratch: DecodeScratch = scratch) -> None:
            attention_decode(tensors.query, tensors.pages, tensors.inputs, case.geometry(), work, scratch, out)

        runs.append(run)
    bits = {"dense": 16, "fp8": 8, "int8": 8, "int4": 4}[kv_format]
    cell = 128 * bits // 8 + (0 if kv_format == "dense" else 4)
    keys = sum(context for _, context in requests)
    products = sum(queries * context for queries, context in requests)
    return Benchmark(
        f"attention_decode {name} kv={kv_format}",
        tuple(runs),
        num_bytes=2 * keys * 8 * cell + 2 * sum(queries for queries, _ in requests) * 32 * 128 * 2,
        num_operations=4 * products * 32 * 128,
    )
