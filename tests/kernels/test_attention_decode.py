"""Tests of decode attention against the float64 reference, and of the independence of a row from its batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from kernels.common.tolerances import TOLERANCES, of_attention
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention_decode import reference
from kernels.ops.attention_decode.cases import CASES, Case, Tensors, make_tensors
from kernels.ops.attention_decode.triton import attention_decode
from kernels.ops.attention_work.inputs import DecodeScratch, make_scratch
from kernels.ops.attention_work.triton import build_work
from tests.fakes.pairs import each_value, slow, some


def run(case: Case, tensors: Tensors) -> torch.Tensor:
    """Run the kernels with poisoned output and scratch, and return the output."""
    device = tensors.query.device
    work = case.make_work(device)
    scratch = make_scratch(work.scratch_rows, case.num_heads, case.head_dim, device)
    for part in (scratch.sums, scratch.maxima, scratch.weights):
        part.fill_(float("nan"))
    out = torch.full((tensors.query.shape[0], case.num_heads * case.head_dim), float("nan"), device=device)
    out = out.to(tensors.query.dtype)
    build_work(tensors.inputs.cu_seqlens_q, tensors.inputs.seq_lens, work)
    attention_decode(tensors.query, tensors.pages, tensors.inputs, case.geometry(), work, scratch, out, tensors.sinks)
    return out


def expected(case: Case, tensors: Tensors) -> torch.Tensor:
    out = torch.full((tensors.query.shape[0], case.num_heads * case.head_dim), float("nan"), dtype=torch.float64)
    geometry, queries = case.geometry(), case.make_work(torch.device("cpu")).max_decode_queries
    reference.attention_decode(tensors.query, tensors.pages, tensors.inputs, geometry, queries, out, tensors.sinks)
    return out


def check(case: Case, device: torch.device) -> None:
    cpu = make_tensors(case, torch.device("cpu"))
    actual = run(case, cpu if device.type == "cpu" else make_tensors(case, device)).cpu()
    relative, absolute = of_attention(case.dtype, case.kv_format)
    torch.testing.assert_close(
        actual.double(), expected(case, cpu), rtol=relative, atol=absolute, equal_nan=True, check_dtype=False
    )


# Other tests have heads of 80 and 96; the last case has windows and sinks.
@pytest.mark.parametrize(
    "case", some(CASES, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 20), ids=lambda case: case.name
)
def test_cases(case: Case, device: torch.device) -> None:
    """Check results, and that rows of prefill requests and of padding stay NaN."""
    check(case, device)


@each_value(dtype=[torch.bfloat16, torch.float16, torch.float32], kv_format=["dense", "fp8", "int8", "int4"], ids=str)
def test_formats(kv_format: KVFormat, dtype: torch.dtype, device: torch.device) -> None:
    requests = ((1, 1), (1, 300), (3, 70), (1, 0))
    check(Case("formats", requests, kv_format=kv_format, dtype=dtype, softcap=30.0, window=280, sinks=True), device)


@each_value(head_dim=[80, 96, 128, 256], kv_format=["fp8", "int8", "int4"])
def test_formats_of_other_heads(kv_format: KVFormat, head_dim: int, device: torch.device) -> None:
    check(Case("heads", ((1, 40), (2, 300)), head_dim=head_dim, kv_format=kv_format), device)


@pytest.mark.parametrize("kv_format", ["fp8", slow("int8"), slow("int4")])
def test_small_values_with_float16(kv_format: KVFormat, device: torch.device) -> None:
    """Test weights that are too small for float16 after multiplication with the scale of a value."""
    case = Case("small", ((1, 700), (2, 40)), kv_format=kv_format, dtype=torch.float16)
    tensors = make_tensors(case, device)
    wanted = run(case, tensors).double()
    assert tensors.pages.value_scales is not None
    tensors.pages.value_scales.mul_(2**-9)
    actual = run(case, tensors).double() * 2**9
    relative, absolute = TOLERANCES[torch.float16]
    torch.testing.assert_close(actual, wanted, rtol=relative, atol=absolute)


def test_e4m3_by_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the conversion of e4m3fn from bits, for GPUs without native support."""
    monkeypatch.setattr("kernels.ops.attention.triton_cells.native_fp8", lambda device: False)
    check(Case("bits", ((1, 40), (2, 300)), kv_format="fp8"), device)


