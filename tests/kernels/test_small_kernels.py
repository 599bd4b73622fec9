"""Tests of Triton's norm, activation, embedding and quantization against higher-precision references."""

from __future__ import annotations

import pytest
import torch

from kernels.common.quantized import ActivationFormat, ActivationQuantization, QuantizedActivation, dense
from kernels.common.tolerances import TOLERANCES
from kernels.common.triton.activation_codes import LARGEST
from kernels.ops.activation import cases as activation_cases
from kernels.ops.activation import reference as activation_reference
from kernels.ops.activation import triton as activation
from kernels.ops.embedding import cases as embedding_cases
from kernels.ops.embedding import reference as embedding_reference
from kernels.ops.embedding import triton as embedding
from kernels.ops.norm import cases as norm_cases
from kernels.ops.norm import triton as norm
from kernels.ops.quantize import cases as quantize_cases
from kernels.ops.quantize import triton as quantize
from kernels.ops.quantize.reference import dequantize
from kernels.ops.quantize.reference import quantize as quantize_reference
from tests.fakes.pairs import each_value

EMPTY = torch.empty


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all memory that a launcher allocates with NaN, -128 or 255 before the kernel runs."""

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = EMPTY(*args, **kwargs)
        if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
            tensor.view(torch.uint8).fill_(0xFF if tensor.dtype is torch.float8_e4m3fn else 0x80)
            return tensor
        return tensor.fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)) * scale
    return values.to(dtype).to(device)


def _assert_codes(actual: QuantizedActivation, wanted: QuantizedActivation, moved: float = 0.01) -> None:
    """Check that scales are equal, and that few codes differ, by one step, because a reciprocal rounds differently."""
    assert actual.codes.dtype == wanted.codes.dtype
    assert actual.dtype == wanted.dtype
    assert actual.scales.shape == wanted.scales.shape
    torch.testing.assert_close(actual.scales, wanted.scales, rtol=1e-6, atol=0)
    steps = (_ordered(actual.codes) - _ordered(wanted.codes)).abs()
    assert not (steps > 1).any()
    assert int((steps > 0).sum()) <= max(1, moved * steps.numel())


def _ordered(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as integers in the order of their values, so that adjacent values differ by one."""
    if codes.dtype is torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def _every_format(device: torch.device) -> list[ActivationQuantization | None]:
    return [None, *(quantize_cases.quantization(format, device) for format in quantize_cases.FORMATS)]


def _assert_like(actual, plain: torch.Tensor, how: ActivationQuantization | None, dtype: torch.dtype) -> None:
    """Compare with `plain`, the expected result in float64 or float32 before it is rounded to dtype.

    Values at the edge between two values of the dtype may be rounded either way, and so may their codes.
    """
    if how is None:
        rtol, atol = TOLERANCES[dtype]
        assert dense(actual).dtype == dtype
        torch.testing.assert_close(dense(actual).double(), plain.double(), rtol=rtol, atol=atol)
        return
    assert isinstance(actual, QuantizedActivation)
    wanted = quantize_reference(plain.to(dtype), how)
    assert actual.dtype == dtype
    assert actual.scales.shape == wanted.scales.shape
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.scales, wanted.scales, rtol=rtol, atol=atol / LARGEST[how.format])
    steps = (_ordered(actual.codes) - _ordered(wanted.codes)).abs()
    assert not (steps > 1).any()
    assert int((steps > 0).sum()) <= max(1, 0.05 * steps.numel())


@each_value(
    stream=norm_cases.STREAMS, dtype=norm_cases.STREAMS[1:] + norm_cases.STREAMS[:1], has_delta=[True, False], ids=str
)
def test_add_rms_norm(stream: torch.dtype, dtype: torch.dtype, has_delta: bool, device: torch.device) -> None:
    for shape in norm_cases.GPU_SHAPES:
        weight = _random(shape[1:], torch.float32, device).abs() + 0.5
        delta = _random(shape, dtype, device, 2.0) if has_delta else None
        residual = _random(shape, stream, device, 3.0)
        wanted_stream = residual if delta is None else (residual.float() + delta.float()).to(stream)
        wide = wanted_stream.double()
        wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for how in _every_format(device):
            updated = residual.clone()
            out = norm.add_rms_norm(delta, updated, weight, 1e-5, dtype, how)
            assert torch.equal(updated, wanted_stream)
            _assert_like(out, wanted, how, dtype)


