"""Integer weights times few rows on the CPU, against products in float64, and the scheme with its two formats."""

from __future__ import annotations

import pytest
import torch

from kernels.linear_weight_only.cpu import MAX_ROWS, CpuWeight, FewRowsLinear, block_values, supported
from worker.quant.few_rows import FewRowsScheme
from worker.quant.gguf_formats import FORMATS, WeightFormat, row_bytes
from worker.quant.onednn_packed import OneDNNPackedScheme
from worker.quant.raw_weight import RawWeight
from worker.quant.select import linear_scheme

pytestmark = pytest.mark.skipif(not supported(), reason="the processor has no AVX512-BF16")

SHAPES = [(1, 64), (3, 128), (17, 576), (960, 576), (576, 1536), (33, 192)]


def make(bits: int, shape: tuple[int, int], *, minimum: bool) -> tuple[CpuWeight, torch.Tensor]:
    """A weight, and its values [out, in] in float32 rounded to bfloat16, as the kernel has them."""
    num_out, num_in = shape
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, shape).to(dtype)
    scales = torch.rand((num_out, num_in // 32)) * 0.05 + 1e-3
    minimums = -torch.rand((num_out, num_in // 32)) if minimum else None
    values = codes.float() * scales.repeat_interleave(32, dim=1)
    if minimums is not None:
        values += minimums.repeat_interleave(32, dim=1)
    return CpuWeight.pack(codes, scales, minimums), values.bfloat16().double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "minimum"), [(4, True), (4, False), (8, False), (8, True)])
def test_products_are_those_of_the_values(bits: int, minimum: bool, shape: tuple[int, int]) -> None:
    weight, values = make(bits, shape, minimum=minimum)
    linear = FewRowsLinear(bits, minimum)
    for rows in range(1, MAX_ROWS + 1):
        x = torch.randn((rows, shape[1])).bfloat16()
        for bias in (None, torch.randn(shape[0]).bfloat16()):
            out = linear(x, weight, bias)
            want = x.double() @ values.T + (0 if bias is None else bias.double())
            # Values may be rounded the other way where the sum of code * scale and minimum lies in the middle.
            assert out.shape == want.shape and bool(out.isfinite().all())
            torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2e-2 * shape[1] ** 0.5)
            assert (out.double() - want).norm() <= 4e-3 * want.norm()


def test_a_row_is_the_same_beside_others_of_its_variant() -> None:
    weight, _ = make(4, (40, 576), minimum=True)
    linear = FewRowsLinear(4, True)
    x = torch.randn((8, 576)).bfloat16()
    for rows in (5, 6, 7, 8):
        assert torch.equal(linear(x[:rows].contiguous(), weight, None), linear(x, weight, None)[:rows])


def test_inputs_that_are_no_pair_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="96 inputs"):
        CpuWeight.pack(torch.zeros((4, 96), dtype=torch.int8), torch.ones((4, 3)), None)


def raw_weight(name: WeightFormat, shape: tuple[int, int]) -> RawWeight:
    """Random blocks with finite factors."""
    data = torch.randint(0, 256, (shape[0], row_bytes(name, shape[1])), dtype=torch.uint8)
    blocks = data.view(shape[0], -1, FORMATS[name].block_bytes)
    halves = 4 if name in ("q4_1", "q5_1") else 2
    factors = (torch.rand((*blocks.shape[:2], halves // 2)) * 0.02).half()
    blocks[..., :halves] = factors.view(torch.uint8).reshape(*blocks.shape[:2], halves)
    return RawWeight(name, shape, data)


@pytest.mark.parametrize(
    "formats", [("q4_0",), ("q4_1",), ("q8_0",), ("q5_0",), ("q5_1",), ("q4_1", "q8_0"), ("q4_0", "q4_1", "q4_1")]
)
def test_both_formats_of_a_layer_have_the_values_of_the_file(formats: tuple[WeightFormat, ...]) -> None:
    raws = [raw_weight(name, (24, 128)) for name in formats]
    scheme = linear_scheme(torch.bfloat16, torch.device("cpu"), raws)
    assert isinstance(scheme, FewRowsScheme)
    plain = OneDNNPackedScheme(torch.bfloat16)
    for one in (scheme, plain):
        one.create_weights(24 * len(raws), 128)
        for index, raw in enumerate(raws):
            one.load_rows(24 * index, raw, torch.arange(23, -1, -1) if index == 0 else None)
        one.after_load()
    for rows in (1, 2, 3, 8, 9, 40):
        x = torch.randn((rows, 128)).bfloat16()
        want = plain.apply(x, None).double()
        assert (scheme.apply(x, None).double() - want).norm() <= 4e-3 * want.norm()
    assert scheme.apply(torch.empty((0, 128)).bfloat16(), None).shape == (0, 24 * len(raws))


def test_what_the_kernel_does_not_cover_stays_dense() -> None:
    cpu = torch.device("cpu")
    assert not isinstance(linear_scheme(torch.float32, cpu, [raw_weight("q4_1", (8, 128))]), FewRowsScheme)
    assert not isinstance(linear_scheme(torch.bfloat16, cpu, [raw_weight("q4_1", (8, 96))]), FewRowsScheme)
    assert not isinstance(linear_scheme(torch.bfloat16, cpu, []), FewRowsScheme)
    plain = RawWeight("f32", (8, 128), torch.zeros((8, 128)))
    assert not isinstance(linear_scheme(torch.bfloat16, cpu, [plain]), FewRowsScheme)


@pytest.mark.parametrize(("bits", "minimum"), [(4, True), (4, False), (8, False), (8, True)])
def test_values_are_written_as_a_dense_weight(bits: int, minimum: bool) -> None:
    weight, values = make(bits, (37, 192), minimum=minimum)
    out = block_values(bits, minimum)(weight).double()
    assert out.shape == values.shape
    # A product and a sum rounded once or twice may fall to either side of the middle of two bfloat16 numbers.
    assert (out != values).float().mean() < 1e-2
    torch.testing.assert_close(out, values, rtol=2**-7, atol=1e-6)
