"""Shapes of paged attention for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.common.tensors import on_device
from kernels.ops.attention.inputs import AttentionGeometry, AttentionInputs, LayerConstants
from kernels.ops.attention.kv_pages import KVFormat, KVPages, pair_keys, pair_values, quantize_cells, stored_in_pairs


@dataclass(frozen=True)
class Case:
    """One step, with its requests as pairs (number of tokens computed in the step, context length before it).

    The pair (1, -1) is padding of a captured graph: a token of no request, which is not written and sees no keys.
    """

    name: str
    requests: list[tuple[int, int]]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    rotary_dim: int = 64
    page_size: int = 16
    scale: float = 0.125
    seed: int = field(default=0)
    softcap: float | None = None
    window: int | None = None
    qk_norm: bool = False
    sinks: bool = False

    def geometry(self) -> AttentionGeometry:
        """Return the constants of the operation."""
        return AttentionGeometry(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary_dim,
            self.page_size,
            self.scale,
            self.softcap,
            self.window,
        )

    def layer(self) -> LayerConstants:
        """Return random norms and sinks if the case has them."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        norms = [torch.rand(self.head_dim, generator=generator) + 0.5 for _ in range(2)] if self.qk_norm else [None] * 2
        sinks = torch.randn(self.num_heads, generator=generator) * 2 if self.sinks else None
        return LayerConstants(norms[0], norms[1], 1e-6, sinks)


CASES = [
    Case("one token, empty cache", [(1, 0)]),
    Case("decode, one request", [(1, 190)]),
    Case("decode, odd contexts", [(1, 15), (1, 16), (1, 127), (1, 128), (1, 700)]),
    Case("prefill", [(130, 0)]),
    Case("prefill of a whole tile", [(16, 0), (17, 0), (15, 0)]),
    Case("chunk after a long context", [(33, 300)]),
    Case("decode and prefill in one step", [(1, 200), (45, 0), (1, 3), (7, 121)]),
]


@dataclass(frozen=True)
class Tensors:
    """Input tensors of a case; cells of keys and values that belong to no token are poisoned."""

    qkv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    inputs: AttentionInputs

    def pages(self) -> KVPages:
        """Return the keys and values as the operation's argument."""
        return KVPages(self.keys, self.values)


def make_tensors(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype, *, paired: bool | None = None) -> Tensors:
    """Return random tensors of a case.

    Keys are stored [page, kv_head, head_dim, slot], or keys and values in pairs, like the CPU's pages. `paired`
    selects the layout; None selects the layout of this processor.
    """
    generator = torch.Generator().manual_seed(case.seed)
    size = case.page_size
    counts = [-(-(before + tokens) // size) for tokens, before in case.requests]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    tables: list[list[int]] = []
    positions: list[int] = []
    slots: list[int] = []
    written: list[int] = []
    for (tokens, before), count in zip(case.requests, counts):
        pages = [order.pop() for _ in range(count)]
        tables.append(pages + [0] * (max(counts) - count))
        place = [pages[i // size] * size + i % size for i in range(before + tokens)]
        if before < 0:
            slots.append(-1)
            positions.append(0)
            continue
        written += place[:before]
        slots += place[before:]
        positions += range(before, before + tokens)
    shape = (num_pages, case.num_kv_heads, case.head_dim, size)
    keys = torch.full(shape, float("nan"), dtype=kv_dtype).transpose(-1, -2)
    values = torch.full((num_pages, case.num_kv_heads, size, case.head_dim), float("nan"), dtype=kv_dtype)
    past = torch.tensor(written, dtype=torch.int64)
    for memory in (keys, values):
        cells = torch.randn((past.numel(), case.num_kv_heads, case.head_dim), generator=generator)
        memory[past // size, :, past % size] = cells.to(kv_dtype)
    if stored_in_pairs(kv_dtype, case.head_dim, size) if paired is None else paired:
        keys, values = pair_keys(keys), pair_values(values)
    lengths = [tokens for tokens, _ in case.requests]
    contexts = [sum(request) for request in case.requests]
    angles = torch.arange(max(contexts))[:, None] * torch.rand(case.rotary_dim // 2, generator=generator)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    inputs = AttentionInputs(
        positions=torch.tensor(positions, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=torch.tensor(tables, dtype=torch.int32),
        rope_table=torch.cat((angles.cos(), angles.sin()), dim=-1),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(contexts),
    )
    qkv = (torch.randn((sum(lengths), width), generator=generator) * 2).to(dtype)
    return Tensors(qkv, keys, values, inputs)


@dataclass(frozen=True)
class Step:
    """Arguments of the operation for one case on a device."""

    qkv: torch.Tensor
    pages: KVPages
    inputs: AttentionInputs
    geometry: AttentionGeometry
    layer: LayerConstants

    def copy_of_pages(self) -> KVPages:
        """Return a copy of the pages for the reference, which writes to them as well."""
        pages = self.pages
        copies = [None if t is None else t.clone() for t in (pages.key_scales, pages.value_scales)]
        return KVPages(pages.keys.clone(), pages.values.clone(), copies[0], copies[1], pages.format)


def make_step(case: Case, dtype: torch.dtype, kv_format: KVFormat, device: torch.device) -> Step:
    """Return the tensors of `make_tensors` with keys and values of any format in the contiguous layout of a GPU.

    Cells without a token are NaN; in quantized formats, their scales are NaN.
    """
    tensors = make_tensors(case, dtype, dtype, paired=False)
    keys, values = tensors.keys.contiguous(), tensors.values
    pages = KVPages(keys, values)
    if kv_format != "dense":
        (keys, key_scales), (values, value_scales) = quantize_cells(keys, kv_format), quantize_cells(values, kv_format)
        pages = KVPages(keys, values, key_scales, value_scales, kv_format)
    return Step(
        tensors.qkv.to(device),
        on_device(pages, device),
        on_device(tensors.inputs, device),
        case.geometry(),
        on_device(case.layer(), device),
    )
