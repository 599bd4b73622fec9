"""FP8, int8 and batch-invariant layers: loading, products, and whole checkpoints compared with plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.backends.reference import DecoderOps
from kernels.common.quantized import ActivationQuantization, Activations
from kernels.common.tolerances import TOLERANCES
from kernels.ops.quantize.reference import dequantize, quantize
from tests.fakes.pairs import slow
from tests.fakes.weights import load_scheme
from tests.kernels.helpers import logits
from tests.unit.worker.model.loading.checkpoints import opened
from tests.unit.worker.model.loading.test_eight_bit import quantized, write
from worker.model.linear import Placement
from worker.quant.dense import DenseScheme, InvariantScheme
from worker.quant.eight_bit import Fp8Scheme, Int8Scheme
from worker.quant.raw_weight import Factors, RawWeight
from worker.quant.select import LinearScheme, linear_scheme

BF16 = torch.bfloat16


def raw_weight(kind: str, num_out: int, width: int, seed: int = 0, input_scale: float | None = None) -> RawWeight:
    """Return a raw weight with values of about 1 / sqrt(width).

    Args:
        kind: "fp8 tensor", "fp8 channel", "fp8 blocks" or "int8 channel".
        num_out: Number of output features.
        width: Number of input features.
        seed: Seed of the values.
        input_scale: Static activation scale, or None.
    """
    values = torch.randn((num_out, width), generator=torch.Generator().manual_seed(seed)) / width**0.5
    rows, cols = {"tensor": (num_out, width), "channel": (1, width), "blocks": (128, 128)}[kind.split()[1]]
    name = "int8" if "int8" in kind else "fp8"
    codes, scales, _ = quantized(values, rows, cols, "int" if name == "int8" else "float")
    extent = {"tensor": (0, 0), "channel": (1, 0), "blocks": (128, 128)}[kind.split()[1]]
    extra = {"scale": Factors(scales, *extent)}
    if input_scale is not None:
        extra["input_scale"] = Factors(torch.full((1, 1), input_scale), 0, 0)
    return RawWeight(name, (num_out, width), codes, extra)  # type: ignore[arg-type]


def scheme_for(raws: list[RawWeight], device: torch.device, fixed: bool = False) -> Fp8Scheme | Int8Scheme:
    if Int8Scheme.accepts(BF16, raws):
        return Int8Scheme(BF16, device)
    assert Fp8Scheme.accepts(BF16, raws)
    return Fp8Scheme(BF16, device, raws, fixed=fixed)


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("fp8 tensor", "fp8_token"),
        ("fp8 channel", "fp8_token"),
        ("fp8 blocks", "fp8_block"),
        ("int8 channel", "int8_token"),
    ],
)
@pytest.mark.parametrize("first", [128, 40])
def test_products_of_concatenated_parts(kind: str, activation: str, first: int, device: torch.device) -> None:
    """Test unquantized and quantized activations, parts that end within a block, and reordered rows of one part."""
    raws = [raw_weight(kind, first, 272, 1), raw_weight(kind, 33, 272, 2)]
    order = torch.randperm(first, generator=torch.Generator().manual_seed(5))
    scheme = load_scheme(scheme_for(raws, device), raws, [order, None])
    assert scheme.input_quantization is not None and scheme.input_quantization.format == activation
    dense = [raw.dequantize(torch.float32).double() for raw in raws]
    weight = torch.cat([dense[0][order], dense[1]]).to(device)
    x = torch.randn((5, 272), generator=torch.Generator().manual_seed(3)).to(BF16).to(device)
    bias = torch.linspace(-1, 1, first + 33, device=device).to(BF16)
    codes = quantize(x, scheme.input_quantization)
    wanted = dequantize(codes).double() @ weight.T + bias.double()
    rtol, atol = TOLERANCES[BF16]
    for given in (x, codes):
        out = scheme.apply(given, bias)
        assert out.dtype is BF16
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)


def test_blocks_keep_one_scale_per_128_features_if_possible(device: torch.device) -> None:
    whole = [raw_weight("fp8 blocks", 256, 128 * 3, 1), raw_weight("fp8 blocks", 40, 128 * 3, 2)]
    cut = [whole[1], whole[0]]
    for raws, shape in ((whole, (3, 3)), (cut, (296, 3))):
        scheme = load_scheme(scheme_for(raws, device), raws)
        assert isinstance(scheme, Fp8Scheme) and tuple(scheme.weight.scales.shape) == shape


def test_static_activation_scale_is_largest_of_the_parts(device: torch.device) -> None:
    raws = [raw_weight("fp8 tensor", 16, 32, 1, 0.02), raw_weight("fp8 tensor", 16, 32, 2, 0.03)]
    scheme = load_scheme(scheme_for(raws, device), raws)
    quantization = scheme.input_quantization
    assert quantization is not None and quantization.format == "fp8_tensor" and quantization.scale is not None
    assert quantization.scale.tolist() == [[pytest.approx(0.03)]]


def test_padding_rows_are_zero(device: torch.device) -> None:
    for kind in ("fp8 blocks", "int8 channel"):
        raw = raw_weight(kind, 8, 64)
        scheme = load_scheme(scheme_for([raw], device), [raw, raw.zero_rows(4)])
        out = scheme.apply(torch.ones((2, 64), dtype=BF16, device=device), None)
        assert out[:, :8].all() and not out[:, 8:].any()


@pytest.mark.parametrize("kind", ["fp8 channel", "fp8 blocks", "int8 channel", "dense"])
def test_deterministic_rows_are_independent_of_the_batch(kind: str, device: torch.device) -> None:
    raw = RawWeight("f32", (48, 272), torch.randn(48, 272)) if kind == "dense" else raw_weight(kind, 48, 272)
    fixed = InvariantScheme(BF16, device) if kind == "dense" else scheme_for([raw], device, fixed=True)
    scheme = load_scheme(fixed, [raw])
    x = torch.randn((70, 272), generator=torch.Generator().manual_seed(3)).to(BF16).to(device)
    whole = scheme.apply(x, None)
    for rows in (slice(0, 1), slice(60, 70)):
        assert torch.equal(scheme.apply(x[rows], None), whole[rows])


def test_scheme_selection() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    fp8, int8 = raw_weight("fp8 blocks", 8, 256), raw_weight("int8 channel", 8, 256)
    plain = RawWeight("f32", (8, 256), torch.ones(8, 256))
    assert isinstance(linear_scheme(BF16, cuda, [fp8, fp8]), Fp8Scheme)
    assert isinstance(linear_scheme(BF16, cuda, [int8]), Int8Scheme)
    dense: list[list[RawWeight]] = [[fp8, int8], [fp8, plain], [plain], [raw_weight("fp8 channel", 8, 24)]]
    dense.append([fp8, raw_weight("fp8 channel", 8, 256)])
    dense.append([RawWeight("fp8", (8, 256), fp8.data, {"scale": Factors(torch.ones(1, 8), 0, 32)})])
    for raws in dense:
        assert isinstance(linear_scheme(BF16, cuda, raws), DenseScheme)
        assert isinstance(linear_scheme(BF16, cuda, raws, deterministic=True), InvariantScheme)
    assert isinstance(linear_scheme(torch.float32, cuda, [fp8]), DenseScheme)
    assert not isinstance(linear_scheme(BF16, cpu, [fp8]), Fp8Scheme | Int8Scheme)


class PlainScheme(DenseScheme):
    """Scheme with the same arithmetic in plain torch: products of the decoded values."""

    def __init__(self, like: LinearScheme, device: torch.device) -> None:
        super().__init__(torch.float32, device)
        self._like = like

    def load_rows(self, start: int, raw: RawWeight, order: torch.Tensor | None = None) -> None:
        super().load_rows(start, raw, order)
        self._like.load_rows(start, raw, order)

    def create_weights(self, out_features: int, in_features: int) -> None:
        super().create_weights(out_features, in_features)
        self._like.create_weights(out_features, in_features)

    def after_load(self) -> None:
        self._like.after_load()
        self.input_quantization = self._like.input_quantization

    def apply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            assert self.input_quantization is not None
            x = quantize(x, self.input_quantization)
        return F.linear(dequantize(x), self.weight).to(x.dtype)


class WatchedOps(DecoderOps):
    """Ops that record how norms and activations were asked to write their output."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def add_rms_norm(self, delta, residual, weight, eps, dtype, quantization: ActivationQuantization | None = None):
        self.asked.append(quantization and quantization.format)
        return super().add_rms_norm(delta, residual, weight, eps, dtype, quantization)

    def activation_and_mul(self, gate_up, activation, quantization: ActivationQuantization | None = None):
        self.asked.append(quantization and quantization.format)
        return super().activation_and_mul(gate_up, activation, quantization)


