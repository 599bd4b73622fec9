"""Tests of the attention work list: the kernel against a loop, and invariants of every list."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.ops.attention_work import reference
from kernels.ops.attention_work.cases import CASES, LONG, MIXED, Case
from kernels.ops.attention_work.inputs import MAX_SPLITS, AttentionWork, make_work, max_decode_queries, split_size
from kernels.ops.attention_work.triton import build_work
from tests.fakes.pairs import slow

POISON = -77


def filled(case: Case, build, device: torch.device) -> AttentionWork:
    work = case.make_work(device)
    for buffer in (work.decode_items, work.prefill_tiles, work.counts, work.partials):
        buffer.fill_(POISON)
    bounds, contexts, shared = case.lengths(device)
    build(bounds, contexts, work, shared)
    return work


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_equals_loop(case: Case, device: torch.device) -> None:
    """Check that all lists are equal and that nothing is written after their ends."""
    actual = filled(case, build_work, device)
    expected = filled(case, reference.build_work, torch.device("cpu"))
    for name in ("counts", "partials", "decode_items", "prefill_tiles"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def keys_of(work: AttentionWork, case: Case) -> dict[int, list[tuple[int, int]]]:
    """Return the key ranges of each request's items."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for request, first, size, row in work.decode_items[: work.counts[0]].tolist():
        length = case.requests[request][1]
        ranges.setdefault(request, []).append((first, length if row < 0 else min(first + size, length)))
    return ranges


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_query_has_its_keys_and_scratch_rows_once(case: Case) -> None:
    work = filled(case, reference.build_work, torch.device("cpu"))
    ranges = keys_of(work, case)
    tiles = work.prefill_tiles[: work.counts[1]].tolist()
    rows: list[int] = []
    for r, (queries, length, shared) in enumerate(case.requests):
        first, results = work.partials[r].tolist()
        rows += range(first, first + results * queries)
        decodes = length > 0 and 0 < queries <= case.max_decode_queries
        if not decodes:
            assert r not in ranges
            starts = sorted(start for request, start in tiles if request == r)
            assert starts == (list(range(0, queries, case.prefill_tile)) if length else [])
            continue
        visible = 0 if case.window is None else max(0, length - queries - case.window + 1)
        ends = sorted(ranges[r])
        assert ends[0][0] <= visible if not (shared and results) else ends[0][0] == shared
        assert visible - ends[0][0] < split_size(length)
        assert ends[-1][1] == length
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    assert len(rows) == len(set(rows)) <= case.scratch_rows
    sizes = [size for _, _, size, _ in work.decode_items[: work.counts[0]].tolist()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("window", [slow(None), 300])
def test_splits_of_a_request_do_not_depend_on_the_others(window: int | None, device: torch.device) -> None:
    case = Case("together", MIXED[1:6] + LONG[1:5], window=window)
    together = filled(case, build_work, device)
    for r, request in enumerate(case.requests):
        alone = filled(Case("alone", (request,), window=window), build_work, device)
        items = together.decode_items[: together.counts[0]].cpu()
        mine = items[items[:, 0] == r]
        other = alone.decode_items[: alone.counts[0]].cpu()
        assert mine[:, 1:3].tolist() == other[:, 1:3].tolist()
        assert together.partials[r, 1] == alone.partials[0, 1]


@pytest.mark.parametrize("keys", [1, 256, 16_384, 16_385, 131_072, 2**31 - 1])
def test_split_size_is_smallest_within_split_limit(keys: int) -> None:
    size = split_size(keys)
    assert -(-keys // size) <= MAX_SPLITS
    assert size == split_size(1) or -(-keys // (size // 2)) > MAX_SPLITS


def test_smallest_tile_query_count() -> None:
    assert [max_decode_queries(32, heads) for heads in (32, 8, 4, 2, 1)] == [16, 4, 2, 1, 1]


def test_prefill_tile_bound_covers_all_tiles() -> None:
    for case in CASES:
        work = filled(case, reference.build_work, torch.device("cpu"))
        num_tokens = sum(queries for queries, _, _ in case.requests)
        bound = work.max_prefill_tiles(num_tokens, len(case.requests))
        assert work.counts[1] <= bound <= work.prefill_tiles.shape[0]


def test_invalid_arguments_are_rejected(device: torch.device) -> None:
    work = make_work(1, 2, device, max_decode_queries=1, prefill_tile=8, window=4)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="supports 1 requests, got 2"):
        build_work(bounds, bounds[1:], work)
    with pytest.raises(ValueError, match="window"):
        build_work(bounds[:2], bounds[1:2], work, bounds[1:2])
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        make_work(1, 1, device, max_decode_queries=1, prefill_tile=8, window=0)
    with pytest.raises(ValueError, match="prefill_tile"):
        make_work(1, 1, device, max_decode_queries=1, prefill_tile=0)
