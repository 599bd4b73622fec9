"""The tensors of the KV cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.worker.model.test_decoder import make_pair
from worker.executor.request_rows import independent_copies
from worker.kv.storage import CopyBatch, KVStorage
from worker.model.parallel import ParallelContext
from worker.model.spec import KVGroupSpec
from worker.scheduler.plan import PageCopy


@pytest.mark.parametrize("size", [1, 2, 4])
def test_size_is_what_was_planned(size: int) -> None:
    _, spec, _ = make_pair()
    parallel = ParallelContext(tp_size=size)
    kv = KVStorage(spec, 7, 16, torch.float32, "cpu", parallel)
    taken = sum(pages.numel() * pages.element_size() for layer in kv.layers for pages in (layer.keys, layer.values))
    assert taken == 7 * KVStorage.bytes_per_page(spec, 16, torch.float32, parallel)
    assert kv.layers[0].keys.shape == kv.layers[0].values.shape == (7, max(1, 2 // size), 16, 32)


def test_copies_follow_each_other_and_their_group() -> None:
    _, spec, _ = make_pair()
    spec = dataclasses.replace(spec, kv_groups=(KVGroupSpec(layers=(0, 2)), KVGroupSpec(layers=(1,))))
    kv = KVStorage(spec, 4, 16, torch.float32, "cpu")
    for layer in range(3):
        for page in range(4):
            kv.layers[layer].keys[page] = 10 * layer + page
            kv.layers[layer].values[page] = -(10 * layer + page)
    for part in independent_copies([PageCopy(0, 1, 2), PageCopy(0, 2, 3), PageCopy(1, 3, 0)]):
        sources, targets = torch.tensor([(copy.source, copy.target) for copy in part]).T
        kv.copy_pages(CopyBatch(part[0].group, sources, targets))
    assert [[int(page[0, 0, 0]) for page in kv.layers[layer].keys] for layer in range(3)] == [
        [0, 1, 1, 1],
        [13, 11, 12, 13],
        [20, 21, 21, 21],
    ]
    assert [[int(page[1, 15, 31]) for page in kv.layers[layer].values] for layer in range(3)] == [
        [0, -1, -1, -1],
        [-13, -11, -12, -13],
        [-20, -21, -21, -21],
    ]
