"""Expert layers compared with their float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from kernels.ops.grouped_linear import cases
from kernels.ops.grouped_linear import reference as experts_reference
from kernels.ops.grouped_linear.reference import ExpertOrder
from kernels.ops.grouped_linear.triton import MAX_EXPERTS, grouped_linear, order_by_expert
from tests.fakes.pairs import each_value
from tests.kernels.helpers import assert_same_bits, run_only_the_last_program


def assert_same_order(found: ExpertOrder, wanted: ExpertOrder) -> None:
    assert found.offsets.tolist() == wanted.offsets.tolist()
    count = int(wanted.offsets[-1])
    assert found.slots[:count].tolist() == wanted.slots[:count].tolist()


def random(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(dtype).to(device)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_order(shape: tuple[int, ...], device: torch.device) -> None:
    num_tokens, top_k, num_experts = shape[:3]
    ids = cases.random_routing(num_tokens, top_k, num_experts, torch.Generator(device).manual_seed(1))
    assert_same_order(order_by_expert(ids, num_experts), experts_reference.order_by_expert(ids, num_experts))


def test_order_over_many_programs_ignores_remote_experts(device: torch.device) -> None:
    ids = torch.randint(-2, 12, (650, 2), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(device)
    order = order_by_expert(ids, 9)
    assert_same_order(order, experts_reference.order_by_expert(ids, 9))
    mine = int(((ids >= 0) & (ids < 9)).sum())
    assert int(order.offsets[-1]) == mine < ids.numel()


def test_order_of_no_tokens(device: torch.device) -> None:
    order = order_by_expert(torch.empty((0, 2), dtype=torch.int32, device=device), 5)
    assert order.offsets.tolist() == [0] * 6
    weight, out = torch.ones((5, 4, 8), device=device), torch.empty((0, 4), device=device)
    assert grouped_linear(torch.empty((0, 8), device=device), weight, None, order, None, out).shape == (0, 4)


@each_value(shape=cases.SHAPES, dtype=cases.DTYPES, ids=str)
def test_both_expert_layers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check the first layer (one input row per token) and the second (one weighted input row per slot)."""
    num_tokens, top_k, num_experts, width, num_out = shape
    ids = cases.random_routing(num_tokens, top_k, num_experts, torch.Generator(device).manual_seed(1))
    order = order_by_expert(ids, num_experts)
    weight = random(num_experts, num_out, width, dtype=dtype, device=device) / width**0.5
    bias = random(num_experts, num_out, dtype=dtype, device=device)
    slot_weights = torch.rand(num_tokens * top_k, generator=torch.Generator().manual_seed(1)).to(device)
    rtol, atol = TOLERANCES[dtype]
    for rows, vector, factors in ((num_tokens, None, None), (num_tokens * top_k, bias, slot_weights)):
        x = random(rows, width, dtype=dtype, device=device)
        out = torch.full((num_tokens * top_k, num_out), float("nan"), dtype=dtype, device=device)
        wanted = experts_reference.grouped_linear(x, weight, vector, order, factors, out.clone())
        assert grouped_linear(x, weight, vector, order, factors, out) is out
        torch.testing.assert_close(out, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("per_expert", [16, 128, 200])
def test_every_tile(per_expert: int, device: torch.device) -> None:
    """Give one expert nearly all tokens and the last one none."""
    num_experts = 3
    ids = torch.zeros((per_expert * num_experts, 1), dtype=torch.int32, device=device)
    ids[5::90] = 1
    order = order_by_expert(ids, num_experts)
    x = random(ids.shape[0], 64, dtype=torch.float16, device=device)
    weight = random(num_experts, 70, 64, dtype=torch.float16, device=device) / 8
    out = torch.full((ids.shape[0], 70), float("nan"), dtype=torch.float16, device=device)
    wanted = experts_reference.grouped_linear(x, weight, None, order, None, out.clone())
    rtol, atol = TOLERANCES[torch.float16]
    torch.testing.assert_close(grouped_linear(x, weight, None, order, None, out), wanted, rtol=rtol, atol=atol)


def test_rows_without_local_expert_are_unchanged(device: torch.device) -> None:
    ids = torch.tensor([[0, -1], [7, 1]], dtype=torch.int32, device=device)
    order = order_by_expert(ids, 2)
    out = torch.full((4, 8), 5.0, device=device)
    weight = torch.ones((2, 8, 16), device=device)
    grouped_linear(torch.ones((2, 16), device=device), weight, None, order, None, out)
    assert out[:, 0].tolist() == [16.0, 5.0, 5.0, 16.0]


def test_batch_invariant_token_is_bitwise_equal_in_any_batch(device: torch.device) -> None:
    ids = cases.random_routing(70, 2, 3, torch.Generator(device).manual_seed(1))
    x, weight = random(70, 80, device=device), random(3, 48, 80, device=device)

    def run(tokens: slice) -> torch.Tensor:
        some = ids[tokens]
        out = torch.empty((some.numel(), 48), device=device)
        order = order_by_expert(some, 3)
        return grouped_linear(x[tokens], weight, None, order, None, out, invariant=True)

    whole = run(slice(0, 70)).view(70, 2, 48)
    for tokens in (slice(0, 1), slice(69, 70), slice(5, 40)):
        assert_same_bits(run(tokens).view(-1, 2, 48), whole[tokens])


def test_offsets_beyond_32_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the last of experts that fill more than 2**31 values, most of which are never touched."""
    shape = (33, 1 << 11, 1 << 15)
    weight = torch.empty(shape, dtype=torch.float16, device=device)
    weight[-1, -1] = 0.5
    order = order_by_expert(torch.full((1, 1), 32, dtype=torch.int32, device=device), 33)
    x = torch.full((1, shape[2]), 2.0**-10, dtype=torch.float16, device=device)
    out = torch.empty((1, shape[1]), dtype=torch.float16, device=device)
    run_only_the_last_program(monkeypatch)
    assert grouped_linear(x, weight, None, order, None, out)[0, -1] == 16.0


def test_routing(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, float("-inf"), 0.0]], device=device)
    ids, weights = experts_reference.route(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 3], [0, 3]]  # equal weights are ordered by lower id
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids.long()))
    _, weights = experts_reference.route(logits, 2, renormalize=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, device=device))
    assert weights[0].tolist() == [0.5, 0.5]


def test_invalid_shapes_are_reported(device: torch.device) -> None:
    order = order_by_expert(torch.zeros((4, 2), dtype=torch.int32, device=device), 3)
    weight, out = torch.ones((3, 8, 16), device=device), torch.empty((8, 8), device=device)
    with pytest.raises(ValueError, match=r"experts \[3, 8, 16\] do not fit activations \[4, 32\]"):
        grouped_linear(torch.ones((4, 32), device=device), weight, None, order, None, out)
    with pytest.raises(ValueError, match="3 rows are neither one a token nor one of each of the 8 slots"):
        grouped_linear(torch.ones((3, 16), device=device), weight, None, order, None, out)
    with pytest.raises(ValueError, match=f"1 to {MAX_EXPERTS} can be sorted by"):
        order_by_expert(order.slots[:, None], MAX_EXPERTS + 1)
