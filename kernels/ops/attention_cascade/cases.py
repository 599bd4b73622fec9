"""Batches with shared prefixes for the test and the benchmark of cascade attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from kernels.common.triton.compilations import Benchmark
from kernels.ops.attention.cascade import CascadeWork, SharedPrefix, cascade_work
from kernels.ops.attention_decode.cases import Case as DecodeCase
from kernels.ops.attention_decode.cases import Tensors, make_tensors
from kernels.ops.attention_work.inputs import make_scratch


@dataclass(frozen=True)
class Case:
    """A batch of decoding requests and the groups among them, by index."""

    batch: DecodeCase
    groups: tuple[SharedPrefix, ...]

    def make_tensors(self, device: torch.device, seed: int = 0) -> Tensors:
        """Return tensors in which the block tables of a group begin with the pages of the group's first request."""
        tensors = make_tensors(self.batch, device, seed=seed)
        table = tensors.inputs.block_table.clone()
        for group in self.groups:
            pages = group.num_keys // self.batch.page_size
            for request in group.requests[1:]:
                table[request, :pages] = table[group.requests[0], :pages]
        return dataclasses.replace(tensors, inputs=dataclasses.replace(tensors.inputs, block_table=table))

    def make_cascade(self, members_per_tile: int, device: torch.device) -> CascadeWork:
        """Return the work list of the groups."""
        queries = [queries for queries, _ in self.batch.requests]
        return cascade_work(self.groups, queries, members_per_tile, device)


THREE = ((1, 300), (1, 280), (2, 400))
TWO_GROUPS = ((1, 600), (4, 700), (1, 30), (1, 610), (9, 20), (1, 590), (3, 540), (1, 0))

CASES = [
    Case(DecodeCase("one group", THREE), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("two groups", TWO_GROUPS, sinks=True), (SharedPrefix((0, 3), 512), SharedPrefix((1, 5, 6), 528))),
    Case(DecodeCase("soft cap", THREE, softcap=8.0), (SharedPrefix((0, 1, 2), 256),)),
    Case(DecodeCase("scratch for one request", THREE, scratch_rows=4), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("no scratch", THREE, scratch_rows=0), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("heads of 80", THREE, head_dim=80), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("heads of 256", THREE, head_dim=256), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("one query per KV head", THREE, num_heads=2), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("20 queries per KV head", THREE[:2], num_heads=20, num_kv_heads=1), (SharedPrefix((0, 1), 272),)),
    Case(DecodeCase("bf16", THREE, dtype=torch.bfloat16), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("fp8", THREE, kv_format="fp8", dtype=torch.bfloat16), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("int8", THREE, kv_format="int8", dtype=torch.float16), (SharedPrefix((0, 1, 2), 272),)),
    Case(DecodeCase("int4", THREE, kv_format="int4"), (SharedPrefix((0, 1, 2), 272),)),
]


def benchmarks(device: torch.device, scale: int = 1) -> list[Benchmark]:
    """Return benchmarks with the heads of Llama-3.1-8B.

    128 requests share a prompt of 32k tokens and have 256 keys of their own.
    """
    from kernels.ops.attention_cascade.triton import attention_cascade, members_per_tile
    from kernels.ops.attention_decode.triton import attention_decode
    from kernels.ops.attention_work.triton import build_work

    shared, own, requests = (32_768, 256, 128) if scale == 1 else (256, 16, 4)
    batch = DecodeCase("prefix", ((1, own),) * requests, 32, 8, 128, dtype=torch.bfloat16, scratch_rows=16_384)
    batch = dataclasses.replace(batch, requests=((1, shared + own), *batch.requests[1:]))
    case = Case(batch, (SharedPrefix(tuple(range(requests)), shared),))
    work, geometry = batch.make_work(device), batch.geometry()
    scratch = make_scratch(work.scratch_rows, batch.num_heads, batch.head_dim, device)
    cascade = case.make_cascade(members_per_tile(torch.bfloat16, geometry), device)
    runs = []
    for seed in range(2):
        tensors = make_tensors(batch, device, seed=seed, cells_on=device)
        table = tensors.inputs.block_table[0].repeat(requests, 1)
        table[1:, shared // batch.page_size :] = tensors.inputs.block_table[1:, : own // batch.page_size]
        lengths = torch.full_like(tensors.inputs.seq_lens, shared + own)
        inputs = dataclasses.replace(tensors.inputs, block_table=table, seq_lens=lengths)
        tensors, out = dataclasses.replace(tensors, inputs=inputs), torch.empty_like(tensors.query)
        build_work(inputs.cu_seqlens_q, inputs.seq_lens, work, cascade.shared_lens)

        def run(tensors: Tensors = tensors, out: torch.Tensor = out) -> None:
            query, pages, inputs = tensors.query, tensors.pages, tensors.inputs
            attention_cascade(query, pages, inputs, geometry, work, cascade, scratch)
            attention_decode(query, pages, inputs, geometry, work, scratch, out)

        runs.append(run)
    return [
        Benchmark(
            f"attention_cascade {requests} x ({shared} shared + {own})",
            tuple(runs),
            num_bytes=2 * (shared + own * requests) * 8 * 128 * 2 + 2 * requests * 32 * 128 * 2,
            num_operations=4 * requests * (shared + own) * 32 * 128,
        )
    ]
