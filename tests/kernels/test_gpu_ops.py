"""GPU operations as a decoder calls them: attention over mixed batches compared with a float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.backends.gpu import TritonAttention, TritonOps
from kernels.backends.reference import DecoderOps
from kernels.common.tolerances import TOLERANCES, of_attention
from kernels.ops.attention.cascade import SharedPrefix, cascade_work
from kernels.ops.attention.cases import Case, Step, make_step
from kernels.ops.attention.inputs import AttentionInputs
from kernels.ops.attention.kv_pages import KVFormat, KVPages
from kernels.ops.attention.reference import attend, paged_attention, rotate_and_write
from kernels.ops.attention_cascade.triton import members_per_tile
from tests.fakes.pairs import each_value, slow
from tests.kernels.helpers import assert_same_bits, name_of

FORMATS: tuple[KVFormat, ...] = ("dense", "fp8", "int8", "int4")

MIXED = Case("mixed", [(1, 300), (9, 0), (1, 3), (2, 257), (1, -1), (5, 121)], num_heads=2, num_kv_heads=1)
CASES = [
    MIXED,
    Case("decode", [(1, 0), (1, 15), (1, 256), (1, 700), (1, -1)], num_heads=4, num_kv_heads=2),
    Case("a prompt alone", [(23, 0)], num_heads=3, num_kv_heads=1),
    Case("drafts", [(4, 300), (4, 20)], num_heads=8, num_kv_heads=2),
    Case("all features", [(1, 300), (5, 40), (1, 7)], num_heads=4, num_kv_heads=2, window=60, softcap=15.0,
         qk_norm=True, sinks=True),
    Case("heads of 80", [(1, 270), (5, 40)], num_heads=4, num_kv_heads=2, head_dim=80, rotary_dim=32),
    Case("heads of 96", [(1, 270), (5, 40)], num_heads=2, num_kv_heads=1, head_dim=96, rotary_dim=96),
    Case("heads of 128", [(1, 270), (5, 40)], num_heads=4, num_kv_heads=1, head_dim=128, rotary_dim=128),
    Case("heads of 256", [(1, 270), (5, 40)], num_heads=2, num_kv_heads=1, head_dim=256, rotary_dim=256),
    Case("one KV head, pages of 24", [(1, 270), (5, 40)], num_heads=5, num_kv_heads=1, page_size=24),
]  # fmt: skip


def check(case: Case, dtype: torch.dtype, kv_format: KVFormat, ops: DecoderOps, device: torch.device) -> None:
    step = make_step(case, dtype, kv_format, device)
    expected = step.copy_of_pages()
    # Queries are rounded between the two kernels, as keys are in the cache.
    query = rotate_and_write(step.qkv, expected, step.inputs, step.geometry, step.layer, torch.float64)
    wanted = attend(query.to(dtype).double(), expected, step.inputs, step.geometry, step.layer)
    out = run(ops, step)
    if kv_format != "dense":
        # A rotated key's float32 sum may round to the other side of a tie, which can change a score. Nearly all cells
        # must equal the reference's (test_rope_kv.py bounds the others), and the result must follow from the cells
        # written.
        same = [ours == theirs for ours, theirs in zip(cells_of(step.pages), cells_of(expected))]
        assert all(float((~one).double().mean()) < 0.002 for one in same)
        wanted = attend(query.to(dtype).double(), step.pages, step.inputs, step.geometry, step.layer)
    rows = (step.inputs.seq_lens > 0).repeat_interleave(step.inputs.cu_seqlens_q.diff())
    relative, absolute = of_attention(dtype, kv_format)
    torch.testing.assert_close(out[rows], wanted[rows].to(dtype), rtol=relative, atol=absolute)


def cells_of(pages: KVPages) -> list[torch.Tensor]:
    """Return the bytes of keys and values."""
    return [pages.keys.view(torch.uint8), pages.values.view(torch.uint8)]


def run(ops: DecoderOps, step: Step) -> torch.Tensor:
    prepared = ops.prepare_attention(step.inputs, step.geometry)
    return ops.paged_attention(step.qkv, step.pages, prepared, step.layer)


@each_value(case=CASES, deterministic=[False, True], ids=name_of)
def test_attention(case: Case, deterministic: bool, device: torch.device) -> None:
    check(case, torch.float32, "dense", TritonOps(device, deterministic), device)


@each_value(dtype=[torch.bfloat16, torch.float16], kv_format=FORMATS)
def test_formats(dtype: torch.dtype, kv_format: KVFormat, device: torch.device) -> None:
    check(MIXED, dtype, kv_format, TritonOps(device), device)


@each_value(case=[CASES[4], CASES[5], CASES[8]], kv_format=["fp8", "int8", "int4"], ids=name_of)
def test_formats_and_features(case: Case, kv_format: KVFormat, device: torch.device) -> None:
    check(case, torch.bfloat16, kv_format, TritonOps(device), device)


def test_later_layers_reuse_work_of_the_first_layer(device: torch.device) -> None:
    step = make_step(CASES[3], torch.float32, "dense", device)
    ops = TritonOps(device)
    prepared = ops.prepare_attention(step.inputs, step.geometry)
    outs = [ops.paged_attention(step.qkv, step.pages, prepared, step.layer) for _ in range(2)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(("deterministic", "window"), [(False, None), (True, None), (False, 40)])
def test_a_shared_prefix(deterministic: bool, window: int | None, device: torch.device) -> None:
    """Share the pages of the first 512 keys among four requests, in a batch with two unrelated requests."""
    case = dataclasses.replace(
        MIXED, requests=[(1, 520), (1, 540), (2, 513), (1, 530), (1, 520), (5, 0)], window=window
    )
    step = make_step(case, torch.float32, "dense", device)
    table = step.inputs.block_table.clone()
    table[1:4, :32] = table[0, :32]
    group = SharedPrefix((0, 1, 2, 3), 512)
    cascade = cascade_work([group], [1, 1, 2, 1, 1, 5], members_per_tile(torch.float32, step.geometry), device)
    step = dataclasses.replace(step, inputs=dataclasses.replace(step.inputs, block_table=table, cascade=cascade))
    expected = step.copy_of_pages()
    attention = TritonAttention(device, deterministic=deterministic)
    prepared = attention.prepare(step.inputs, step.geometry)
    out = attention.run(step.qkv, step.pages, prepared, step.layer)
    items = prepared.work.decode_items[: int(prepared.work.counts[0])]
    own = items[items[:, 0] < 4]
    assert bool((own[:, 1] >= 512).all()) == (window is None)  # empty if deterministic
    wanted = paged_attention(step.qkv, expected, step.inputs, step.geometry, step.layer, torch.float64)
    relative, absolute = TOLERANCES[torch.float32]
    torch.testing.assert_close(out, wanted, rtol=relative, atol=absolute)


def test_one_object_handles_steps_of_all_sizes(device: torch.device) -> None:
    """Check that buffers grow without losing or mixing those of earlier steps."""
    ops = TritonOps(device)
    for requests in ([(1, 5)], [(1, 5), (10, 0)], [(20, 0)], [(1, 9)] * 5, [(1, 5)]):
        check(dataclasses.replace(MIXED, requests=requests), torch.float32, "dense", ops, device)


def test_buffers_are_kept_between_steps(device: torch.device) -> None:
    attention = TritonAttention(device)
    works = []
    for requests in ([(1, 5)], [(1, 9)], [(1, 7)] * 3, [(1, 8)] * 4, [(1, 5)]):
        step = make_step(dataclasses.replace(MIXED, requests=requests), torch.float32, "dense", device)
        prepared = attention.prepare(step.inputs, step.geometry)
        attention.run(step.qkv, step.pages, prepared, step.layer)
        works.append(prepared.work)
    assert works[0] is works[1]
    assert works[1] is not works[2]
    assert works[2] is works[3] is works[4]


def test_small_scratch_gives_the_same_result(device: torch.device) -> None:
    step = make_step(CASES[1], torch.float32, "dense", device)
    outs = []
    for rows in (2, 4096):
        attention = TritonAttention(device, scratch_rows=rows)
        prepared = attention.prepare(step.inputs, step.geometry)
        outs.append(attention.run(step.qkv, step.pages, prepared, step.layer)[:4])
    assert torch.equal(*outs)


@pytest.mark.parametrize(("dtype", "kv_format"), [slow(torch.float32, "dense"), (torch.bfloat16, "fp8")])
def test_deterministic_rows_are_bitwise_equal_in_any_batch_and_chunk(
    dtype: torch.dtype, kv_format: KVFormat, device: torch.device
) -> None:
    """Compute a request in one chunk in a batch, then alone in three chunks, the last of one token."""
    case = Case("", [(25, 0), (1, 40), (3, 3)], num_heads=2, num_kv_heads=1, qk_norm=True)
    step = make_step(case, dtype, kv_format, device)
    pages = step.copy_of_pages()
    whole = run(TritonOps(device, True), step)
    alone = TritonOps(device, True)
    inputs = step.inputs
    for start, end in ((0, 13), (13, 24), (24, 25)):
        part = AttentionInputs(
            positions=inputs.positions[start:end],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            slot_mapping=inputs.slot_mapping[start:end],
            block_table=inputs.block_table[:1],
            rope_table=inputs.rope_table,
            max_seqlen_q=end - start,
            max_seqlen_k=end,
        )
        prepared = alone.prepare_attention(part, step.geometry)
        out = alone.paged_attention(step.qkv[start:end].contiguous(), pages, prepared, step.layer)
        assert_same_bits(out, whole[start:end])


def test_a_step_without_tokens(device: torch.device) -> None:
    step = make_step(CASES[2], torch.float32, "dense", device)
    inputs = dataclasses.replace(
        step.inputs,
        positions=step.inputs.positions[:0],
        slot_mapping=step.inputs.slot_mapping[:0],
        seq_lens=step.inputs.seq_lens[:0],
        cu_seqlens_q=step.inputs.cu_seqlens_q[:1],
    )
    ops = TritonOps(device)
    prepared = ops.prepare_attention(inputs, step.geometry)
    assert ops.paged_attention(step.qkv[:0], step.pages, prepared, step.layer).shape == (0, 3 * 64)