def test_norm_of_a_row_is_independent_of_its_batch(device: torch.device) -> None:
    residual = _random((9, 576), torch.bfloat16, device)
    weight = torch.ones(576, device=device)
    together = dense(norm.add_rms_norm(None, residual, weight, 1e-5, torch.bfloat16))
    for row in range(9):
        alone = norm.add_rms_norm(None, residual[row : row + 1], weight, 1e-5, torch.bfloat16)
        assert torch.equal(dense(alone), together[row : row + 1])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_of_zeros_and_of_nan(device: torch.device) -> None:
    residual = torch.zeros((3, 64), device=device)
    residual[1, 5] = float("nan")
    residual[2] = 1.0
    weight = torch.ones(64, device=device)
    for how in _every_format(device):
        out = norm.add_rms_norm(None, residual.clone(), weight, 1e-5, torch.float32, how)
        values = dequantize(out) if isinstance(out, QuantizedActivation) else out
        assert not values[0].any()
        assert values[1].isnan().all()
        assert values[2].isfinite().all()


ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


@each_value(dtype=activation_cases.GPU_DTYPES, kind=activation_cases.ACTIVATIONS, ids=str)
def test_activation_and_mul(kind, dtype: torch.dtype, device: torch.device) -> None:
    for rows, width in activation_cases.GPU_SHAPES:
        gate_up = _random((rows, 2 * width), dtype, device, 3.0)
        gate, up = gate_up.double().chunk(2, dim=-1)
        wanted = ACTIVATIONS[kind](gate) * up
        for how in _every_format(device):
            _assert_like(activation.activation_and_mul(gate_up, kind, how), wanted, how, dtype)


def test_activation_of_rows_wider_than_a_tile(device: torch.device) -> None:
    rows, width = quantize_cases.WIDE
    gate_up = _random((rows, 2 * width), torch.bfloat16, device)
    wanted = dense(activation_reference.activation_and_mul(gate_up.float(), "silu"))
    for how in _every_format(device):
        _assert_like(activation.activation_and_mul(gate_up, "silu", how), wanted, how, torch.bfloat16)


@pytest.mark.parametrize("kind", activation_cases.ACTIVATIONS)
def test_extreme_gates(kind, device: torch.device) -> None:
    gate_up = torch.ones((1, 12), device=device)
    gate_up[0, :6] = torch.tensor([-1e4, 1e4, -200.0, float("nan"), 0.0, 40.0])
    out = dense(activation.activation_and_mul(gate_up, kind))[0].cpu()
    assert out[[0, 2]].abs().max() < 1e-30
    assert out[1] == 1e4
    assert out[3].isnan()
    assert out[4] == 0
    assert out[5] == 40


@pytest.mark.parametrize("dtypes", embedding_cases.DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 24.0])
def test_embed(dtypes: tuple[torch.dtype, torch.dtype], scale: float | None, device: torch.device) -> None:
    for tokens, rows, width in embedding_cases.SHAPES:
        table = _random((rows, width), dtypes[0], device)
        token_ids = torch.randint(-2, rows + 2, (tokens,), dtype=torch.int32, device=device)
        token_ids[: min(tokens, 3)] = torch.tensor([rows - 1, -1, rows], dtype=torch.int32)[: min(tokens, 3)]
        out = embedding.embed(token_ids, table, scale, dtypes[1])
        assert out.dtype == dtypes[1]
        assert torch.equal(out, embedding_reference.embed(token_ids, table, scale, dtypes[1]))


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """Use rows so far apart that 32-bit element offsets overflow; the memory between them is never touched."""
    width, far = 2048, 2**31 // 2048 + 3
    table = EMPTY((far + 1, width), dtype=torch.float16, device=device)
    table[far] = 3.0
    table[far - 2**20 - 3] = 1.0
    token_ids = torch.tensor([far, far - 2**20 - 3], dtype=torch.int32, device=device)
    out = embedding.embed(token_ids, table, None, torch.float16)
    assert torch.equal(out, table[[far, far - 2**20 - 3]])


