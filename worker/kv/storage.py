"""The tensors of the KV cache: for each layer keys and values by page. Owns their layout; the scheduler owns pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from worker.model.parallel import ParallelContext
from worker.model.spec import DecoderSpec
from worker.scheduler.plan import PageCopy


def kv_heads_per_rank(spec: DecoderSpec, parallel: ParallelContext) -> int:
    """KV heads that one rank holds; at least one, replicated where there are fewer than ranks."""
    return max(1, spec.num_kv_heads // parallel.tp_size)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost nothing yet: writing 4 GiB of them takes seconds at start, most of them for a page never used."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVStorage:
    """Pages 0 .. num_pages - 1 of every layer; no page is reserved.

    `keys[layer]` and `values[layer]` are [page, kv_head, slot, head_dim]. On the CPU the memory of the keys is
    [page, kv_head, head_dim, slot] (the tensors are views of it): scores of a page's slots are then computed side by
    side in one vector register.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: ParallelContext | None = None,
    ) -> None:
        """Allocates zeros. On the CPU the system provides each page of memory when it is first written."""
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._group_layers = [group.layers for group in spec.kv_groups]
        shape = (spec.num_layers, num_pages, num_kv_heads, page_size, spec.head_dim)
        if self.device.type == "cpu":
            key_memory = _lazy_zeros((*shape[:3], spec.head_dim, page_size), dtype).transpose(-1, -2)
            value_memory = _lazy_zeros(shape, dtype)
        else:
            key_memory = torch.zeros(shape, dtype=dtype, device=self.device)
            value_memory = torch.zeros(shape, dtype=dtype, device=self.device)
        self.keys = list(key_memory.unbind(0))
        self.values = list(value_memory.unbind(0))

    @staticmethod
    def bytes_per_page(
        spec: DecoderSpec, page_size: int, dtype: torch.dtype, parallel: ParallelContext | None = None
    ) -> int:
        """Bytes that one page takes on one rank, over all layers, keys and values."""
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        return 2 * spec.num_layers * num_kv_heads * page_size * spec.head_dim * dtype.itemsize

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages in order, all layers of each copy's KV group."""
        for copy in copies:
            for layer in self._group_layers[copy.group]:
                self.keys[layer][copy.target].copy_(self.keys[layer][copy.source])
                self.values[layer][copy.target].copy_(self.values[layer][copy.source])
