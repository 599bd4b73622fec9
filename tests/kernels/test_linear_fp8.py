"""FP8 products compared with their float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.common.quantized import BLOCK, QuantizedActivation
from kernels.common.tolerances import TOLERANCES
from kernels.common.triton.launch import native_fp8
from kernels.ops.linear_fp8 import cases
from kernels.ops.linear_fp8 import reference as linear_reference
from kernels.ops.linear_fp8.reference import Fp8Weight, check
from kernels.ops.linear_fp8.triton import linear_fp8, tile_for
from kernels.ops.quantize.reference import quantize
from tests.fakes.pairs import each_value
from tests.kernels.helpers import assert_same_bits, run_only_the_last_program


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare results; on a GPU, float32 has the tolerance of Hopper's FP8 units."""
    rtol, atol = TOLERANCES[torch.float8_e4m3fn if out.dtype is torch.float32 and out.is_cuda else out.dtype]
    torch.testing.assert_close(out.double(), wanted.double(), rtol=rtol, atol=atol)


def random_input(rows: int, width: int, kind: str, dtype: torch.dtype, device: torch.device) -> QuantizedActivation:
    x = torch.randn((rows, width), generator=torch.Generator().manual_seed(rows + width)).to(dtype).to(device)
    return quantize(x, cases.quantization(kind, device))


@each_value(shape=cases.SHAPES, kinds=cases.KINDS, ids=str)
def test_products(shape: tuple[int, int, int], kinds: tuple[str, str], device: torch.device) -> None:
    kind, activation = kinds
    rows, width, num_out = shape
    for dtype in cases.DTYPES:
        weight = cases.random_weight(kind, num_out, width, torch.Generator(device).manual_seed(3))
        check(weight.codes, weight.scales)
        x = random_input(rows, width, activation, dtype, device)
        bias = torch.linspace(-1, 1, num_out, device=device).to(dtype) if num_out % 2 else None
        out = torch.full((rows, num_out), float("nan"), dtype=dtype, device=device)
        assert linear_fp8(x, weight, bias, out=out) is out
        close(out, linear_reference.linear_fp8(x, weight, bias))


def test_every_tile_configuration_gives_the_same_result(device: torch.device) -> None:
    weight = cases.random_weight("block", 160, 256, torch.Generator(device).manual_seed(4))
    x = random_input(300, 256, "fp8_block", torch.float32, device)
    wanted = linear_reference.linear_fp8(x, weight, None)
    tiles = set()
    for rows in (1, 40, 70, 300):
        part = QuantizedActivation(x.codes[:rows], x.scales[:rows], x.dtype)
        tiles.add(tile_for(rows, True, True, False))
        close(linear_fp8(part, weight, None), wanted[:rows])
    assert len(tiles) == 3


@pytest.mark.parametrize(("kind", "activation"), cases.KINDS[1:3])
def test_batch_invariant_row_is_bitwise_equal_in_any_batch(kind, activation, device: torch.device) -> None:
    weight = cases.random_weight(kind, 96, 384, torch.Generator(device).manual_seed(5))
    x = random_input(70, 384, activation, torch.float32, device)
    whole = linear_fp8(x, weight, None, invariant=True)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 40)):
        part = QuantizedActivation(x.codes[rows].contiguous(), x.scales[rows].contiguous(), x.dtype)
        assert_same_bits(linear_fp8(part, weight, None, invariant=True), whole[rows])


def test_every_code(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test every code of a weight, natively and with the conversion for processors without e4m3fn."""
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    bits = bits[(bits & 127) != 127].repeat(16)[: 15 * 256].reshape(15, 256)
    weight = Fp8Weight(bits.view(torch.float8_e4m3fn), torch.full((15,), 0.01, device=device))
    x = random_input(5, 256, "fp8_token", torch.float32, device)
    wanted = linear_reference.linear_fp8(x, weight, None)
    for native in (native_fp8(device), False):
        monkeypatch.setattr("kernels.ops.linear_fp8.triton.native_fp8", lambda device, native=native: native)
        close(linear_fp8(x, weight, None), wanted)


def test_offsets_beyond_32_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the last row of a 2 GiB weight, few pages of which are ever touched."""
    width, num_out = 1 << 16, (1 << 15) + 1
    codes = torch.empty((num_out, width), dtype=torch.float8_e4m3fn, device=device)
    codes[-1] = 1.0
    weight = Fp8Weight(codes, torch.full((num_out,), 0.5, device=device))
    x = QuantizedActivation(codes[-1:], torch.full((1, 1), 0.25, device=device), torch.float32)
    run_only_the_last_program(monkeypatch)
    assert linear_fp8(x, weight, None)[0, -1] == 0.125 * width


def test_zero_rows(device: torch.device) -> None:
    weight = cases.random_weight("channel", 8, 32, torch.Generator(device).manual_seed(5))
    empty = QuantizedActivation(weight.codes[:0], torch.zeros((0, 1), device=device), torch.bfloat16)
    assert linear_fp8(empty, weight, None).shape == (0, 8)


def test_invalid_shapes_are_reported(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(5)
    blocks = cases.random_weight("block", 8, 256, generator)
    with pytest.raises(ValueError, match=r"scales \[2, 1\] do not fit an FP8 weight 8 x 256 with scales \[1, 2\]"):
        linear_fp8(random_input(2, 256, "fp8_token", torch.float32, device), blocks, None)
    with pytest.raises(ValueError, match="multiple of 16 inputs, not 24"):
        check(torch.zeros((2, 24), device=device).to(torch.float8_e4m3fn), torch.ones(2, device=device))
    with pytest.raises(ValueError, match="of one of the shapes"):
        check(blocks.codes, torch.ones(3, device=device))
    assert blocks.rows_per_scale == BLOCK
