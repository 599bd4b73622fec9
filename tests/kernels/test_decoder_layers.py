"""Tests of the fused decoder layers against layers in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.common.cpu.bf16 import supported as processor_supported
from kernels.ops.attention.cases import make_tensors
from kernels.ops.attention.cpu import PreparedAttention, make_tiles
from kernels.ops.attention.kv_pages import KVPages, key_cells, value_cells
from kernels.ops.decoder_layers import cpu
from kernels.ops.decoder_layers.cases import CASES, Case, make_layers
from kernels.ops.decoder_layers.cpu import DecoderLayers, Shape, supported
from kernels.ops.decoder_layers.reference import layers as reference
from tests.fakes.pairs import slow

pytestmark = [
    pytest.mark.skipif(not processor_supported(), reason="the processor has no AVX512-BF16"),
    pytest.mark.timeout(300),
]


def _copies(pages: KVPages, count: int) -> list[KVPages]:
    return [KVPages(pages.keys.clone(), pages.values.clone()) for _ in range(count)]


def _cells(pages: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as [page, kv_head, slot, head_dim]."""
    return (key_cells(pages.keys), value_cells(pages.values)) if pages.paired else (pages.keys, pages.values)


def shape_of(case: Case) -> Shape:
    return Shape(
        hidden=case.hidden,
        intermediate=case.intermediate,
        geometry=case.attention.geometry(),
        eps=1e-5,
        kv_dtype=case.kv_dtype,
    )


# The last but one is a kernel to compile that differs little from the others.
@pytest.mark.parametrize("case", [*CASES[:-2], slow(CASES[-2]), CASES[-1]], ids=lambda case: case.attention.name)
def test_layers_equal_the_reference(case: Case) -> None:
    torch.manual_seed(1)
    shape, geometry = shape_of(case), case.attention.geometry()
    weights = make_layers(case)
    assert supported(shape, weights)
    tensors = make_tensors(case.attention, torch.bfloat16, case.kv_dtype)
    inputs = tensors.inputs
    num_tokens = inputs.positions.shape[0]
    residual = torch.randn((num_tokens, case.hidden))
    mine = _copies(tensors.pages(), case.num_layers)
    theirs = [KVPages(one.keys.double(), one.values.double()) for one in mine]
    expected = reference(residual.double(), weights, theirs, inputs, geometry, 1e-5)
    layers = DecoderLayers(shape, weights)
    prepared = PreparedAttention(inputs, geometry, make_tiles(inputs))
    first = residual.clone()
    layers(first, mine, prepared)
    error = (first.double() - expected).norm() / expected.norm()
    # Separate bfloat16 ops have the same distance: 0.1 to 1.4 % after two layers.
    assert error < 2.5e-2 and bool(first.isfinite().all())
    slots = inputs.slot_mapping
    size = geometry.page_size
    for got, want in zip(mine, theirs):
        for cells, others in zip(_cells(got), _cells(want)):
            written, wanted = cells[slots // size, :, slots % size].double(), others[slots // size, :, slots % size]
            assert (written - wanted).norm() < 2.5e-2 * wanted.norm()
            cells[slots // size, :, slots % size] = 0
            others[slots // size, :, slots % size] = 0
            torch.testing.assert_close(cells.double(), others, rtol=0, atol=0, equal_nan=True)
    # Repeat the step with the same op: counters and buffers must not keep state of the previous step.
    again = residual.clone()
    layers(again, mine, prepared)
    assert torch.equal(again, first)


@pytest.mark.parametrize("requests", [[(1, 190)], [(9, 0), (1, 40)], [(200, 5)]])
def test_results_are_independent_of_thread_count(
    requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test thread counts above the number of processors as well, where threads arrive late at most phases."""
    attention = dataclasses.replace(CASES[0].attention, requests=requests)
    case = dataclasses.replace(CASES[0], attention=attention)
    tensors = make_tensors(attention, torch.bfloat16, case.kv_dtype)
    prepared = PreparedAttention(tensors.inputs, attention.geometry(), make_tiles(tensors.inputs))
    residual, weights = torch.randn((tensors.qkv.shape[0], case.hidden)), make_layers(case)
    found = []
    for count in (1, 3, 9):
        monkeypatch.setattr(cpu, "num_threads", lambda count=count: count)
        layers, out = DecoderLayers(shape_of(case), weights), residual.clone()
        layers(out, _copies(tensors.pages(), case.num_layers), prepared)
        found.append(out)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_layers_of_different_formats_are_not_fused() -> None:
    case = CASES[0]
    shape = shape_of(case)
    four, eight = make_layers(case), make_layers(Case(case.attention, bits=8, minimum=False))
    assert supported(shape, four)
    assert not supported(shape, [*four, *eight])
    assert not supported(shape, [])


def test_pages_of_another_format_are_rejected() -> None:
    case = CASES[0]
    layers = DecoderLayers(shape_of(case), make_layers(case))
    tensors = make_tensors(case.attention, torch.bfloat16, torch.float32)
    prepared = PreparedAttention(tensors.inputs, case.attention.geometry(), make_tiles(tensors.inputs))
    pages = tensors.pages()
    other_dtype = KVPages(pages.keys.bfloat16(), pages.values.bfloat16())
    other_size = KVPages(pages.keys[:, :, :8].clone(), pages.values[:, :, :8].clone())
    for wrong in ([pages], [other_dtype] * 2, [pages, other_dtype], [other_size] * 2):
        with pytest.raises(ValueError, match="pages"):
            layers(torch.zeros((1, case.hidden)), wrong, prepared)
