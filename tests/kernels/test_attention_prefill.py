"""Tests of prefill attention against the float64 reference."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kernels.common.tolerances import of_attention
from kernels.ops.attention.cases import Case, Step, make_step
from kernels.ops.attention.inputs import AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention.reference import attend, rotate_and_write
from kernels.ops.attention_prefill.cases import CASES, FORMATS
from kernels.ops.attention_prefill.triton import attention_prefill, prefill_tile
from kernels.ops.attention_work.inputs import AttentionWork, make_work
from kernels.ops.attention_work.reference import build_work
from tests.kernels.helpers import assert_same_bits


def work_of(step: Step, inputs: AttentionInputs) -> AttentionWork:
    device = step.qkv.device
    size = prefill_tile(step.geometry, step.pages, step.qkv.dtype, device)
    num_requests = inputs.seq_lens.shape[0]
    work = make_work(num_requests, step.qkv.shape[0] + 3, device, max_decode_queries=0, prefill_tile=size)
    work.prefill_tiles.fill_(-(2**30))  # the rest of the list must not be read
    build_work(inputs.cu_seqlens_q, inputs.seq_lens, work)
    return work


def run(step: Step, queries: torch.Tensor, inputs: AttentionInputs | None = None) -> torch.Tensor:
    """Run the kernel with poisoned output and return the output.

    The queries are those of `inputs` if given, which may be a part of the step, else those of the whole step.
    """
    inputs = inputs or step.inputs
    out = torch.full((queries.shape[0], step.qkv.shape[1]), float("nan"), dtype=queries.dtype, device=queries.device)
    out = out[:, : queries.shape[1] * queries.shape[2]].contiguous()
    table = torch.full((inputs.block_table.shape[0], inputs.block_table.shape[1] + 5), 2**30, dtype=torch.int32)
    for row, length in enumerate(inputs.seq_lens.tolist()):
        count = -(-length // step.geometry.page_size)
        table[row, :count] = inputs.block_table[row, :count].cpu()
    inputs = dataclasses.replace(inputs, block_table=table.to(queries.device))
    attention_prefill(queries, step.pages, inputs, step.geometry, step.layer.sinks, work_of(step, inputs), out)
    return out


def rotated_queries(step: Step) -> torch.Tensor:
    """Return the rotated queries; the pages then hold the step's keys and values."""
    return rotate_and_write(step.qkv, step.pages, step.inputs, step.geometry, step.layer).to(step.qkv.dtype)


def check(step: Step) -> None:
    queries = rotated_queries(step)
    out = run(step, queries)
    wanted = attend(queries.double(), step.pages, step.inputs, step.geometry, step.layer)
    # Rows of a request; the others are padding and must not be written.
    rows = (step.inputs.seq_lens > 0).repeat_interleave(step.inputs.cu_seqlens_q.diff())
    relative, absolute = of_attention(queries.dtype, step.pages.format)
    torch.testing.assert_close(out[rows], wanted[rows].to(out.dtype), rtol=relative, atol=absolute)
    assert out[~rows].isnan().all()


@pytest.mark.parametrize(
    ("case", "dtype", "kv_format"),
    [
        *((case, torch.float32, "dense") for case in CASES),
        *itertools.product((CASES[index] for index in (2, 10, 11, 14)), (torch.float16, torch.bfloat16), FORMATS),
        *itertools.product((CASES[index] for index in (5, 12, 13, 16)), [torch.float32], ("fp8", "int8", "int4")),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_cases_dtypes_and_formats(case: Case, dtype: torch.dtype, kv_format: KVFormat, device: torch.device) -> None:
    check(make_step(case, dtype, kv_format, device))


def test_float32_cells_with_bfloat16_queries(device: torch.device) -> None:
    step = make_step(CASES[2], torch.bfloat16, "dense", device)
    check(dataclasses.replace(step, pages=KVPages(step.pages.keys.float(), step.pages.values.float())))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dtype", "kv_format"), [(torch.float32, "dense"), (torch.float16, "int8")])
def test_row_is_bitwise_equal_in_any_chunk_and_batch(
    dtype: torch.dtype, kv_format: KVFormat, window: int | None, device: torch.device
) -> None:
    """Check bitwise equality of tokens computed with another request, in chunks of odd sizes, and one at a time."""
    case = Case("", [(90, 3), (17, 0)], num_heads=4, num_kv_heads=2, window=window, sinks=True)
    step = make_step(case, dtype, kv_format, device)
    queries = rotated_queries(step)
    whole = run(step, queries)
    for start, end in ((0, 37), (37, 38), (38, 90), (89, 90), (61, 62)):
        lengths = torch.tensor([end + 3], dtype=torch.int32, device=device)
        bounds = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        alone = dataclasses.replace(
            step.inputs, cu_seqlens_q=bounds, seq_lens=lengths, block_table=step.inputs.block_table[:1]
        )
        part = run(step, queries[start:end].contiguous(), alone)
        assert_same_bits(part, whole[start:end])


def test_pages_beyond_the_range_of_32_bits(device: torch.device) -> None:
    """Test pages whose offsets overflow 32 bits; only the touched pages of the memory are allocated."""
    step = make_step(Case("", [(3, 14)], num_heads=1, num_kv_heads=1), torch.float16, "dense", device)
    queries = rotated_queries(step)
    near = run(step, queries)
    stride = 2**31 + 64
    far = []
    for cells in (step.pages.keys, step.pages.values):
        memory = torch.empty(stride + 16 * 64, dtype=torch.float16, device=device)
        strided = memory.as_strided((2, 1, 16, 64), (stride, 1024, 64, 1))
        for page in (0, 1):
            strided[page] = cells[step.inputs.block_table[0, page]]
        far.append(strided)
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    inputs = dataclasses.replace(step.inputs, block_table=table)
    out = run(dataclasses.replace(step, pages=KVPages(*far), inputs=inputs), queries)
    assert torch.equal(out, near)


def test_nan_stays_within_its_request(device: torch.device) -> None:
    step = make_step(CASES[3], torch.float32, "dense", device)
    step.qkv[40, 3] = float("nan")
    out = run(step, rotated_queries(step))
    assert out[40].isnan().any()
    assert out[:31].isfinite().all()
    assert out[63:].isfinite().all()


def test_invalid_arguments_are_rejected(device: torch.device) -> None:
    step = make_step(CASES[0], torch.float32, "dense", device)
    queries = rotated_queries(step)
    out = torch.empty((70, 256), device=device)
    work = make_work(1, 70, device, max_decode_queries=0, prefill_tile=5)
    with pytest.raises(ValueError, match="tiles of 5 queries"):
        attention_prefill(queries, step.pages, step.inputs, step.geometry, None, work, out)
    with pytest.raises(ValueError, match="must be contiguous"):
        work = work_of(step, step.inputs)
        attention_prefill(queries.transpose(0, 1), step.pages, step.inputs, step.geometry, None, work, out)
    many = dataclasses.replace(step.geometry, num_heads=256, num_kv_heads=1)
    with pytest.raises(ValueError, match="256 heads share"):
        prefill_tile(many, step.pages, torch.bfloat16, device)
