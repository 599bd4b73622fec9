"""Int8 products compared with their float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.common.quantized import ActivationQuantization, QuantizedActivation
from kernels.common.tolerances import TOLERANCES
from kernels.ops.linear_int8 import cases
from kernels.ops.linear_int8 import reference as linear_reference
from kernels.ops.linear_int8.reference import MAX_INPUTS, check
from kernels.ops.linear_int8.triton import linear_int8
from kernels.ops.quantize.reference import quantize
from tests.fakes.pairs import each_value
from tests.kernels.helpers import run_only_the_last_program


def random_input(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> QuantizedActivation:
    x = torch.randn((rows, width), generator=torch.Generator().manual_seed(rows + width)).to(dtype).to(device)
    return quantize(x, ActivationQuantization("int8_token"))


@each_value(shape=cases.SHAPES, dtype=cases.DTYPES, ids=str)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, width, num_out = shape
    codes, scales = cases.random_weight(num_out, width, torch.Generator(device).manual_seed(3))
    check(codes, scales)
    x = random_input(rows, width, dtype, device)
    rtol, atol = TOLERANCES[dtype]
    for bias in (None, torch.linspace(-1, 1, num_out, device=device).to(dtype)):
        out = torch.full((rows, num_out), float("nan"), dtype=dtype, device=device)
        assert linear_int8(x, codes, scales, bias, out=out) is out
        wanted = linear_reference.linear_int8(x, codes, scales, bias)
        torch.testing.assert_close(out, wanted, rtol=rtol, atol=atol)


def test_row_is_bitwise_equal_in_any_batch(device: torch.device) -> None:
    codes, scales = cases.random_weight(96, 384, torch.Generator(device).manual_seed(5))
    x = random_input(280, 384, torch.float32, device)
    whole = linear_int8(x, codes, scales, None)
    for rows in (slice(0, 1), slice(279, 280), slice(3, 40), slice(100, 200)):
        part = QuantizedActivation(x.codes[rows].contiguous(), x.scales[rows].contiguous(), x.dtype)
        assert torch.equal(linear_int8(part, codes, scales, None), whole[rows])


def test_the_largest_sums_are_exact(device: torch.device) -> None:
    width = 1 << 15
    codes = torch.full((2, width), -128, dtype=torch.int8, device=device)
    codes[1] = 127
    x = QuantizedActivation(codes[1:].clone(), torch.ones((1, 1), device=device), torch.float32)
    out = linear_int8(x, codes, torch.ones(2, device=device), None)
    assert out.tolist() == [[-128 * 127 * width, 127 * 127 * width]]


def test_offsets_beyond_32_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the last row of a 2 GiB weight, few pages of which are ever touched."""
    width, num_out = 1 << 16, (1 << 15) + 1
    codes = torch.empty((num_out, width), dtype=torch.int8, device=device)
    codes[-1] = 3
    x = QuantizedActivation(codes[-1:], torch.full((1, 1), 0.25, device=device), torch.float32)
    run_only_the_last_program(monkeypatch)
    assert linear_int8(x, codes, torch.full((num_out,), 0.5, device=device), None)[0, -1] == 9 * 0.125 * width


def test_zero_rows(device: torch.device) -> None:
    codes, scales = cases.random_weight(8, 32, torch.Generator(device).manual_seed(5))
    empty = QuantizedActivation(codes[:0], torch.zeros((0, 1), device=device), torch.bfloat16)
    assert linear_int8(empty, codes, scales, None).shape == (0, 8)


def test_invalid_shapes_are_reported(device: torch.device) -> None:
    codes, scales = cases.random_weight(8, 32, torch.Generator(device).manual_seed(5))
    with pytest.raises(ValueError, match=r"torch.int8 \[2, 64\] with scales \[2, 1\] do not fit an int8 weight 8 x 32"):
        linear_int8(random_input(2, 64, torch.float32, device), codes, scales, None)
    with pytest.raises(ValueError, match=f"a multiple of 16 inputs, at most {MAX_INPUTS}, not 24"):
        check(codes[:, :24].contiguous(), scales)
    with pytest.raises(ValueError, match=r"are float32 \[8\], not \[1\]"):
        check(codes, scales[:1])
