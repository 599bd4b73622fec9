"""Linear layers: schemes compared with torch, and shards compared with the whole layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.backends.reference import DecoderOps
from kernels.common.cpu import bf16
from tests.fakes.weights import MemoryWeights, load_scheme
from worker.model.attention import kv_head_range
from worker.model.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from worker.model.linear import ColumnParallelLinear, Part, Placement, RowParallelLinear
from worker.parallel import ParallelContext
from worker.quant.dense import DenseScheme
from worker.quant.onednn_packed import OneDNNPackedScheme, packed_linears_supported
from worker.quant.raw_weight import RawWeight
from worker.quant.select import linear_scheme

CPU = torch.device("cpu")


class OneRank(ParallelContext):
    """Rank whose group does not sum, so that the test can add the partial results."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def place(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, CPU, OneRank(tp_rank=rank, tp_size=size))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain(weight: torch.Tensor) -> RawWeight:
    return RawWeight("f32", tuple(weight.shape), weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "has_bias"), [(1, True), (2, False), (17, True)])
def test_schemes_multiply(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    if not packed_linears_supported(dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} on this processor")
    weight, x = random(48, 40).to(dtype), random(rows, 40).to(dtype)
    bias = random(48).to(dtype) if has_bias else None
    wanted = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    for scheme in (OneDNNPackedScheme(dtype), DenseScheme(dtype, CPU)):
        load_scheme(scheme, [plain(weight[:30]), plain(weight[30:].flip(0))], [None, torch.arange(18).flip(0)])
        out = scheme.apply(x, bias)
        assert out.dtype == dtype
        tolerance = 1e-4 if dtype is torch.float32 else 0.15
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536)])
def test_float32_row_is_bitwise_equal_alone_and_in_a_batch(out_features: int, in_features: int) -> None:
    scheme = load_scheme(linear_scheme(torch.float32, CPU), [plain(random(out_features, in_features))])
    x = random(32, in_features)
    whole = scheme.apply(x, None)
    for rows in (1, 2, 5, 16):
        assert torch.equal(scheme.apply(x[:rows].contiguous(), None), whole[:rows])


def test_column_parts_are_concatenated_and_split() -> None:
    weights = MemoryWeights(
        {"a.weight": random(8, 6), "b.weight": random(4, 6), "a.bias": random(8), "b.bias": random(4)}
    )
    x = random(3, 6)
    wanted = [F.linear(x, weights.tensors[f"{n}.weight"], weights.tensors[f"{n}.bias"]) for n in "ab"]
    for rank in range(2):
        parts = [Part("a", slice(rank * 4, rank * 4 + 4)), Part("b", slice(rank * 2, rank * 2 + 2))]
        layer = ColumnParallelLinear(weights, parts, bias=True, place=place(rank, 2))
        expected = torch.cat((wanted[0][:, parts[0].rows], wanted[1][:, parts[1].rows]), dim=1)
        torch.testing.assert_close(layer(x), expected)


def test_row_parallel_partial_sums_add_up_with_one_bias() -> None:
    weights = MemoryWeights({"o.weight": random(5, 8), "o.bias": random(5)})
    x = random(3, 8)
    total = torch.zeros(3, 5)
    for rank in range(2):
        cols = slice(rank * 4, rank * 4 + 4)
        layer = RowParallelLinear(weights, "o", cols, bias=True, place=place(rank, 2))
        total += layer(x[:, cols].contiguous())
    torch.testing.assert_close(total, F.linear(x, weights.tensors["o.weight"], weights.tensors["o.bias"]))


