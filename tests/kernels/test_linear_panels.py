"""Panel weights on the CPU compared with float64 products, and the scheme that builds them from a file's formats."""

from __future__ import annotations

import pytest
import torch

from kernels.common.cpu.bf16 import supported
from kernels.ops.linear_panels.cases import KINDS, SHAPES, random_weight
from kernels.ops.linear_panels.cpu import CHUNK_ROWS, FEW_ROWS, PanelLinear, Result, panel_linear
from kernels.ops.linear_panels.layout import pack_codes, pack_values
from kernels.ops.linear_panels.reference import linear as reference
from kernels.ops.linear_panels.reference import values
from tests.fakes.weights import load_scheme
from worker.quant.gguf_formats import FORMATS, WeightFormat, row_bytes
from worker.quant.panels import PanelScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.select import linear_scheme

pytestmark = pytest.mark.skipif(not supported(), reason="the processor has no AVX512-BF16")

ROWS = [*range(1, 18), FEW_ROWS - 1, FEW_ROWS, FEW_ROWS + 1, 100, CHUNK_ROWS + 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "minimum"), KINDS)
def test_products_equal_decoded_values(bits: int, minimum: bool, shape: tuple[int, int]) -> None:
    weight = random_weight(shape, bits, minimum=minimum)
    linear = panel_linear(bits, minimum, Result.FLOAT32)
    inputs = torch.randn((max(ROWS), shape[1])).bfloat16()
    bias = torch.nn.functional.pad(torch.randn(shape[0]).bfloat16(), (0, -shape[0] % 16))
    for given in (None, bias):
        wanted = reference(inputs, weight, None if given is None else given[: shape[0]])
        for rows in ROWS:
            x, want = inputs[:rows], wanted[:rows]
            # With many rows, weights are rounded to bfloat16; otherwise only the sums are inexact.
            rounded = rows > FEW_ROWS and bits != 16
            for fixed in (False, True):
                out = linear(x, weight, given, fixed=fixed)
                assert out.dtype is torch.float32 and out.shape == want.shape
                error = (out.double() - want).norm() / want.norm()
                assert error < (3e-3 if rounded and not fixed else 2e-6)


@pytest.mark.parametrize(("bits", "minimum"), KINDS)
def test_row_is_bitwise_equal_in_every_batch(bits: int, minimum: bool) -> None:
    weight = random_weight((80, 576), bits, minimum=minimum)
    linear = panel_linear(bits, minimum, Result.BFLOAT16)
    x = torch.randn((CHUNK_ROWS + 40, 576)).bfloat16()
    whole = linear(x, weight, None, fixed=True)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, FEW_ROWS + 1, 100):
        for start in (0, 11):
            part = x[start : start + rows].contiguous()
            assert torch.equal(linear(part, weight, None, fixed=True), whole[start : start + rows])
    # Without deterministic mode, this holds only within small batches and within large batches.
    few = linear(x[:FEW_ROWS].contiguous(), weight, None)
    assert torch.equal(linear(x[3:4].contiguous(), weight, None), few[3:4])
    many = linear(x, weight, None)
    part = x[13 : 14 + FEW_ROWS].contiguous()
    assert torch.equal(linear(part, weight, None), many[13 : 14 + FEW_ROWS])


def test_models_of_different_sizes_and_formats_alternate() -> None:
    """Alternate a target and its draft model, which share an op if their weights have the same format."""
    sizes = [(80, 576, 3), (48, 64, 1), (1024, 64, FEW_ROWS + 9)]
    given = [
        (random_weight(size[:2], bits, minimum=minimum), torch.randn((size[2], size[1])).bfloat16())
        for size in sizes
        for bits, minimum in ((4, True), (8, False))
    ]
    alone = [PanelLinear(*weight.kind, Result.FLOAT32)(x, weight, None) for weight, x in given]
    for _ in range(2):
        for (weight, x), expected in zip(given, alone):
            assert torch.equal(panel_linear(*weight.kind, Result.FLOAT32)(x, weight, None), expected)


def test_non_finite_row_does_not_affect_others() -> None:
    weight = random_weight((64, 64), 4, minimum=True)
    linear = panel_linear(4, True, Result.FLOAT32)
    x = torch.randn((FEW_ROWS + 5, 64)).bfloat16()
    for rows in (3, FEW_ROWS + 5):
        clean = linear(x[:rows].contiguous(), weight, None)
        spoilt = x[:rows].clone()
        spoilt[1, 5] = torch.nan
        out = linear(spoilt, weight, None)
        assert bool(out[1].isnan().all())
        keep = [row for row in range(rows) if row != 1]
        assert torch.equal(out[keep], clean[keep])


