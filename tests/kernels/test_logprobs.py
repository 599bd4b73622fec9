"""Log-probabilities: the reference against float64 and a full sort, the kernels against the reference."""

import pytest
import torch

from kernels.backends.gpu_sampling import TritonSamplingOps
from kernels.common.tolerances import TOLERANCES
from kernels.ops.logprobs import reference
from kernels.ops.logprobs import triton as kernels
from kernels.ops.logprobs.cases import SHAPES, make_case
from kernels.ops.logprobs.reference import LOWEST_LOGPROB

RTOL, ATOL = TOLERANCES[torch.float32]


@pytest.fixture(params=["triton", "cpu"])
def by_kernels(request, device, cpu):
    """Run the kernels of one device and return results on the CPU."""
    if request.param == "triton":
        ops, place = TritonSamplingOps(device), device
    else:
        ops, place = cpu, torch.device("cpu")

    def run(logits, token_ids, num_top):
        result = ops.logprobs(logits.to(place), token_ids.to(place), num_top)
        return {name: getattr(result, name).cpu() for name in result.__slots__}

    return run


def check(result, expected):
    for name in ("token_ids", "ranks", "top_ids"):
        assert result[name].dtype == torch.int64
        assert torch.equal(result[name], getattr(expected, name)), name
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(result[name], getattr(expected, name), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("rows, vocab, num_top, step", SHAPES)
def test_the_reference_is_a_sorted_log_softmax(rows, vocab, num_top, step):
    logits, token_ids = make_case(rows, vocab, step)
    result = reference.compute_logprobs(logits, token_ids, num_top)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for i, row in enumerate(logits.tolist()):
        token_id = max(int(token_ids[i]), 0)
        assert result.token_ids[i] == token_id
        assert result.ranks[i] == 1 + sum(value > row[token_id] for value in row)
        assert result.top_ids[i].tolist() == sorted(range(vocab), key=lambda j: (-row[j], j))[:num_top]
        expected = exact[i, [token_id, *result.top_ids[i].tolist()]].float()
        got = torch.cat((result.logprobs[i : i + 1], result.top_logprobs[i]))
        torch.testing.assert_close(got, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("rows, vocab, num_top, step", SHAPES)
def test_kernels_equal_the_reference(rows, vocab, num_top, step, by_kernels):
    logits, token_ids = make_case(rows, vocab, step)
    check(by_kernels(logits, token_ids, num_top), reference.compute_logprobs(logits, token_ids, num_top))


def test_rows_far_apart_and_ids_of_32_bits(device):
    """Use rows 2**31 elements apart; only the pages that hold them are touched."""
    logits, token_ids = make_case(2, 150, 0.0)
    apart = torch.empty(2**31 + 300, device=device).as_strided((2, 150), (2**31 + 64, 1))
    apart.copy_(logits)
    result = kernels.compute_logprobs(apart, token_ids.int().to(device), 3)
    expected = reference.compute_logprobs(logits, token_ids, 3)
    assert torch.equal(result.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(result.logprobs.cpu(), expected.logprobs, rtol=RTOL, atol=ATOL)


def test_no_rows_and_no_top_tokens(by_kernels):
    logits, token_ids = make_case(3, 40, 0.0)
    empty = by_kernels(logits[:0], token_ids[:0], 5)
    assert empty["logprobs"].shape == (0,) and empty["top_ids"].shape == (0, 5)
    check(by_kernels(logits, token_ids, 0), reference.compute_logprobs(logits, token_ids, 0))


@pytest.mark.parametrize("name", ["reference", "kernels"])
def test_unusable_rows_report_the_lowest_logprob(name, by_kernels):
    logits, _ = make_case(6, 5000, 0.0)
    logits[0, 17] = float("nan")
    logits[1, 4999] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    logits[4, 4096:] = float("-inf")  # a split without finite logits
    token_ids = torch.tensor([17, 4999, 3, 0, 4097, 8])
    if name == "kernels":
        result = by_kernels(logits, token_ids, 4)
    else:
        tensors = reference.compute_logprobs(logits, token_ids, 4)
        result = {name: getattr(tensors, name) for name in tensors.__slots__}
    assert (result["logprobs"][[0, 1, 2, 4]] == LOWEST_LOGPROB).all()
    assert (result["top_logprobs"][:3] == LOWEST_LOGPROB).all()
    assert ((result["top_ids"] >= 0) & (result["top_ids"] < 5000)).all()
    assert result["logprobs"][3] == 0 and result["top_ids"][3].tolist() == [0, 1, 2, 3]
    assert result["top_logprobs"][3].tolist() == [0.0] + [LOWEST_LOGPROB] * 3
    good = torch.log_softmax(logits[4:].double(), dim=-1)
    torch.testing.assert_close(result["top_logprobs"][4:].double(), good.topk(4).values, rtol=RTOL, atol=ATOL)
    assert result["ranks"][4] == 4097


def test_rows_do_not_depend_on_their_neighbours(by_kernels):
    logits, token_ids = make_case(4, 9000, 0.0)
    together = by_kernels(logits, token_ids, 2)
    alone = by_kernels(logits[2:3], token_ids[2:3], 2)
    for name, values in alone.items():
        assert torch.equal(values, together[name][2:3])


def test_rows_of_the_reference_do_not_depend_on_their_neighbours():
    """PyTorch sums a single large row in several pieces, which changes the last bit of two of these 64 rows."""
    logits = torch.randn((64, 49152), generator=torch.Generator().manual_seed(0)) * 3
    token_ids = torch.arange(64)
    together = reference.compute_logprobs(logits, token_ids, 2)
    for row in range(64):
        alone = reference.compute_logprobs(logits[row : row + 1], token_ids[row : row + 1], 2)
        assert torch.equal(alone.logprobs[0], together.logprobs[row]), row
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[row]), row


def test_invalid_arguments_are_rejected(device):
    logits, token_ids = make_case(2, 40, 0.0)
    with pytest.raises(ValueError, match="float32 logits"):
        kernels.compute_logprobs(logits.double(), token_ids, 1)
    with pytest.raises(ValueError, match="between 0 and 128"):
        kernels.compute_logprobs(logits, token_ids, 129)
    with pytest.raises(ValueError, match="2 rows"):
        kernels.compute_logprobs(logits, token_ids[:1], 1)


@pytest.mark.parametrize("num_top", [1, 3, 5])
def test_zeros_of_both_signs_rank_equally(num_top, by_kernels):
    logits = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -2.0, -0.0]])
    result = by_kernels(logits, torch.tensor([2]), num_top)
    assert result["top_ids"].tolist() == [[1, 2, 3, 5, 0][:num_top]]
    assert result["ranks"].item() == 1
