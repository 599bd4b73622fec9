"""Integer weights of every source format: products and whole models compared with the same weights made dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels.backends.reference import DecoderOps
from kernels.common.tolerances import TOLERANCES
from tests.fakes.pairs import each_value, slow
from tests.fakes.weights import load_scheme
from tests.kernels.helpers import logits
from tests.unit.worker.model.loading.checkpoints import opened
from tests.unit.worker.model.loading.test_gptq_awq import Made, write
from worker.model.linear import Placement
from worker.quant.dense import DenseScheme
from worker.quant.raw_weight import Factors, RawWeight, slice_columns
from worker.quant.select import linear_scheme
from worker.quant.weight_only import WeightOnlyScheme, group_of

GGUF_FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def from_gguf(name: str, out: int, num_in: int, seed: int = 0) -> RawWeight:
    values = np.random.default_rng(seed).standard_normal((out, num_in), dtype=np.float32) / num_in**0.5
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    return RawWeight(name, (out, num_in), torch.from_numpy(packed))  # type: ignore[arg-type]


def from_codes(
    out: int, num_in: int, bits: int, group: int, seed: int, scales: torch.dtype = torch.float16, shuffled: bool = False
) -> RawWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == 0 else num_in // group
    codes = torch.randint(0, 1 << bits, (out, num_in), generator=generator, dtype=torch.uint8)
    scale = ((0.5 + torch.rand((out, groups), generator=generator)) / (1 << bits) / num_in**0.5).to(scales)
    zeros = torch.randint(1, 1 << bits, (out, groups), generator=generator)
    extra = {"scale": Factors(scale, 1, group), "minimum": Factors(-(zeros * scale.float()), 1, group)}
    columns = torch.randperm(num_in, generator=generator) if shuffled else None
    return RawWeight("u4" if bits == 4 else "u8", (out, num_in), codes, extra, columns)


def check(raws: list[RawWeight], device: torch.device, dtype: torch.dtype = torch.bfloat16, rows: int = 3) -> None:
    """Load the parts, the first one reordered, and compare the product with that of the dense values."""
    assert WeightOnlyScheme.accepts(dtype, raws)
    order = torch.randperm(raws[0].shape[0], generator=torch.Generator().manual_seed(5))
    orders = [order] + [None] * (len(raws) - 1)
    scheme = load_scheme(WeightOnlyScheme(dtype, device, raws, fixed=False), raws, orders)
    dense = [raw.dequantize(torch.float32).double() for raw in raws]
    weight = torch.cat([dense[0][order], *dense[1:]])
    x = torch.randn((rows, raws[0].shape[1]), generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    out = scheme.apply(x.to(device), bias.to(device))
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), x.double() @ weight.T + bias.double(), rtol=relative, atol=absolute)


@each_value(name=GGUF_FORMATS, dtype=[torch.bfloat16, torch.float16], ids=str)
def test_gguf_formats(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check([from_gguf(name, 40, 96)], device, dtype)


def test_parts_of_one_layer_may_have_different_formats(device: torch.device) -> None:
    check([from_gguf("q4_0", 24, 256, 1), from_gguf("q8_0", 8, 256, 2), from_gguf("q5_1", 8, 256, 3)], device)
    check([from_codes(24, 256, 4, 128, 1), from_codes(8, 256, 4, 64, 2)], device)
    check([from_codes(24, 256, 4, 0, 1), from_codes(8, 256, 8, 128, 2)], device)


@each_value(bits=[4, 8], group=[32, 64, 128, 256, 0])
def test_codes_in_groups(bits: int, group: int, device: torch.device) -> None:
    check([from_codes(40, 256, bits, group, group)], device)


def test_reordered_inputs(device: torch.device) -> None:
    raw = from_codes(40, 128, 4, 32, 1, shuffled=True)
    check([raw], device)
    other = from_codes(24, 128, 4, 32, 2, shuffled=True)
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [raw, other])
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [raw, from_codes(24, 128, 4, 32, 2)])


def test_scales_outside_float16_range_stay_float32(device: torch.device) -> None:
    raw = from_codes(40, 128, 4, 32, 1, scales=torch.float32)
    scheme = load_scheme(WeightOnlyScheme(torch.bfloat16, device, [raw], fixed=False), [raw])
    assert scheme.weight.scales.dtype == torch.float32
    check([raw], device)


def test_symmetric_weights_have_no_minimums(device: torch.device) -> None:
    for raw in (from_gguf("q4_0", 8, 64), from_gguf("q5_0", 8, 64), from_gguf("q8_0", 8, 64)):
        scheme = load_scheme(WeightOnlyScheme(torch.bfloat16, device, [raw], fixed=False), [raw])
        assert scheme.weight.minimums is None and scheme.weight.scales.dtype == torch.float16


def test_padding_rows_are_zero(device: torch.device) -> None:
    raw = from_gguf("q4_1", 8, 64)
    scheme = load_scheme(WeightOnlyScheme(torch.bfloat16, device, [raw], fixed=True), [raw, raw.zero_rows(4)])
    out = scheme.apply(torch.ones((2, 64), dtype=torch.bfloat16, device=device), None)
    assert out[:, :8].all() and not out[:, 8:].any()


def test_which_weights_become_dense() -> None:
    good = from_codes(8, 256, 4, 128, 1)
    plain = RawWeight("f32", (8, 256), torch.ones(8, 256))
    assert WeightOnlyScheme.accepts(torch.float16, [good])
    assert not WeightOnlyScheme.accepts(torch.float32, [good])
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [])
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [good, plain])
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [from_codes(8, 256, 4, 16, 1)])
    assert group_of([slice_columns(good, slice(0, 128))]) == 0
    assert not WeightOnlyScheme.accepts(torch.bfloat16, [slice_columns(good, slice(0, 64))])
    with pytest.raises(ValueError, match="not quantized in groups"):
        WeightOnlyScheme(torch.bfloat16, torch.device("cpu"), [plain], fixed=False)


def test_cpu_weights_become_dense() -> None:
    good = from_codes(8, 256, 4, 128, 1)
    assert not isinstance(linear_scheme(torch.bfloat16, torch.device("cpu"), [good]), WeightOnlyScheme)
    on_gpu = linear_scheme(torch.bfloat16, torch.device("cuda"), [good], deterministic=True)
    assert isinstance(on_gpu, WeightOnlyScheme)


@pytest.mark.parametrize("kind", [slow("gptq"), "desc_act", "awq"])
def test_checkpoint_logits_equal_dense_weights(
    tmp_path: Path, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the model with integer products by Triton and everything else in plain torch."""
    monkeypatch.setattr("worker.model.decoder.select_ops", lambda *_, **__: DecoderOps())
    config: dict[str, Any] = {"quant_method": "awq" if kind == "awq" else "gptq", "bits": 4, "group_size": 32}

    def leaves(made: Made) -> dict[str, np.ndarray]:
        return made.awq() if kind == "awq" else made.gptq(4, 1)

    write(tmp_path / "m", config, leaves, shuffled=kind == "desc_act")
    kept: list[str] = []

    def scheme(place: Placement, raws: list[RawWeight], *, unrounded: bool = False) -> Any:
        if WeightOnlyScheme.accepts(place.dtype, raws):
            kept.append(raws[0].format)
            return WeightOnlyScheme(place.dtype, place.device, raws, fixed=False)
        return DenseScheme(place.dtype, place.device)

    monkeypatch.setattr(Placement, "scheme", lambda place, raws, **_: DenseScheme(place.dtype, place.device))
    expected = logits(opened(tmp_path / "m"), device)
    monkeypatch.setattr(Placement, "scheme", scheme)
    ours = logits(opened(tmp_path / "m"), device)
    # If each projection has its own input order, projections that share an input stay dense.
    assert kept == ["u4"] * (4 if kind == "desc_act" else 8)
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert torch.equal(ours.argmax(dim=-1), expected.argmax(dim=-1))