@pytest.mark.parametrize("kind", [slow("fp8 static"), "compressed fp8 channel", "compressed int8"])
def test_checkpoint_logits_equal_plain_torch(
    tmp_path: Path, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass codes from norms and activations to the layers behind them, with products by Triton or plain torch."""
    write(tmp_path / "m", kind)
    ops = WatchedOps()
    monkeypatch.setattr("worker.model.decoder.select_ops", lambda *_, **__: ops)

    def scheme(place: Placement, raws: list[RawWeight], plain: bool) -> Any:
        if raws[0].plain:
            return DenseScheme(place.dtype, place.device)
        ours = scheme_for(raws, place.device)
        return PlainScheme(ours, place.device) if plain else ours

    monkeypatch.setattr(Placement, "scheme", lambda place, raws, unrounded=False: scheme(place, raws, True))
    expected = logits(opened(tmp_path / "m"), device)
    ops.asked.clear()
    monkeypatch.setattr(Placement, "scheme", lambda place, raws, unrounded=False: scheme(place, raws, False))
    ours = logits(opened(tmp_path / "m"), device)
    wanted = {"fp8 static": "fp8_tensor", "compressed int8": "int8_token"}.get(kind, "fp8_token")
    step = [wanted, wanted, wanted] * 2 + [None]  # two norms and the activation of each layer; the last norm
    assert ops.asked == step * 2
    largest = float(expected.abs().max())
    if "fp8" in kind and device.type == "cuda":
        # Hopper accumulates FP8 products with 14 bits. A value that rounds to the other side of a tie changes a code of
        # the next layer by up to an eighth: single logits may differ widely, their mean may not.
        assert float((ours.float() - expected.float()).abs().mean()) < 0.02 * largest
        return
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * largest)
