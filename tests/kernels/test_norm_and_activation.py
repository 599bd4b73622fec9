"""Tests of the RMS norm and the gated activation on the CPU against float64 references."""

from __future__ import annotations

import pytest
import torch

from kernels.common.quantized import dense
from kernels.common.tolerances import TOLERANCES
from kernels.ops.activation import cases as activation_cases
from kernels.ops.activation import cpu as activation_cpu
from kernels.ops.activation import reference as activation_reference
from kernels.ops.norm import cases as norm_cases
from kernels.ops.norm import cpu as norm_cpu
from kernels.ops.norm import reference as norm_reference


@pytest.mark.parametrize("dtype", norm_cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", norm_cases.SHAPES, ids=str)
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, has_delta: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = shape[1]
    assert norm_cpu.supported(hidden, dtype)
    delta = torch.randn(shape, generator=generator).to(dtype) if has_delta else None
    residual = torch.randn(shape, generator=generator) * 3
    weight = torch.rand(hidden, generator=generator) + 0.5
    stream = residual + (delta.float() if delta is not None else 0)
    wide = stream.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    rtol, atol = TOLERANCES[dtype]
    for op in (norm_cpu.AddRMSNorm(hidden, dtype), None):
        updated = residual.clone()
        if op is not None:
            out = op(delta, updated, weight, 1e-5)
        else:
            out = dense(norm_reference.add_rms_norm(delta, updated, weight, 1e-5, dtype))
        assert out.dtype == dtype
        assert torch.equal(updated, stream)
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", activation_cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", activation_cases.SHAPES, ids=str)
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    assert activation_cpu.supported(width, dtype, "silu")
    gate_up = (torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(2)) * 8).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = gate / (1 + (-gate).exp()) * up
    rtol, atol = TOLERANCES[dtype]
    reference = activation_reference.activation_and_mul(gate_up, "silu")
    for out in (activation_cpu.SiluAndMul(width, dtype)(gate_up), reference):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


def test_silu_of_extreme_gates_is_finite() -> None:
    gate_up = torch.ones((1, 32))
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, -200.0, float("nan")])
    out = activation_cpu.SiluAndMul(16, torch.float32)(gate_up)[0]
    assert out[0].abs() < 1e-30
    assert out[1] == 1e4
    assert out[2].abs() < 1e-30
    assert out[3].isnan()


@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu(activation, approximate: str) -> None:
    gate_up = torch.linspace(-4, 4, 24).view(1, 24)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = torch.nn.functional.gelu(gate, approximate=approximate) * up
    torch.testing.assert_close(
        activation_reference.activation_and_mul(gate_up, activation).double(), wanted, rtol=1e-5, atol=1e-6
    )
    assert not activation_cpu.supported(16, torch.float32, activation)
