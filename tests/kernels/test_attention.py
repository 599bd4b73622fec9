"""Paged attention: the CPU's kernel against the reference in float64, and the reference against torch's attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import cpu, reference
from kernels.attention.cases import CASES, Case, make_tensors
from kernels.attention.inputs import LayerConstants
from kernels.tolerances import TOLERANCES

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]


def run_cpu(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype, tensors):
    geometry = case.geometry()
    assert cpu.supported(geometry, dtype, kv_dtype)
    op = cpu.PagedAttention(geometry, dtype, kv_dtype)
    prepared = cpu.PreparedAttention(tensors.inputs, geometry, cpu.make_tiles(tensors.inputs))
    return op(tensors.qkv, tensors.keys, tensors.values, prepared)


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=["f32", "bf16-f32", "bf16", "f32-bf16"])
@pytest.mark.parametrize("case", CASES[:7], ids=lambda case: case.name)
def test_contexts(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(case, dtype, kv_dtype)


@pytest.mark.parametrize("case", CASES[7:], ids=lambda case: case.name)
def test_geometries(case: Case) -> None:
    check(case, torch.float32, torch.float32)


def check(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    actual, expected = make_tensors(case, dtype, kv_dtype), make_tensors(case, dtype, kv_dtype)
    out = run_cpu(case, dtype, kv_dtype, actual)
    wanted = reference.paged_attention(
        expected.qkv, expected.pages(), expected.inputs, case.geometry(), LayerConstants(), torch.float64
    )
    relative, absolute = TOLERANCES[torch.bfloat16 if torch.bfloat16 in (dtype, kv_dtype) else torch.float32]
    torch.testing.assert_close(out, wanted, rtol=relative, atol=absolute)
    torch.testing.assert_close(actual.keys, expected.keys, rtol=relative, atol=absolute, equal_nan=True)
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)


def test_a_row_is_the_same_in_any_batch_and_chunk() -> None:
    """Bit for bit: alone, beside others, and as one token of a chunk."""
    together = make_tensors(CASES[6], torch.float32, torch.float32)
    case = dataclasses.replace(CASES[6], requests=[CASES[6].requests[0]])
    whole = run_cpu(CASES[6], torch.float32, torch.float32, together)
    inputs = together.inputs
    alone = dataclasses.replace(
        inputs,
        positions=inputs.positions[:1],
        cu_seqlens_q=inputs.cu_seqlens_q[:2],
        seq_lens=inputs.seq_lens[:1],
        slot_mapping=inputs.slot_mapping[:1],
        block_table=inputs.block_table[:1],
    )
    part = dataclasses.replace(together, qkv=together.qkv[:1], inputs=alone)
    single = run_cpu(case, torch.float32, torch.float32, part)
    assert torch.equal(single[0], whole[0])
    last = inputs.cu_seqlens_q[-1].item() - 1
    decode = dataclasses.replace(
        inputs,
        positions=inputs.positions[last:],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=inputs.seq_lens[-1:],
        slot_mapping=inputs.slot_mapping[last:],
        block_table=inputs.block_table[-1:],
    )
    part = dataclasses.replace(together, qkv=together.qkv[last:], inputs=decode)
    single = run_cpu(case, torch.float32, torch.float32, part)
    assert torch.equal(single[0], whole[last])


def test_reference_is_causal_attention_over_rotated_heads() -> None:
    case = Case("prefill", [(37, 0)], num_heads=6, num_kv_heads=2)
    tensors = make_tensors(case, torch.float32, torch.float32)
    out = reference.paged_attention(tensors.qkv, tensors.pages(), tensors.inputs, case.geometry(), LayerConstants())
    query, key, value = tensors.qkv.view(37, 10, 64).split([6, 2, 2], dim=1)
    rotated = []
    for heads in (query, key):
        pairs = torch.complex(heads[..., :32], heads[..., 32:])
        table = tensors.inputs.rope_table[:37, None]
        turned = pairs * torch.complex(table[..., :32], table[..., 32:])
        rotated.append(torch.cat((turned.real, turned.imag), dim=-1).transpose(0, 1))
    wanted = F.scaled_dot_product_attention(
        rotated[0], rotated[1], value.transpose(0, 1), is_causal=True, enable_gqa=True, scale=case.scale
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1).reshape(37, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"softcap": 20.0}, {"window": 5}, {"head_dim": 24, "rotary_dim": 24}, {"page_size": 4}, {"rotary_dim": 16}],
)
def test_what_the_kernel_does_not_cover_is_left_to_the_reference(change: dict) -> None:
    geometry = dataclasses.replace(CASES[0].geometry(), **change)
    assert not cpu.supported(geometry, torch.float32, torch.float32)


def test_reference_window_and_softcap() -> None:
    case = Case("decode", [(1, 30), (4, 30)], num_heads=2, num_kv_heads=1)
    tensors = make_tensors(case, torch.float32, torch.float32)
    geometry = dataclasses.replace(case.geometry(), window=8, softcap=3.0)
    out = reference.paged_attention(tensors.qkv, tensors.pages(), tensors.inputs, geometry, LayerConstants())
    inputs = tensors.inputs
    for row, request in enumerate([0, 1, 1, 1, 1]):
        position = int(inputs.positions[row])
        places = [
            (int(inputs.block_table[request, i // 16]), i % 16) for i in range(max(0, position - 7), position + 1)
        ]
        key = torch.stack([tensors.keys[page, 0, slot] for page, slot in places])
        value = torch.stack([tensors.values[page, 0, slot] for page, slot in places])
        heads = tensors.qkv[row].view(4, 64)[None, :2]
        query = reference.rotate(heads, inputs.positions[row : row + 1], inputs.rope_table)[0]
        scores = 3.0 * torch.tanh(query @ key.T * case.scale / 3.0)
        wanted = torch.softmax(scores, dim=-1) @ value
        torch.testing.assert_close(out[row].view(2, 64), wanted, rtol=1e-5, atol=1e-5)
