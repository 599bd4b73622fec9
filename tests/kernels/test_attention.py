"""Tests of paged attention: the CPU kernel against a float64 reference, and the reference against torch."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kernels.common.cpu import bf16
from kernels.common.tolerances import TOLERANCES
from kernels.ops.attention import cpu, reference
from kernels.ops.attention.cases import CASES, Case, make_tensors
from kernels.ops.attention.inputs import LayerConstants
from kernels.ops.attention.kv_pages import key_cells, value_cells
from tests.fakes.pairs import each_value, some
from tests.kernels.helpers import name_of

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]
needs_pairs = pytest.mark.skipif(not bf16.supported(), reason="the processor has no AVX512-BF16")
# Every combination is a kernel to compile, so each size appears in only a few of them.
GEOMETRIES = [
    Case(
        f"{group} queries per KV head of {dim}, pages of {page}",
        [(1, 255), (40, 101), (1, 4)],
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=dim,
        rotary_dim=64,
        page_size=page,
    )
    for group, dim, page in (
        (2, 128, 8), (7, 96, 16), (12, 64, 256), (1, 64, 32), (4, 96, 24), (6, 64, 8), (8, 128, 32),
    )
]  # fmt: skip
CELL_GEOMETRIES = [
    Case(
        f"{heads} heads of {dim}, {kv_heads} KV heads, {rotary} rotary dimensions, pages of {page}",
        [(1, 277), (20, 9), (1, 40)],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        page_size=page,
    )
    for heads, kv_heads, dim, rotary, page in (
        (4, 1, 96, 96, 256), (16, 2, 64, 32, 16), (4, 4, 128, 128, 24), (12, 2, 64, 64, 8)
    )
]  # fmt: skip
LIMITED = [
    Case("window", [(1, 0), (1, 300), (1, 136), (50, 0), (37, 250)], window=40),
    Case("window of a block", [(1, 300), (1, 127), (150, 20)], window=128),
    Case("window of one", [(1, 33), (20, 0)], window=1),
    Case("window with pages of 8", [(1, 177), (40, 99)], page_size=8, window=21, num_heads=12, num_kv_heads=2),
    Case("soft cap", [(1, 190), (60, 100)], softcap=5.0),
    Case("soft cap and window", [(1, 190), (60, 100)], softcap=30.0, window=70),
]


def run_cpu(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype, tensors):
    geometry = case.geometry()
    assert cpu.supported(geometry, dtype, kv_dtype)
    op = cpu.PagedAttention(geometry, dtype, kv_dtype, paired=tensors.pages().paired)
    prepared = cpu.PreparedAttention(tensors.inputs, geometry, cpu.make_tiles(tensors.inputs))
    return op(tensors.qkv, tensors.keys, tensors.values, prepared)


@each_value(dtypes=DTYPES, case=CASES, ids=name_of)
def test_context_lengths(case: Case, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(case, *dtypes)


@pytest.mark.parametrize("case", [*some(LIMITED, 0, 3, 5), *some(CELL_GEOMETRIES, 0)], ids=name_of)
def test_geometries_windows_and_soft_caps(case: Case) -> None:
    check(case, torch.float32, torch.float32)


def check(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Check pages of single cells, which every processor supports."""
    actual, expected = (make_tensors(case, dtype, kv_dtype, paired=False) for _ in range(2))
    out = run_cpu(case, dtype, kv_dtype, actual)
    wanted = reference.paged_attention(
        expected.qkv, expected.pages(), expected.inputs, case.geometry(), LayerConstants(), torch.float64
    )
    relative, absolute = TOLERANCES[torch.bfloat16 if torch.bfloat16 in (dtype, kv_dtype) else torch.float32]
    torch.testing.assert_close(out, wanted, rtol=relative, atol=absolute)
    torch.testing.assert_close(actual.keys, expected.keys, rtol=relative, atol=absolute, equal_nan=True)
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)


@needs_pairs
@each_value(dtype=[torch.bfloat16, torch.float32], case=CASES, ids=name_of)
def test_context_lengths_with_paired_cells(case: Case, dtype: torch.dtype) -> None:
    check_pairs(case, dtype)


@needs_pairs
@pytest.mark.parametrize("case", [*LIMITED, *some(GEOMETRIES, 1, 2)], ids=name_of)
def test_geometries_windows_and_soft_caps_with_paired_cells(case: Case) -> None:
    check_pairs(case, torch.float32)