@each_value(format=quantize_cases.FORMATS, dtype=quantize_cases.DTYPES, ids=str)
def test_quantize(format: ActivationFormat, dtype: torch.dtype, device: torch.device) -> None:
    how = quantize_cases.quantization(format, device)
    for shape in [*quantize_cases.SHAPES, quantize_cases.WIDE]:
        # A column slice of a wider tensor has gaps between its rows.
        x = _random((shape[0], shape[1] + 16), dtype, device, 2.0)[:, : shape[1]]
        _assert_codes(quantize.quantize(x, how), quantize_reference(x, how))


@pytest.mark.parametrize("format", quantize_cases.FORMATS)
def test_every_code_and_its_ties(format: ActivationFormat, device: torch.device) -> None:
    """Use a row with all codes, the values halfway between two codes, zeros of both signs and saturating values."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    if format == "int8_token":
        codes = torch.arange(128).float()
    values = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    x = torch.cat([values, -values]).unsqueeze(0).to(device)
    scale = torch.ones((1, 1), device=device) if format == "fp8_tensor" else None
    how = ActivationQuantization(format, scale)
    if format == "fp8_tensor":
        x = torch.cat([x, torch.tensor([[460.0, 1e9, float("inf"), -float("inf")]], device=device)], dim=1)
    if format == "fp8_block":
        # Each block's largest value is the largest code, so that every scale is 1.
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 127)).view(1, -1, 127)
        x = torch.nn.functional.pad(x, (0, 1), value=448.0).view(1, -1)
    actual, wanted = quantize.quantize(x, how), quantize_reference(x, how)
    assert torch.equal(actual.scales, wanted.scales)
    assert torch.equal(_ordered(actual.codes), _ordered(wanted.codes))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_infinity_stay_in_their_row_or_block(device: torch.device) -> None:
    for how in _every_format(device)[1:]:
        assert how is not None
        for bad in (float("nan"), float("inf")):
            x = torch.ones((3, 300), device=device)
            x[1, 7] = bad
            values = dequantize(quantize.quantize(x, how))
            assert values[[0, 2]].isfinite().all()
            if how.format == "fp8_tensor" and bad == float("inf"):
                assert values[1, 7] == 448 * how.scale.item()
            else:
                assert not values[1, 7].isfinite()


def test_tiny_rows_do_not_become_infinite(device: torch.device) -> None:
    for format in quantize_cases.FORMATS[1:]:
        values = dequantize(
            quantize.quantize(torch.full((1, 128), 1e-36, device=device), ActivationQuantization(format))
        )
        assert (values - 1e-36).abs().max() < 1e-35


def test_invalid_input_is_reported(device: torch.device) -> None:
    x = torch.ones((2, 8), device=device)
    weight = torch.ones(8, device=device)
    with pytest.raises(ValueError, match="at most 32768"):
        norm.add_rms_norm(None, torch.ones((1, 32769), device=device), torch.ones(1), 1e-5, torch.float32)
    with pytest.raises(ValueError, match=r"same shape, got \[1, 8\]"):
        norm.add_rms_norm(x[:1], x, weight, 1e-5, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        norm.add_rms_norm(None, x, weight.bfloat16(), 1e-5, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        norm.add_rms_norm(None, x[:, ::2], weight[:4], 1e-5, torch.float32)
    with pytest.raises(ValueError, match="3 values"):
        activation.activation_and_mul(torch.ones((1, 3), device=device), "silu")
    with pytest.raises(ValueError, match="table must be contiguous"):
        embedding.embed(torch.zeros(1, dtype=torch.int32, device=device), x.t(), None, torch.float32)
    with pytest.raises(ValueError, match="contiguous rows"):
        quantize.quantize(x.t(), ActivationQuantization("fp8_token"))
    with pytest.raises(ValueError, match="fp8_tensor"):
        quantize.quantize(x, ActivationQuantization("fp8_tensor"))
    with pytest.raises(ValueError, match="one float32"):
        quantize.quantize(x, ActivationQuantization("fp8_tensor", torch.ones(2, device=device)))
