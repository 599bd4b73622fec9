"""Number formats inside kernels compared with torch's conversions, over every code."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.common.triton import formats
from kernels.common.triton.launch import native_fp8


@triton.jit
def decode(p_codes, p_out, N: tl.constexpr, NATIVE: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_out + o, formats.decode_fp8(tl.load(p_codes + o), NATIVE, tl.float32))


@triton.jit
def encode(p_x, p_codes, N: tl.constexpr, NATIVE: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_codes + o, formats.encode_fp8(tl.load(p_x + o), NATIVE))


@triton.jit
def encode_integers(p_x, p_int8, p_int4, N: tl.constexpr):
    o = tl.arange(0, N)
    low, high = tl.load(p_x + o), tl.load(p_x + N + o)
    tl.store(p_int8 + o, formats.encode_int8(low * 16.0))
    tl.store(p_int4 + o, formats.encode_int4(low, high))


@triton.jit
def decode_halves(p_codes, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    codes = tl.load(p_codes + o)
    tl.store(p_out + o, formats.decode_int4_low(codes, tl.float32))
    tl.store(p_out + N + o, formats.decode_int4_high(codes, tl.float32))


def native_options(device: torch.device) -> list[bool]:
    return [False, True] if native_fp8(device) else [False]


def test_fp8_decoding_equals_torch(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    wanted = codes.view(torch.float8_e4m3fn).float()
    for native in native_options(device):
        out = torch.full_like(wanted, 7777.0)
        decode[(1,)](codes.view(torch.float8_e4m3fn) if native else codes, out, 256, native)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_fp8_rounding_equals_torch(device: torch.device) -> None:
    """Test random magnitudes, every value, every midpoint between two values (ties to even), and NaN."""
    generator = torch.Generator().manual_seed(0)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    exponents = torch.randint(-14, 9, (2048,), generator=generator)
    random = torch.randn(2048, generator=generator) * torch.exp2(exponents.float())
    exact = torch.cat((values, middles, torch.tensor([float("nan")])))
    x = torch.cat((exact, -exact, random.clamp(-448, 448)))
    x = torch.cat((x, torch.zeros(4096 - x.numel()))).to(device)
    wanted = x.to(torch.float8_e4m3fn)
    for native in native_options(device):
        codes = torch.full((4096,), 77, dtype=torch.uint8, device=device)
        encode[(1,)](x, codes.view(torch.float8_e4m3fn) if native else codes, 4096, native)
        torch.testing.assert_close(
            codes.view(torch.float8_e4m3fn).float(), wanted.float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("x", [449.0, 1e6, float("inf")])
def test_fp8_saturates(device: torch.device, x: float) -> None:
    both = torch.tensor([x, -x], device=device)
    for native in native_options(device):
        codes = torch.zeros(2, dtype=torch.uint8, device=device)
        encode[(1,)](both, codes.view(torch.float8_e4m3fn) if native else codes, 2, native)
        assert codes.view(torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]


def test_integers_are_rounded_to_even_and_halves_are_packed(device: torch.device) -> None:
    x = (torch.arange(128, device=device, dtype=torch.float32) / 8 - 8).clamp(-7, 7)  # quarters, halves, whole numbers
    int8 = torch.full((64,), 99, dtype=torch.int8, device=device)
    int4 = torch.full((64,), 99, dtype=torch.uint8, device=device)
    encode_integers[(1,)](x, int8, int4, 64)
    assert torch.equal(int8, (x[:64] * 16).round().to(torch.int8))
    out = torch.full((128,), float("nan"), device=device)
    decode_halves[(1,)](int4, out, 64)
    assert torch.equal(out, x.round() + 0.0)
