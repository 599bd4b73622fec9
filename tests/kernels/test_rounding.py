"""Exact float32 sums must be rounded once to half precision: to nearest, ties to even."""

from __future__ import annotations

import pytest
import torch

from kernels.common.quantized import QuantizedActivation
from kernels.ops.attention_decode.cases import Case, make_tensors
from kernels.ops.grouped_linear.triton import grouped_linear, order_by_expert
from kernels.ops.linear_dense.triton import linear_dense
from kernels.ops.linear_fp8.reference import Fp8Weight
from kernels.ops.linear_fp8.triton import linear_fp8
from kernels.ops.linear_int8.triton import linear_int8
from kernels.ops.linear_weight_only.triton import linear
from kernels.ops.weight_values.layout import PackedWeight, empty_words, new_counters, num_groups, pack_rows
from kernels.ops.weight_values.triton import values_of
from tests.kernels.test_attention_decode import run

WIDTH = 1024
FEATURES = 48


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).double()


def assert_rounded(out: torch.Tensor, exact: torch.Tensor) -> None:
    """Check bitwise equality with the rounded sums, some of which were rounded up."""
    wanted = exact.to(out.dtype)
    assert (wanted.double().abs() > exact.abs()).any()
    assert torch.equal(out.cpu(), wanted)


@pytest.fixture
def x() -> torch.Tensor:
    """Return [3, WIDTH] integers whose products with one-digit integers sum to more than bfloat16 can hold."""
    return integers(-7, 9, 3, WIDTH)


@pytest.fixture
def weight() -> torch.Tensor:
    return integers(-7, 8, FEATURES, WIDTH)


def test_dense(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> None:
    out = linear_dense(x.bfloat16().to(device), weight.bfloat16().to(device), None)
    assert_rounded(out, x @ weight.T)


def test_experts(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> None:
    order = order_by_expert(torch.zeros((3, 1), dtype=torch.int32, device=device), 1)
    out = torch.empty((3, FEATURES), dtype=torch.bfloat16, device=device)
    grouped_linear(x.bfloat16().to(device), weight.bfloat16()[None].to(device), None, order, None, out)
    assert_rounded(out, x @ weight.T)


def test_int8(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> None:
    codes = QuantizedActivation(x.to(torch.int8).to(device), torch.ones((3, 1), device=device), torch.bfloat16)
    out = linear_int8(codes, weight.to(torch.int8).to(device), torch.ones(FEATURES, device=device), None)
    assert_rounded(out, x @ weight.T)


def test_fp8(x: torch.Tensor, weight: torch.Tensor, device: torch.device) -> None:
    codes = x.to(torch.float8_e4m3fn).to(device)
    packed = Fp8Weight(weight.to(torch.float8_e4m3fn).to(device), torch.ones(FEATURES, device=device))
    out = linear_fp8(QuantizedActivation(codes, torch.ones((3, 1), device=device), torch.bfloat16), packed, None)
    assert_rounded(out, x @ weight.T)


def packed_integers(weight: torch.Tensor, scale: float, device: torch.device) -> PackedWeight:
    words = empty_words(FEATURES, WIDTH, 4, device)
    pack_rows(words, 0, (weight + 8).to(torch.uint8).to(device))
    scales = torch.full((num_groups(WIDTH, 128), FEATURES), scale, dtype=torch.float16, device=device)
    return PackedWeight(words, scales, None, 4, 128, WIDTH, new_counters(FEATURES, device))


@pytest.mark.parametrize("rows", [3, 40, 70])  # splits for few rows, for many rows, and none
def test_weight_only(rows: int, weight: torch.Tensor, device: torch.device) -> None:
    x = integers(-7, 9, rows, WIDTH)
    out = linear(x.bfloat16().to(device), packed_integers(weight, 1.0, device), None)
    assert_rounded(out, x @ weight.T)


def test_decoded_weights(weight: torch.Tensor, device: torch.device) -> None:
    scale = 1 + 3 * 2.0**-9
    values = values_of(packed_integers(weight, scale, device), 0, FEATURES, torch.bfloat16)
    assert_rounded(values, weight * scale)


def test_decoding_attention(device: torch.device) -> None:
    """Use zero queries, so that the result is the mean of each head's two values."""
    case = Case("two keys", ((1, 2),), num_heads=2, num_kv_heads=2, dtype=torch.bfloat16)
    tensors = make_tensors(case, device)
    tensors.query.zero_()
    values = tensors.pages.values[int(tensors.inputs.block_table[0, 0])][:, :2].double()  # [num_kv_heads, 2, head_dim]
    assert_rounded(run(case, tensors), values.mean(dim=1).reshape(1, -1).cpu())
