"""The tensors of the KV cache: for each layer keys and values by page. Owns their layout; the scheduler owns pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from kernels.attention.kv_pages import KVFormat, KVPages
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


def _cell(head_dim: int, dtype: torch.dtype, kv_format: KVFormat) -> tuple[int, torch.dtype]:
    """Values that a cell stores, and their dtype."""
    match kv_format:
        case "dense":
            return head_dim, dtype
        case "fp8":
            return head_dim, torch.float8_e4m3fn
        case "int8":
            return head_dim, torch.int8
        case "int4":
            return head_dim // 2, torch.uint8


class KVStorage:
    """Pages 0 .. num_pages - 1 of every layer; no page is reserved.

    `layers[layer]` has its keys and values, [page, kv_head, slot, head_dim]. On the CPU the memory of dense keys is
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
        kv_format: KVFormat = "dense",
    ) -> None:
        """Allocates zeros. On the CPU the system provides each page of memory when it is first written.

        dtype: of dense cells; the other formats have their own.
        """
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._group_layers = [group.layers for group in spec.kv_groups]
        width, cell_dtype = _cell(spec.head_dim, dtype, kv_format)
        shape = (spec.num_layers, num_pages, num_kv_heads, page_size)
        if self.device.type == "cpu" and kv_format == "dense":
            keys = _lazy_zeros((*shape[:3], width, page_size), cell_dtype).transpose(-1, -2)
        else:
            keys = self._zeros((*shape, width), cell_dtype)
        values = self._zeros((*shape, width), cell_dtype)
        if kv_format == "dense":
            self.layers = [KVPages(*cells) for cells in zip(keys.unbind(0), values.unbind(0))]
        else:
            scales = [self._zeros(shape, torch.float32).unbind(0) for _ in range(2)]
            layers = zip(keys.unbind(0), values.unbind(0), scales[0], scales[1])
            self.layers = [KVPages(*tensors, kv_format) for tensors in layers]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return _lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @staticmethod
    def bytes_per_page(
        spec: DecoderSpec,
        page_size: int,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        kv_format: KVFormat = "dense",
    ) -> int:
        """Bytes that one page takes on one rank, over all layers, keys and values and their scales."""
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        width, cell_dtype = _cell(spec.head_dim, dtype, kv_format)
        cell_bytes = width * cell_dtype.itemsize + (0 if kv_format == "dense" else torch.float32.itemsize)
        return 2 * spec.num_layers * num_kv_heads * page_size * cell_bytes

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages in order, all layers of each copy's KV group."""
        for copy in copies:
            for layer in self._group_layers[copy.group]:
                pages = self.layers[layer]
                for tensor in (pages.keys, pages.values, pages.key_scales, pages.value_scales):
                    if tensor is not None:
                        tensor[copy.target].copy_(tensor[copy.source])
