"""Tensors of the KV cache: keys and values of each layer by page. This module owns their layout."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

from kernels.ops.attention.kv_pages import KVFormat, KVPages, stored_in_pairs
from worker.kv.geometry import KVGeometry
from worker.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Pages of one KV group to copy at once. No page is written twice, or read after it was written.

    Attributes:
        group: Index of the KV group.
        sources: [n] int64 on the device.
        targets: [n] int64 on the device.
    """

    group: int
    sources: torch.Tensor
    targets: torch.Tensor


def kv_heads_per_rank(spec: KVGeometry, parallel: ParallelContext) -> int:
    """Return the KV heads that one rank holds; at least one, replicated if there are fewer than ranks."""
    return max(1, spec.num_kv_heads // parallel.tp_size)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is provided on first write.

    Writing 4 GiB of zeros would take seconds at start, mostly for unused pages.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _cell(head_dim: int, dtype: torch.dtype, kv_format: KVFormat) -> tuple[int, torch.dtype]:
    """Return the number of values that a cell stores, and their dtype."""
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
    [page, kv_head, head_dim, slot] (the tensors are views of it), so that the scores of a page's slots are computed in
    one vector register. If the CPU multiplies pairs of bfloat16, both are stored in pairs; see KVPages.
    """

    def __init__(
        self,
        spec: KVGeometry,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: ParallelContext | None = None,
        kv_format: KVFormat = "dense",
    ) -> None:
        """Allocate zeros. On the CPU the system provides memory when it is first written.

        Args:
            spec: Shape of the model's keys and values.
            num_pages: Number of pages.
            page_size: Tokens per page.
            dtype: Dtype of dense cells; other formats have their own.
            device: Device of the tensors.
            parallel: Ranks.
            kv_format: Format of the cells.
        """
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        width, cell_dtype = _cell(spec.head_dim, dtype, kv_format)
        on_cpu = self.device.type == "cpu" and kv_format == "dense"
        paired = on_cpu and stored_in_pairs(dtype, width, page_size)
        by_slot = on_cpu and not paired
        self._draft: KVStorage | None = None
        found: dict[int, KVPages] = {}
        # Tensors of each KV group in memory order, [layers of the group, pages, ...].
        self._groups: list[list[torch.Tensor]] = []
        for group in spec.kv_groups:
            shape = (len(group.layers), num_pages, num_kv_heads, page_size)
            key_shape = (width, page_size) if by_slot else (width // 2, page_size, 2) if paired else (page_size, width)
            value_shape = (page_size // 2, width, 2) if paired else (page_size, width)
            keys = self._zeros((*shape[:3], *key_shape), cell_dtype)
            values = self._zeros((*shape[:3], *value_shape), cell_dtype)
            tensors = [keys, values]
            cells = [keys.transpose(-1, -2) if by_slot else keys, values]
            if kv_format != "dense":
                factors = [self._zeros(shape, torch.float32) for _ in range(2)]
                tensors += factors
                cells += factors
            # torch copies bytes by index on every device, but not 8-bit floating-point numbers.
            self._groups.append([t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors])
            for i, layer in enumerate(group.layers):
                key, value, *scales = (tensor[i] for tensor in cells)
                key_scales, value_scales = scales or (None, None)
                found[layer] = KVPages(key, value, key_scales, value_scales, kv_format)
        self.layers = [found[layer] for layer in range(spec.num_layers)]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return _lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @staticmethod
    def bytes_per_page(
        spec: KVGeometry,
        page_size: int,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        kv_format: KVFormat = "dense",
    ) -> int:
        """Return the bytes of one page on one rank, over all layers, with keys, values and scales."""
        num_kv_heads = kv_heads_per_rank(spec, parallel or ParallelContext())
        width, cell_dtype = _cell(spec.head_dim, dtype, kv_format)
        cell_bytes = width * cell_dtype.itemsize + (0 if kv_format == "dense" else torch.float32.itemsize)
        return 2 * spec.num_layers * num_kv_heads * page_size * cell_bytes

    def copy_along(self, draft: KVStorage) -> None:
        """Copy the draft model's half of a page too from now on; it uses the page ids of the first group."""
        self._draft = draft

    def copy_pages(self, copies: CopyBatch) -> None:
        """Copy pages in all layers of a KV group; nothing is read on the host."""
        for tensor in self._groups[copies.group]:
            tensor.index_copy_(1, copies.targets, tensor.index_select(1, copies.sources))
        if self._draft is not None and copies.group == 0:
            self._draft.copy_pages(copies)
