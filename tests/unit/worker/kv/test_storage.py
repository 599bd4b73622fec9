"""Tensors of the KV cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.common.cpu import bf16
from kernels.ops.attention.kv_pages import key_cells, stored_in_pairs, value_cells
from tests.unit.worker.model.test_decoder import make_pair
from worker.executor.request_rows import independent_copies
from worker.kv.geometry import KVGroupSpec
from worker.kv.storage import CopyBatch, KVStorage
from worker.parallel import ParallelContext
from worker.plan import PageCopy


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)], ids=str)
def test_storage_size_equals_plan(size: int, dtype: torch.dtype) -> None:
    _, spec, _ = make_pair()
    parallel = ParallelContext(tp_size=size)
    kv = KVStorage(spec, 7, 16, dtype, "cpu", parallel)
    first = kv.layers[0]
    taken = sum(pages.numel() * pages.element_size() for layer in kv.layers for pages in (layer.keys, layer.values))
    assert taken == 7 * KVStorage.bytes_per_page(spec, 16, dtype, parallel)
    assert first.paired == (dtype is torch.bfloat16 and bf16.supported())
    keys, values = (key_cells(first.keys), value_cells(first.values)) if first.paired else (first.keys, first.values)
    assert keys.shape == values.shape == (7, max(1, 2 // size), 16, 32)


def test_cells_are_paired_if_processor_multiplies_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(bf16, "supported", lambda there=there: there)
        assert stored_in_pairs(torch.bfloat16, 64, 16) is there
        assert not stored_in_pairs(torch.float32, 64, 16)
        assert not stored_in_pairs(torch.bfloat16, 63, 16)
        assert not stored_in_pairs(torch.bfloat16, 64, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_are_applied_in_order_and_per_group(dtype: torch.dtype) -> None:
    _, spec, _ = make_pair()
    spec = dataclasses.replace(spec, kv_groups=(KVGroupSpec(layers=(0, 2)), KVGroupSpec(layers=(1,))))
    kv = KVStorage(spec, 4, 16, dtype, "cpu")
    content = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])
    for layer, numbers in zip(kv.layers, content):
        for page, number in enumerate(numbers):
            layer.keys[page], layer.values[page] = number, -number
    for part in independent_copies([PageCopy(0, 1, 2), PageCopy(0, 2, 3), PageCopy(1, 3, 0)]):
        sources, targets = torch.tensor([(copy.source, copy.target) for copy in part]).T
        kv.copy_pages(CopyBatch(part[0].group, sources, targets))
    expected = [[0, 1, 1, 1], [13, 11, 12, 13], [20, 21, 21, 21]]
    assert [[int(page.flatten()[0]) for page in layer.keys] for layer in kv.layers] == expected
    assert [[-int(page.flatten()[-1]) for page in layer.values] for layer in kv.layers] == expected