def test_reference_is_torch_attention() -> None:
    case = Case("one request", ((3, 40),), num_heads=4, num_kv_heads=2)
    tensors = make_tensors(case, torch.device("cpu"))
    keys, values = reference.cells_of_request(tensors.pages, tensors.inputs.block_table[0], 40, case.page_size)
    mask = torch.ones((3, 40), dtype=torch.bool).tril(37)
    wanted = F.scaled_dot_product_attention(
        tensors.query.double().transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(expected(case, tensors), wanted.transpose(0, 1).reshape(3, -1))


@pytest.mark.parametrize("scratch_rows", [64, slow(0)])
def test_row_is_bitwise_equal_in_any_batch_and_scratch(scratch_rows: int, device: torch.device) -> None:
    """Compare a request alone, its splits merged from scratch, with the same request in a batch.

    In the batch its splits are merged in one work item.
    """
    requests = ((1, 700), (4, 259), (2, 513))
    case = Case("together", requests, sinks=True, scratch_rows=scratch_rows)
    tensors = make_tensors(case, device)
    together = run(case, tensors)
    bounds = tensors.inputs.cu_seqlens_q.tolist()
    for r in range(3):
        inputs = dataclasses.replace(
            tensors.inputs,
            cu_seqlens_q=torch.tensor([0, requests[r][0]], dtype=torch.int32, device=device),
            seq_lens=tensors.inputs.seq_lens[r : r + 1],
            block_table=tensors.inputs.block_table[r : r + 1],
        )
        query = tensors.query[bounds[r] : bounds[r + 1]].contiguous()
        alone = run(Case("alone", requests[r : r + 1]), dataclasses.replace(tensors, query=query, inputs=inputs))
        assert torch.equal(alone, together[bounds[r] : bounds[r + 1]])


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """Test pages whose byte offsets overflow 32 bits; the memory between the pages is never touched."""
    case = Case("far", ((1, 20),), page_size=32, dtype=torch.float16)
    tensors = make_tensors(case, device)
    own = int(tensors.inputs.block_table[0, 0])
    size = tensors.pages.keys[0].numel()
    memory = torch.empty(2**31 + 2 * size, dtype=torch.float16, device=device)
    cells = []
    for i, near in enumerate((tensors.pages.keys, tensors.pages.values)):
        far = memory.as_strided((2, *near.shape[1:]), (2**31, *near.stride()[1:]), i * size)
        far[1].copy_(near[own])
        cells.append(far)
    inputs = dataclasses.replace(tensors.inputs, block_table=torch.ones_like(tensors.inputs.block_table))
    actual = run(case, dataclasses.replace(tensors, pages=KVPages(*cells), inputs=inputs))
    assert torch.equal(actual, run(case, tensors))


def test_invalid_arguments_are_rejected(device: torch.device) -> None:
    case = Case("one", ((1, 20),))
    tensors = make_tensors(case, device)
    work = case.make_work(device)
    scratch = make_scratch(case.scratch_rows, case.num_heads, case.head_dim, device)
    out = torch.empty_like(tensors.query)

    def launch(
        query: torch.Tensor = tensors.query, out: torch.Tensor = out, scratch: DecodeScratch = scratch, **changes
    ) -> None:
        geometry = dataclasses.replace(case.geometry(), **changes)
        attention_decode(query, tensors.pages, tensors.inputs, geometry, work, scratch, out)

    with pytest.raises(ValueError, match="queries must be contiguous"):
        launch(query=tensors.query.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="output must be contiguous"):
        launch(out=out[:, :4])
    with pytest.raises(ValueError, match="window of None, but the layer has 8"):
        launch(window=8)
    with pytest.raises(ValueError, match="too small for 64 rows"):
        launch(scratch=make_scratch(63, case.num_heads, case.head_dim, device))
    many = dataclasses.replace(case, max_queries=33)
    with pytest.raises(ValueError, match="33 query tokens of 4 heads exceed the tile limit of 128"):
        run(many, tensors)
