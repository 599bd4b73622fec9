"""Decoder split over ranks compared with the whole; ranks are threads that exchange tensors at barriers."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.fakes.weights import make_batch
from tests.unit.worker.model.test_decoder import BIASES, MAX_LEN, PAGE, assert_close, make_decoder, make_pair, token_ids
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.parallel import ParallelContext


class Exchange:
    """Tensors that the ranks of a group exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[Any] = [None] * size

    def share(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        everyone = list(self.tensors)
        self.barrier.wait()
        return everyone


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadRank(ParallelContext):
    """One rank of an Exchange, used as its process group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.group.share(self.tp_rank, tensor)).sum(dim=0))

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.share(self.tp_rank, tensor), dim=-1)


@pytest.mark.parametrize(("size", "tied"), [(2, True), (4, False)])
def test_ranks_together_equal_single_rank(size: int, tied: bool) -> None:
    _, spec, weights = make_pair(tie_word_embeddings=tied, **BIASES)
    steps = [
        make_batch([(token_ids(40)[:30], 0, [0, 1, 2]), (token_ids(20), 0, [3, 4])], PAGE),
        make_batch([(token_ids(40)[30:], 30, [0, 1, 2]), ([7], 20, [3, 4])], PAGE),
    ]
    kv = KVStorage(spec, 5, PAGE, torch.float32, "cpu")
    whole = make_decoder(spec, weights)
    expected = [whole.forward(step, kv) for step in steps]
    exchange = Exchange(size)

    def run(rank: int) -> list[torch.Tensor]:
        parallel = ThreadRank(tp_rank=rank, tp_size=size, group=exchange)
        decoder = Decoder(spec, weights, dtype=torch.float32, device="cpu", parallel=parallel, max_model_len=MAX_LEN)
        part = KVStorage(spec, 5, PAGE, torch.float32, "cpu", parallel)
        return [decoder.forward(step, part) for step in steps]

    with ThreadPoolExecutor(size) as pool:
        for logits in pool.map(run, range(size)):
            for ours, wanted in zip(logits, expected):
                assert_close(ours, wanted)