def test_padding_features_are_ignored() -> None:
    weight = random_weight((35, 64), 8, minimum=False)
    out = panel_linear(8, False, Result.FLOAT32)(torch.randn((2, 64)).bfloat16(), weight, None)
    assert out.shape == (2, 35) and out.is_contiguous()


def test_four_bit_codes_equal_gguf() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) | (15 - torch.arange(16, dtype=torch.uint8)) << 4
    ones, zeros = torch.ones((1, 1), dtype=torch.float16), torch.zeros((1, 1), dtype=torch.float16)
    expected = torch.cat((torch.arange(16.0), torch.arange(15.0, -1.0, -1.0))).double()
    assert torch.equal(values(pack_codes(codes, ones, zeros))[0], expected)
    assert torch.equal(values(pack_codes(codes, ones, None))[0], expected - 8)
    given = torch.randn((20, 64)).bfloat16()
    assert torch.equal(values(pack_values(given)), given.double())


def raw_weight(name: WeightFormat, shape: tuple[int, int]) -> RawWeight:
    """Return random blocks with finite scales."""
    data = torch.randint(0, 256, (shape[0], row_bytes(name, shape[1])), dtype=torch.uint8)
    blocks = data.view(shape[0], -1, FORMATS[name].block_bytes)
    halves = 4 if name in ("q4_1", "q5_1") else 2
    factors = (torch.rand((*blocks.shape[:2], halves // 2)) * 0.02).half()
    blocks[..., :halves] = factors.view(torch.uint8).reshape(*blocks.shape[:2], halves)
    return RawWeight(name, shape, data)


@pytest.mark.parametrize(
    ("formats", "kind"),
    [
        (("q4_0",), (4, False)),
        (("q4_1",), (4, True)),
        (("q8_0",), (8, False)),
        (("q5_0",), (8, False)),
        (("q5_1",), (8, True)),
        (("q4_1", "q8_0"), (8, True)),
        (("q4_0", "q5_0", "q8_0"), (8, False)),
        (("q4_0", "q4_1", "q4_1"), (4, True)),
        (("q4_0", "bf16"), (16, False)),
    ],
)
def test_layer_has_the_values_of_the_file(formats: tuple[WeightFormat, ...], kind: tuple[int, bool]) -> None:
    plain = RawWeight("bf16", (24, 128), torch.randn((24, 128)).bfloat16())
    raws = [plain if name == "bf16" else raw_weight(name, (24, 128)) for name in formats]
    scheme = linear_scheme(torch.bfloat16, torch.device("cpu"), raws)
    assert isinstance(scheme, PanelScheme)
    load_scheme(scheme, raws, [torch.arange(23, -1, -1)] + [None] * (len(raws) - 1))
    assert scheme.weight.kind == kind
    want = torch.cat([raw.dequantize(torch.float32) for raw in raws])
    want[:24] = want[:24].flip(0)
    exact = torch.float32 if kind[0] < 16 else torch.bfloat16
    torch.testing.assert_close(values(scheme.weight), want.to(exact).double(), rtol=1e-6, atol=1e-8)
    bias = torch.randn(24 * len(raws)).bfloat16()
    for rows in (1, 5, FEW_ROWS + 9):
        x = torch.randn((rows, 128)).bfloat16()
        expected = x.double() @ want.double().T + bias.double()
        assert (scheme.apply(x, bias).double() - expected).norm() <= 4e-3 * expected.norm()
    assert scheme.apply(torch.empty((0, 128)).bfloat16(), None).shape == (0, 24 * len(raws))


def test_float32_results_are_not_rounded() -> None:
    raw = raw_weight("q8_0", (40, 64))
    scheme = load_scheme(linear_scheme(torch.bfloat16, torch.device("cpu"), [raw], unrounded=True), [raw])
    x = torch.randn((3, 64)).bfloat16()
    torch.testing.assert_close(scheme.apply(x, None), x.float() @ raw.dequantize(torch.float32).T, rtol=1e-5, atol=1e-5)


def test_unsupported_layers_get_another_scheme() -> None:
    cpu = torch.device("cpu")
    assert not isinstance(linear_scheme(torch.float32, cpu, [raw_weight("q4_1", (8, 128))]), PanelScheme)
    assert not isinstance(linear_scheme(torch.bfloat16, cpu, []), PanelScheme)
    plain = RawWeight("f32", (8, 72), torch.zeros((8, 72)))
    assert not isinstance(linear_scheme(torch.bfloat16, cpu, [plain]), PanelScheme)
