"""Batch-invariant linear layers compared with their float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from kernels.ops.linear_dense import cases
from kernels.ops.linear_dense import reference as linear_reference
from kernels.ops.linear_dense.triton import linear_dense
from tests.fakes.pairs import each_value
from tests.kernels.helpers import assert_same_bits, run_only_the_last_program


@each_value(shape=cases.SHAPES, dtype=cases.DTYPES, ids=str)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, width, num_out = shape
    x, weight = cases.random_layer(rows, width, num_out, dtype, torch.Generator(device).manual_seed(3))
    rtol, atol = TOLERANCES[dtype]
    bias = torch.linspace(-1, 1, num_out, device=device).to(dtype) if num_out % 2 else None
    out = torch.full((rows, num_out), float("nan"), dtype=dtype, device=device)
    assert linear_dense(x, weight, bias, out=out) is out
    torch.testing.assert_close(out, linear_reference.linear_dense(x, weight, bias), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_row_is_bitwise_equal_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = cases.random_layer(150, 200, 96, dtype, torch.Generator(device).manual_seed(4))
    whole = linear_dense(x, weight, None)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 40), slice(40, 150)):
        assert_same_bits(linear_dense(x[rows], weight, None), whole[rows])


def test_rows_of_a_wider_matrix(device: torch.device) -> None:
    x, weight = cases.random_layer(5, 64, 32, torch.float32, torch.Generator(device).manual_seed(4))
    wide = torch.full((5, 80), float("nan"), device=device)
    wide[:, 8:72] = x
    assert torch.equal(linear_dense(wide[:, 8:72], weight, None), linear_dense(x, weight, None))


def test_offsets_beyond_32_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the last of rows that are 2**30 values apart, in memory that is mostly never touched."""
    distance = 1 << 30
    x = torch.empty(2 * distance + 32, dtype=torch.float16, device=device)
    x[2 * distance :] = 1.0
    weight = torch.full((8, 32), 0.5, dtype=torch.float16, device=device)
    run_only_the_last_program(monkeypatch)
    out = linear_dense(x.as_strided((3, 32), (distance, 1)), weight, None)
    assert out[2].tolist() == [16.0] * 8


def test_zero_rows(device: torch.device) -> None:
    weight = torch.ones((8, 32), device=device)
    assert linear_dense(weight[:0], weight, None).shape == (0, 8)


def test_invalid_shapes_are_reported(device: torch.device) -> None:
    x, weight = torch.ones((2, 16), device=device), torch.ones((8, 32), device=device)
    with pytest.raises(ValueError, match=r"torch.float32 8 x 32 cannot multiply torch.float32 \[2, 16\]"):
        linear_dense(x, weight, None)
    with pytest.raises(ValueError, match=r"cannot multiply torch\.float16"):
        linear_dense(torch.ones((2, 32), device=device).half(), weight, None)
    with pytest.raises(ValueError, match=r"with strides \[1, 2\]"):
        linear_dense(torch.ones((32, 2), device=device).T, weight, None)
