"""Products with integer weights compared with the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from kernels.common.triton.compilations import Target
from kernels.ops.linear_weight_only import reference
from kernels.ops.linear_weight_only.cases import CASES
from kernels.ops.linear_weight_only.triton import compilations, linear, split_blocks, tile, values_step
from kernels.ops.weight_values.cases import Case, make
from kernels.ops.weight_values.layout import PackedWeight, empty_words, new_counters, num_groups, pack_rows
from kernels.ops.weight_values.reference import codes as stored_codes
from tests.fakes.pairs import each_value
from tests.kernels.helpers import run_only_the_last_program


def name_of(case: Any) -> str | None:
    if not isinstance(case, Case):
        return None
    return f"{case.rows}x{case.num_out}x{case.num_in}-int{case.bits}-g{case.group}"


def assert_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    relative, absolute = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.float(), wanted.float(), rtol=relative, atol=absolute)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that the launcher allocates with NaN."""
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        made = plain(self, *args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@each_value(case=CASES, fixed=[False, True], ids=name_of)
def test_equals_the_reference(case: Case, fixed: bool, device: torch.device) -> None:
    x, weight, bias = make(case, device)
    out = linear(x, weight, bias, fixed)
    assert torch.equal(linear(x, weight, bias, fixed), out) and not weight.counters.any()
    assert out.dtype == case.dtype and out.shape == (case.rows, case.num_out)
    assert_near(out, reference.linear(x, weight, bias))


def test_packing_keeps_every_code(device: torch.device) -> None:
    for bits, num_in in ((4, 200), (8, 130)):
        codes = torch.randint(0, 1 << bits, (5, num_in), dtype=torch.uint8, device=device)
        words = empty_words(7, num_in, bits, device).fill_(0)
        pack_rows(words, 2, codes)
        scales = torch.ones((num_groups(num_in, 0), 7), dtype=torch.float16, device=device)
        weight = PackedWeight(words, scales, None, bits, 0, num_in, new_counters(7, device))
        assert torch.equal(stored_codes(weight)[2:], codes.long())
        assert not stored_codes(weight)[:2].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_times_one_is_unchanged(bits: int, device: torch.device) -> None:
    codes = torch.arange(1 << bits, dtype=torch.uint8, device=device)[:, None].expand(-1, 32)
    words = empty_words(1 << bits, 32, bits, device)
    pack_rows(words, 0, codes)
    scales = torch.ones((num_groups(32, 32), 1 << bits), dtype=torch.float16, device=device)
    weight = PackedWeight(words, scales, None, bits, 32, 32, new_counters(1 << bits, device))
    x = torch.zeros((1, 32), dtype=torch.bfloat16, device=device)
    for i in (0, 31):
        x.zero_()[0, i] = 1
        for rows in (1, 40):
            out = linear(x.expand(rows, -1).contiguous(), weight, None)
            assert torch.equal(out[0].float(), torch.arange(1 << bits, device=device).float() - (1 << (bits - 1)))


@pytest.mark.parametrize("bits", [4, 8])
def test_deterministic_row_is_bitwise_equal_in_any_batch(bits: int, device: torch.device) -> None:
    case = Case(40, 32, 1024, bits=bits, group=128, minimum=True, bias=True)  # type: ignore[arg-type]
    x, weight, bias = make(case, device)
    assert split_blocks(8, 1, 256) < 8  # so that both ways of adding splits are compared
    whole = linear(x, weight, bias, fixed=True)
    for start, stop in ((0, 1), (3, 5), (4, 40)):
        assert torch.equal(linear(x[start:stop], weight, bias, fixed=True), whole[start:stop])


def test_rows_apart_and_beyond_32_bit_offsets(device: torch.device) -> None:
    """Use rows 2**31 + 64 elements apart, so that a wrapped offset would read another row."""
    case = Case(3, 64, 128)
    x, weight, _ = make(case, device)
    stride = (1 << 30) + 32
    if device.type == "cpu":
        memory = torch.empty(2 * stride + 128, dtype=torch.bfloat16)  # untouched pages take no memory
    else:
        memory = torch.empty(2 * stride + 128, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((3, 128), (stride, 1))
    far.copy_(x)
    assert_near(linear(far, weight, None), reference.linear(x, weight, None))


def test_no_rows(device: torch.device) -> None:
    x, weight, bias = make(dataclasses.replace(CASES[0], rows=0), device)
    assert linear(x, weight, bias).shape == (0, 64)


def test_invalid_shapes_are_refused(device: torch.device) -> None:
    x, weight, _ = make(CASES[0], device)
    with pytest.raises(ValueError, match=r"shape \(1, 64\) for a weight of 128 inputs"):
        linear(x[:, :64], weight, None)
    with pytest.raises(ValueError, match="float32"):
        linear(x.float(), weight, None)
    with pytest.raises(ValueError, match="not adjacent"):
        linear(x.expand(128, -1).contiguous().T, weight, None)
    with pytest.raises(ValueError, match=r"bias of shape \(3,\)"):
        linear(x, weight, x.new_zeros(3))
    with pytest.raises(ValueError, match="groups of 48"):
        num_groups(96, 48)
    with pytest.raises(ValueError, match="3 bits"):
        empty_words(1, 1, 3, device)


def test_splits_depend_only_on_shape_and_fill_the_gpu() -> None:
    for num_out, num_in in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        chosen = tile(1, 4, False, False)
        per_split = split_blocks(num_in // 128, num_out // chosen.columns, chosen.split_for)
        programs = num_out // chosen.columns * -(-(num_in // 128) // per_split)
        assert 512 <= programs <= 1188  # many, all at once: nine per multiprocessor


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_each_configuration_is_compiled_once(target: Target) -> None:
    made = compilations(target)
    names = [(one.kernel, one.configuration) for one in made]
    assert len(set(names)) == len(names)
    for one in made:
        assert list(one.signature) == one.function.arg_names
        assert {name for name, kind in one.signature.items() if kind == "constexpr"} == set(one.constants)


@pytest.mark.parametrize("has_bias", [False, True])
def test_large_batches_use_decoded_values(
    has_bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(1024, 150, 160, group=32, minimum=True, bias=has_bias)
    monkeypatch.setattr("kernels.ops.linear_weight_only.triton._VALUES_BYTES", 64 * 160 * 2)  # in three parts
    monkeypatch.setattr("kernels.ops.linear_weight_only.triton.tile", None)  # no other path is taken
    x, weight, bias = make(case, device)
    assert_near(linear(x, weight, bias), reference.linear(x, weight, bias))


def test_parts_of_decoded_values_start_at_vector_boundaries() -> None:
    assert values_step(4096) == 8192
    assert values_step(14336) == 2304
    assert values_step(1 << 24) == 64


@pytest.mark.parametrize("bits", [4, 8])
def test_words_beyond_32_bit_offsets(bits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks more than 2**31 words apart, so that a wrapped offset would read elsewhere."""
    num_out, num_in = 1 << 20, (66 if bits == 4 else 17) * 128
    words = empty_words(num_out, num_in, bits, device)  # untouched pages take no memory on a CPU
    assert words.numel() > 1 << 31
    codes = torch.randint(0, 1 << bits, (64, num_in), dtype=torch.uint8, device=device)
    pack_rows(words, num_out - 64, codes)
    scales = torch.full((1, num_out), 0.01, dtype=torch.float16, device=device)
    weight = PackedWeight(words, scales, None, bits, 0, num_in, new_counters(num_out, device))
    x = torch.randn((1, num_in), device=device).to(torch.bfloat16)
    run_only_the_last_program(monkeypatch)
    out = linear(x, weight, None)[:, -64:]
    last = PackedWeight(words[:, -64:], scales[:, -64:], None, bits, 0, num_in, new_counters(64, device))
    assert_near(out, reference.linear(x, last, None))