def check_pairs(case: Case, dtype: torch.dtype) -> None:
    actual, expected = (make_tensors(case, dtype, torch.bfloat16, paired=True) for _ in range(2))
    out = run_cpu(case, dtype, torch.bfloat16, actual)
    geometry = case.geometry()
    query = reference.rotate_and_write(expected.qkv, expected.pages(), expected.inputs, geometry, LayerConstants())
    # The kernel rounds queries after scaling them by this factor: scores are in units of log 2, or in those of tanh.
    factor = geometry.scale / math.log(2) if geometry.softcap is None else geometry.scale * 2 / geometry.softcap
    factor *= 1.0 if geometry.softcap is None else 1 / math.log(2)
    rounded = (query * factor).bfloat16().double() / factor
    wanted = reference.attend(rounded, expected.pages(), expected.inputs, geometry, LayerConstants())
    # Each weight, and their sum, is rounded by at most 2^-9 of its value, which moves a weighted mean by at most 2^-8
    # of the largest value. If the two implementations rotate a query to different sides of a tie, it is rounded
    # differently, which is rare and moves a score by a few thousandths. The bfloat16 result is rounded once more.
    largest = float(value_cells(expected.values).nan_to_num(0).abs().max())
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8 if dtype is torch.bfloat16 else 0, atol=2**-8 * largest)
    keys, wanted_keys = actual.keys.float(), expected.keys.float()
    torch.testing.assert_close(keys, wanted_keys, rtol=2**-7, atol=1e-6, equal_nan=True)
    differing = float((keys != wanted_keys).logical_and(~keys.isnan()).float().mean())
    assert differing < 1e-3, "more keys differ than rounding ties explain"
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)


LAYOUTS = [
    pytest.param(torch.float32, torch.float32, False, id="f32"),
    pytest.param(torch.bfloat16, torch.bfloat16, False, id="cells"),
    pytest.param(torch.bfloat16, torch.bfloat16, True, id="pairs", marks=needs_pairs),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "paired"), LAYOUTS)
@pytest.mark.parametrize("window", [None, 50])
def test_row_is_bitwise_equal_in_any_batch_and_chunk(
    dtype: torch.dtype, kv_dtype: torch.dtype, paired: bool, window: int | None
) -> None:
    """Check bitwise equality of tokens computed alone, in chunks, and in one step with other requests."""
    case = Case("mixed", [(1, 200), (45, 0), (1, 3), (7, 121), (140, 30)], window=window)
    together = make_tensors(case, dtype, kv_dtype, paired=paired)
    whole = run_cpu(case, dtype, kv_dtype, together)
    inputs = together.inputs
    bounds = inputs.cu_seqlens_q.tolist()
    for request, (start, end) in enumerate(pairwise(bounds)):
        for count in (1, 5, 17):
            for first in {start, (start + end) // 2, max(start, end - count)}:
                last = min(first + count, end)
                part = dataclasses.replace(
                    inputs,
                    positions=inputs.positions[first:last],
                    cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
                    seq_lens=inputs.positions[last - 1 : last] + 1,
                    slot_mapping=inputs.slot_mapping[first:last],
                    block_table=inputs.block_table[request : request + 1],
                )
                alone = run_cpu(
                    case, dtype, kv_dtype, dataclasses.replace(together, qkv=together.qkv[first:last], inputs=part)
                )
                assert torch.equal(alone, whole[first:last]), f"request {request}, tokens {first} to {last}"


@pytest.mark.parametrize(("dtype", "kv_dtype", "paired"), LAYOUTS)
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), -1e38])
def test_stale_page_contents_do_not_affect_results(
    dtype: torch.dtype, kv_dtype: torch.dtype, paired: bool, stale: float
) -> None:
    """Test contexts with odd and even ends, including those that fill one block of keys or one page exactly."""
    case = Case("ends", [(1, n) for n in (0, 1, 14, 15, 16, 126, 127, 128)] + [(18, 0), (19, 108)])
    clean, dirty = (make_tensors(case, dtype, kv_dtype, paired=paired) for _ in range(2))
    for tensor in (clean.keys, clean.values):
        tensor.nan_to_num_(0.0)
    for tensor in (dirty.keys, dirty.values):
        tensor.nan_to_num_(stale)
    out = run_cpu(case, dtype, kv_dtype, dirty)
    assert bool(out.isfinite().all())
    assert torch.equal(out, run_cpu(case, dtype, kv_dtype, clean))