@pytest.mark.parametrize(
    ("tied", "size", "in_file_format"),  # with 5 ranks the last one holds no row
    [(True, 1, False), (True, 2, True), (False, 4, False), (True, 5, False), (False, 5, True)],
)
def test_vocabulary_over_ranks(tied: bool, size: int, in_file_format: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model.embedding.keeps_format", lambda _: in_file_format)
    weights = MemoryWeights({"embed.weight": random(11, 6), "head.weight": random(11, 6) + 1})
    ids = torch.tensor([0, 10, 3, 6, 5], dtype=torch.int32)
    x = random(2, 6)
    embedded, logits = torch.zeros(5, 6), []
    for rank in range(size):
        embedding = VocabularyParallelEmbedding(weights, 11, place(rank, size), DecoderOps())
        embedded += embedding(ids, torch.float32)
        logits.append(VocabularyParallelHead(weights, 11, place(rank, size), embedding if tied else None)(x))
    torch.testing.assert_close(embedded, weights.tensors["embed.weight"][ids.long()])
    head = weights.tensors["embed.weight" if tied else "head.weight"]
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :11], F.linear(x, head))


@pytest.mark.skipif(not bf16.supported(), reason="the processor has no AVX512-BF16")
@pytest.mark.parametrize("size", [1, 2, 5])  # with 5 ranks the last one holds no row of the vocabulary
def test_panels_are_split_over_ranks(size: int) -> None:
    """Split parts, biases and a vocabulary at positions within panels."""
    hidden, inner, vocab = 64, 32 * size, 11
    tensors = {"a.weight": random(3 * size, hidden), "b.weight": random(2 * size, hidden), "a.bias": random(3 * size),
               "b.bias": random(2 * size), "o.weight": random(7, inner), "o.bias": random(7),
               "embed.weight": random(vocab, hidden)}  # fmt: skip
    weights = MemoryWeights({name: tensor.bfloat16() for name, tensor in tensors.items()})
    x, y = random(3, hidden).bfloat16(), random(40, inner).bfloat16()
    outs: list[list[torch.Tensor]] = [[], []]
    total, logits = torch.zeros(40, 7).double(), []
    for rank in range(size):
        here = place(rank, size, torch.bfloat16)
        rows = [slice(rank * count, rank * count + count) for count in (3, 2)]
        parts = [Part(name, part) for name, part in zip("ab", rows)]
        column = ColumnParallelLinear(weights, parts, bias=True, place=here)
        cols = slice(rank * 32, rank * 32 + 32)
        row = RowParallelLinear(weights, "o", cols, bias=True, place=here)
        assert (column.panels is None) == (row.panels is None) == (size > 1)
        for out, part in zip(outs, column(x).split([3, 2], dim=1)):
            out.append(part)
        total += row(y[:, cols])
        embedding = VocabularyParallelEmbedding(weights, vocab, here, DecoderOps())
        logits.append(VocabularyParallelHead(weights, vocab, here, embedding)(x))

    def near(actual: torch.Tensor, given: torch.Tensor, name: str) -> bool:
        bias = weights.tensors.get(f"{name}.bias")
        wanted = F.linear(given.double(), weights.tensors[f"{name}.weight"].double())
        wanted = wanted if bias is None else wanted + bias.double()
        return bool((actual.double() - wanted).norm() < 5e-3 * wanted.norm())

    assert near(torch.cat(outs[0], dim=1), x, "a") and near(torch.cat(outs[1], dim=1), x, "b")
    assert near(total, y, "o")
    assert near(torch.cat(logits, dim=1)[:, :vocab], x, "embed")


@pytest.mark.parametrize("size", [1, 2])
def test_tied_dense_head_allocates_no_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a tied head shares the embedding's memory, as on a GPU; a rank with padding has a copy."""
    monkeypatch.setattr("worker.model.embedding.keeps_format", lambda _: False)
    monkeypatch.setattr("worker.quant.select.packed_linears_supported", lambda _: False)
    table, x, logits = random(11, 6), random(2, 6), []
    weights = MemoryWeights({"embed.weight": table.clone()})
    for rank in range(size):
        embedding = VocabularyParallelEmbedding(weights, 11, place(rank, size), DecoderOps())
        head = VocabularyParallelHead(weights, 11, place(rank, size), embedding)
        logits.append(head(x))
        embedding.values.zero_()
        assert head(x).any() == (rank == 1)
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :11], F.linear(x, table))


def test_kv_heads_are_replicated_if_fewer_than_ranks() -> None:
    heads = [kv_head_range(2, ParallelContext(tp_rank=rank, tp_size=4)) for rank in range(4)]
    assert heads == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
