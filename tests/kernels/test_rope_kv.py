"""Tests of the norm, rotation and KV-cache write against the float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from kernels.ops.attention.cases import Case, Step, make_step
from kernels.ops.attention.kv_pages import KVFormat, KVPages, dequantize_cells
from kernels.ops.attention.reference import rotate_and_write
from kernels.ops.rope_kv.cases import CASES, FORMATS
from kernels.ops.rope_kv.triton import rope_kv
from tests.fakes.pairs import each_value
from tests.kernels.helpers import name_of

LARGEST_ERROR = {"fp8": 1 / 16, "int8": 1 / 127, "int4": 1 / 7}
"""Difference of two adjacent codes relative to a cell's largest value; a float32 sum may round a tie differently."""


def values_of(pages: KVPages) -> list[torch.Tensor]:
    if pages.format == "dense":
        return [pages.keys.float(), pages.values.float()]
    return [
        dequantize_cells(codes, scales, pages.format)
        for codes, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales))
    ]


def check(step: Step) -> None:
    expected = step.copy_of_pages()
    wanted = rotate_and_write(step.qkv, expected, step.inputs, step.geometry, step.layer, torch.float64)
    queries = rope_kv(step.qkv, step.pages, step.inputs, step.geometry, step.layer)
    relative, absolute = TOLERANCES[step.qkv.dtype]
    torch.testing.assert_close(queries, wanted.to(queries.dtype), rtol=relative, atol=absolute)
    for actual, other in zip(values_of(step.pages), values_of(expected)):
        if step.pages.format != "dense":
            absolute = LARGEST_ERROR[step.pages.format] * other.nan_to_num().abs().max().item() * 1.001
        torch.testing.assert_close(actual, other, rtol=relative, atol=absolute, equal_nan=True)


@each_value(case=CASES, kv_format=FORMATS, ids=name_of)
def test_cases(case: Case, kv_format: KVFormat, device: torch.device) -> None:
    check(make_step(case, torch.float32, kv_format, device))


@each_value(dtype=[torch.float16, torch.bfloat16], kv_format=FORMATS)
def test_dtypes(dtype: torch.dtype, kv_format: KVFormat, device: torch.device) -> None:
    check(make_step(CASES[3], dtype, kv_format, device))


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_value_codes_equal_the_reference(kv_format: KVFormat, device: torch.device) -> None:
    """Check values, which are only quantized, for bitwise equality."""
    step = make_step(CASES[0], torch.float32, kv_format, device)
    expected = step.copy_of_pages()
    rotate_and_write(step.qkv, expected, step.inputs, step.geometry, step.layer)
    rope_kv(step.qkv, step.pages, step.inputs, step.geometry, step.layer)
    written = step.inputs.slot_mapping[step.inputs.slot_mapping >= 0]
    page, slot = written // step.geometry.page_size, written % step.geometry.page_size
    codes = [pages.values.view(torch.uint8)[page, :, slot] for pages in (step.pages, expected)]
    assert torch.equal(*codes)
    torch.testing.assert_close(step.pages.value_scales, expected.value_scales, rtol=0, atol=0, equal_nan=True)


def test_float32_cells_with_bfloat16_inputs(device: torch.device) -> None:
    step = make_step(CASES[0], torch.bfloat16, "dense", device)
    pages = KVPages(step.pages.keys.float(), step.pages.values.float())
    check(dataclasses.replace(step, pages=pages))


def test_transposed_keys(device: torch.device) -> None:
    step = make_step(CASES[0], torch.float32, "dense", device)
    keys = step.pages.keys.transpose(-1, -2).contiguous().transpose(-1, -2)
    check(dataclasses.replace(step, pages=KVPages(keys, step.pages.values)))


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_cells_of_zeros_and_of_nan(kv_format: KVFormat, device: torch.device) -> None:
    step = make_step(Case("", [(3, 0)], num_heads=2, num_kv_heads=1), torch.float32, kv_format, device)
    step.qkv[0] = 0.0
    step.qkv[1, 7::64] = float("nan")
    rope_kv(step.qkv, step.pages, step.inputs, step.geometry, step.layer)
    page = step.inputs.block_table[0, 0]
    for values in values_of(step.pages):
        assert (values[page, 0, 0] == 0).all()
        assert values[page, 0, 1].isnan().any()
        assert values[page, 0, 2].isfinite().all()


def test_pages_beyond_the_range_of_32_bits(device: torch.device) -> None:
    """Test strides for which a 32-bit offset would overflow to another place of the memory."""
    step = make_step(Case("", [(2, 0)], num_heads=1, num_kv_heads=1), torch.float16, "dense", device)
    stride = 2**31 + 64  # offsets of page 1 overflow 32 bits to 64 - 2**31
    memory = torch.empty(stride + 16 * 64, dtype=torch.float16, device=device)  # only the touched pages are allocated
    far = memory.as_strided((2, 1, 16, 64), (stride, 1024, 64, 1))
    inputs = dataclasses.replace(step.inputs, slot_mapping=torch.tensor([16, 17], device=device))
    far[1] = float("nan")
    rope_kv(step.qkv, KVPages(far, far), inputs, step.geometry, step.layer)
    assert torch.equal(far[1, 0, :2], step.qkv.view(2, 3, 64)[:, 2])
    assert far[1, 0, 2:].isnan().all()


def test_nothing_to_do_and_wrong_shapes(device: torch.device) -> None:
    step = make_step(CASES[0], torch.float32, "dense", device)
    assert rope_kv(step.qkv[:0], step.pages, step.inputs, step.geometry, step.layer).shape == (0, 9, 64)
    with pytest.raises(ValueError, match="contiguous heads"):
        rope_kv(step.qkv[:, :-64], step.pages, step.inputs, step.geometry, step.layer)
    with pytest.raises(ValueError, match="65"):
        rope_kv(step.qkv, step.pages, step.inputs, dataclasses.replace(step.geometry, rotary_dim=65), step.layer)