@needs_pairs
def test_threads_sharing_a_pair_of_slots_lose_no_value() -> None:
    """Test that concurrent writes preserve each other's values when blocks of tokens end within pairs."""
    case = Case("odd starts", [(8, 1), (8, 3), (8, 5), (64, 7)] * 4, num_heads=2, num_kv_heads=2)
    for _ in range(5):
        actual, expected = (make_tensors(case, torch.float32, torch.bfloat16, paired=True) for _ in range(2))
        run_cpu(case, torch.float32, torch.bfloat16, actual)
        reference.rotate_and_write(expected.qkv, expected.pages(), expected.inputs, case.geometry(), LayerConstants())
        torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("softcap", [None, 10.0])
def test_reference_reads_paired_cells_like_single_cells(softcap: float | None) -> None:
    case = Case("both", [(1, 40), (20, 9), (2, 0)], head_dim=24, rotary_dim=24, page_size=4, softcap=softcap)
    cells, pairs = (make_tensors(case, torch.float32, torch.bfloat16, paired=paired) for paired in (False, True))
    assert pairs.pages().paired and not cells.pages().paired
    results = [
        reference.paged_attention(one.qkv, one.pages(), one.inputs, case.geometry(), LayerConstants())
        for one in (cells, pairs)
    ]
    assert torch.equal(*results)
    torch.testing.assert_close(key_cells(pairs.keys), cells.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(value_cells(pairs.values), cells.values, rtol=0, atol=0, equal_nan=True)


def test_reference_is_causal_attention_over_rotated_heads() -> None:
    case = Case("prefill", [(37, 0)], num_heads=6, num_kv_heads=2)
    tensors = make_tensors(case, torch.float32, torch.float32)
    out = reference.paged_attention(tensors.qkv, tensors.pages(), tensors.inputs, case.geometry(), LayerConstants())
    query, key, value = tensors.qkv.view(37, 10, 64).split([6, 2, 2], dim=1)
    rotated = []
    for heads in (query, key):
        pairs = torch.complex(heads[..., :32], heads[..., 32:])
        table = tensors.inputs.rope_table[:37, None]
        turned = pairs * torch.complex(table[..., :32], table[..., 32:])
        rotated.append(torch.cat((turned.real, turned.imag), dim=-1).transpose(0, 1))
    wanted = F.scaled_dot_product_attention(
        rotated[0], rotated[1], value.transpose(0, 1), is_causal=True, enable_gqa=True, scale=case.scale
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1).reshape(37, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 24, "rotary_dim": 24}, {"page_size": 4}, {"rotary_dim": 16}],
)
def test_unsupported_shapes_use_the_reference(change: dict) -> None:
    geometry = dataclasses.replace(CASES[0].geometry(), **change)
    assert not cpu.supported(geometry, torch.float32, torch.float32)


def test_reference_window_and_softcap() -> None:
    case = Case("decode", [(1, 30), (4, 30)], num_heads=2, num_kv_heads=1)
    tensors = make_tensors(case, torch.float32, torch.float32)
    geometry = dataclasses.replace(case.geometry(), window=8, softcap=3.0)
    out = reference.paged_attention(tensors.qkv, tensors.pages(), tensors.inputs, geometry, LayerConstants())
    inputs = tensors.inputs
    for row, request in enumerate([0, 1, 1, 1, 1]):
        position = int(inputs.positions[row])
        places = [
            (int(inputs.block_table[request, i // 16]), i % 16) for i in range(max(0, position - 7), position + 1)
        ]
        key = torch.stack([tensors.keys[page, 0, slot] for page, slot in places])
        value = torch.stack([tensors.values[page, 0, slot] for page, slot in places])
        heads = tensors.qkv[row].view(4, 64)[None, :2]
        query = reference.rotate(heads, inputs.positions[row : row + 1], inputs.rope_table)[0]
        scores = 3.0 * torch.tanh(query @ key.T * case.scale / 3.0)
        wanted = torch.softmax(scores, dim=-1) @ value
        torch.testing.assert_close(out[row].view(2, 64), wanted, rtol=1e-5, atol=1e-5)
