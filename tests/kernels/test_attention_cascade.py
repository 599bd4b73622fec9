"""Tests of cascade attention: detection of shared prefixes, the work list, and results equal to separate attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from kernels.ops.attention.cascade import SharedPrefix, cascade_work, shared_prefixes
from kernels.ops.attention_cascade import reference
from kernels.ops.attention_cascade.cases import CASES, THREE, Case
from kernels.ops.attention_cascade.triton import attention_cascade, members_per_tile
from kernels.ops.attention_decode import reference as decode_reference
from kernels.ops.attention_decode.cases import Case as DecodeCase
from kernels.ops.attention_decode.cases import Tensors
from kernels.ops.attention_decode.triton import attention_decode
from kernels.ops.attention_work.inputs import AttentionWork, DecodeScratch, make_scratch
from kernels.ops.attention_work.triton import build_work
from tests.fakes.pairs import some

POISON = float("nan")


def run_cascade(case: Case, tensors: Tensors) -> tuple[AttentionWork, DecodeScratch]:
    device, batch = tensors.query.device, case.batch
    work, geometry = batch.make_work(device), batch.geometry()
    scratch = make_scratch(work.scratch_rows, batch.num_heads, batch.head_dim, device)
    for part in (scratch.sums, scratch.maxima, scratch.weights):
        part.fill_(POISON)
    cascade = case.make_cascade(members_per_tile(batch.dtype, geometry), device)
    build_work(tensors.inputs.cu_seqlens_q, tensors.inputs.seq_lens, work, cascade.shared_lens)
    attention_cascade(tensors.query, tensors.pages, tensors.inputs, geometry, work, cascade, scratch)
    return work, scratch


@pytest.mark.parametrize("case", some(CASES, 0, 1, 3, 4, 6, 8, 9, 10), ids=lambda case: case.batch.name)
def test_merged_with_decode_equals_full_attention(case: Case, device: torch.device) -> None:
    tensors = case.make_tensors(device)
    geometry = case.batch.geometry()
    work, scratch = run_cascade(case, tensors)
    out = torch.full_like(tensors.query, POISON).flatten(1)
    attention_decode(tensors.query, tensors.pages, tensors.inputs, geometry, work, scratch, out, tensors.sinks)
    tensors = case.make_tensors(torch.device("cpu"))
    wanted = torch.full(out.shape, POISON, dtype=torch.float64)
    decode_reference.attention_decode(
        tensors.query, tensors.pages, tensors.inputs, geometry, work.max_decode_queries, wanted, tensors.sinks
    )
    relative, absolute = TOLERANCES[case.batch.dtype]
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=relative, atol=absolute, equal_nan=True)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.batch.name)
def test_partial_results(case: Case, device: torch.device) -> None:
    """Check that each partial result is in the row that the work list gives, and that no other row is written."""
    work, scratch = run_cascade(case, case.make_tensors(device))
    tensors = case.make_tensors(torch.device("cpu"))
    written = torch.zeros(work.scratch_rows, dtype=torch.bool)
    for group in case.groups:
        for request in group.requests:
            first, results = work.partials[request].tolist()
            queries = case.batch.requests[request][0]
            for query in range(queries if results else 0):
                found = reference.partial_results(
                    tensors.query, tensors.pages, tensors.inputs, case.batch.geometry(), group, request, query
                )
                for i, (maxima, weights, sums) in enumerate(found):
                    row = first + i * queries + query
                    written[row] = True
                    for actual, wanted in (
                        (scratch.maxima, maxima),
                        (scratch.weights, weights),
                        (scratch.sums, sums),
                    ):
                        torch.testing.assert_close(actual[row].cpu().double(), wanted, rtol=1e-5, atol=2e-5)
    assert written.any()
    assert torch.equal(scratch.maxima[:, 0].isnan().cpu(), ~written)


def tables(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables padded with garbage, and the number of pages of each."""
    counts = np.array([len(row) for row in rows])
    found = np.full((len(rows), counts.max() + 1), 7, dtype=np.int32)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found, counts


def prefix(start: int, pages: int) -> list[int]:
    return list(range(start, start + pages))


def test_shared_prefix_is_found_for_any_request_order() -> None:
    block_tables, counts = tables(
        [*prefix(1000, 40), 1, 2],
        prefix(2000, 40),
        [*prefix(1000, 40), 3],
        [*prefix(1000, 35), 4, 5, 6],
        prefix(1000, 31),
        [9, *prefix(1000, 40)],
        [*prefix(1000, 40), 8],
    )
    assert shared_prefixes(block_tables, counts, 16) == [SharedPrefix((0, 2, 3, 6), 35 * 16)]


def test_groups_maximize_saved_reads() -> None:
    """Test a batch in which all requests share a short prefix and some share a long one."""
    long, short = prefix(100, 200), prefix(100, 40)
    block_tables, counts = tables(*([*long, i] for i in range(4)), *([*short, 5000 + i] for i in range(4)))
    assert shared_prefixes(block_tables, counts, 16) == [
        SharedPrefix((0, 1, 2, 3), 200 * 16),
        SharedPrefix((4, 5, 6, 7), 40 * 16),
    ]


def test_unrelated_request_does_not_shorten_a_group() -> None:
    long = prefix(100, 200)
    block_tables, counts = tables([*prefix(100, 40), 1], *([*long, 300 + i] for i in range(4)))
    assert shared_prefixes(block_tables, counts, 16) == [SharedPrefix((1, 2, 3, 4), 200 * 16)]


def test_small_groups_and_short_prefixes_are_not_shared() -> None:
    block_tables, counts = tables(*([*prefix(100, 40), i] for i in range(3)))
    assert shared_prefixes(block_tables, counts, 16) == []
    assert shared_prefixes(block_tables, counts, 8) == []
    assert shared_prefixes(block_tables, counts, 16, min_requests=3) == [SharedPrefix((0, 1, 2), 640)]
    assert shared_prefixes(block_tables, np.zeros(3, dtype=np.int64), 16, min_requests=2) == []
    assert shared_prefixes(block_tables[:0], counts[:0], 16) == []


def test_work_list_covers_every_query_and_key_once() -> None:
    group = SharedPrefix((1, 4, 5), 40_000 // 16 * 16)
    work = cascade_work([group], [1, 2, 1, 1, 3, 1], 4, torch.device("cpu"))
    assert work.members.tolist() == [[1, 0], [1, 1], [4, 0], [4, 1], [4, 2], [5, 0]]
    assert work.shared_lens.tolist() == [0, group.num_keys, 0, 0, group.num_keys, group.num_keys]
    covered = np.zeros((6, group.num_keys), dtype=np.int64)
    for (first, count, key, index), end in zip(work.items.tolist(), work.ends.tolist()):
        covered[first : first + count, key:end] += 1
        assert count <= 4
        assert key == index * 1024
    assert (covered == 1).all()


def test_invalid_arguments_are_rejected(device: torch.device) -> None:
    block_tables, counts = tables(*([*prefix(100, 40), i] for i in range(4)))
    with pytest.raises(ValueError, match="at least 256"):
        shared_prefixes(block_tables, counts, 16, min_keys=16)
    with pytest.raises(ValueError, match="num_full_pages"):
        shared_prefixes(block_tables, counts[:2], 16)
    with pytest.raises(ValueError, match="request 1 is in two"):
        cascade_work([SharedPrefix((0, 1), 512), SharedPrefix((1, 2), 512)], [1] * 3, 4, device)
    case = Case(DecodeCase("window", THREE), CASES[0].groups)
    tensors = case.make_tensors(device)
    work, scratch = run_cascade(case, tensors)
    geometry = dataclasses.replace(case.batch.geometry(), window=8)
    with pytest.raises(ValueError, match="window, got 8"):
        attention_cascade(
            tensors.query, tensors.pages, tensors.inputs, geometry, work, case.make_cascade(4, device), scratch
        )
