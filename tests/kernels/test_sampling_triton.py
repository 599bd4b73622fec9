"""GPU sampling kernels, also in Triton's interpreter, compared with the reference."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kernels.backends.gpu_sampling import TritonSamplingOps
from kernels.ops.logprobs.triton import split
from kernels.ops.sampling import reference, triton_splits
from kernels.ops.sampling import triton as kernels
from kernels.ops.sampling.cases import CASES, SamplingCase, make_case
from kernels.ops.sampling.inputs import NO_CUT, SamplingInputs
from kernels.ops.sampling.philox import gumbel_noise
from kernels.ops.sampling.triton_random import gumbel, gumbel_bound, philox_words, words_of_tokens
from kernels.ops.sampling.triton_splits import Split
from shared.sampling_params import MAX_LOGPROBS
from tests.fakes.pairs import slow

SMALL = [case for case in CASES if case.vocab_size <= 5000 and case.name != "top_k in the last bucket"]
FILTERS = (
    (0.7, 50, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.3, 40, 0.95, 0.02),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 0.5, 0.01),
    (1.0, 200, 1.0, 0.0),
    (5.0, 350, 0.999, 0.0),
    (1.0, 0, 0.9999999, 0.0),
    (3.0, 0, 0.97, 0.0),
    (1.0, 2, 0.0001, 0.0),
    (1.0, 5, 1.0, 0.9),
)


def sample(logits, inputs, device, poison=0x7FC00000):
    """Sample with scratch memory full of NaN."""
    size = triton_splits.scratch_size(*logits.shape)
    scratch = torch.full((size,), poison, dtype=torch.int32, device=device)
    return kernels.sample(logits.to(device), inputs.on(device), scratch).cpu()


@pytest.fixture
def tiny_splits(monkeypatch):
    """Use many splits with few candidates, so that small vocabularies exercise every path."""

    def split(vocab: int, num_lanes: int = 32) -> Split:
        splits = triton.cdiv(vocab, 128)
        return Split(128, splits, triton.next_power_of_2(splits), 16, 1)

    monkeypatch.setattr(triton_splits, "split", split)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_ids_equal_the_reference(case, device):
    logits, inputs = make_case(case, 1)
    kept = logits.clone()
    assert torch.equal(sample(logits, inputs, device), reference.sample(logits, inputs))
    assert torch.equal(logits, kept)


def test_ids_equal_the_reference_on_a_whole_vocabulary(device):
    logits, inputs = make_case(
        SamplingCase("", 4, 50257, 3.0, (FILTERS[0], FILTERS[2], (1.0, 0, 1.0, 0.0), FILTERS[8]))
    )
    assert torch.equal(sample(logits, inputs, device), reference.sample(logits, inputs))


@pytest.mark.parametrize("spread, step", [slow(0.3, 0.0), (2.5, 0.25), slow(40.0, 0.0)])
def test_filter_borders_beyond_the_candidates_are_found(spread, step, tiny_splits, device):
    case = SamplingCase("", len(FILTERS), 300, spread, FILTERS, step=step)
    logits, inputs = make_case(case)
    assert torch.equal(sample(logits, inputs, device), reference.sample(logits, inputs))


def test_ids_agree_over_many_positions(tiny_splits, device):
    logits, inputs = make_case(SamplingCase("", 12, 131, 2.0, (*FILTERS, (1.0, 0, 1.0, 0.0)), step=0.125))
    inputs = replace(inputs, position=torch.arange(12))
    assert torch.equal(sample(logits, inputs, device, poison=-1), reference.sample(logits, inputs))


@pytest.mark.parametrize("vocab", [slow(40), 200])
def test_equal_logits_are_kept_by_lowest_id(vocab, tiny_splits, device):
    rows = ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 0, 0.5, 0.5), (1.0, 33, 0.5, 0.0))
    logits = torch.zeros(8, vocab)
    _, inputs = make_case(SamplingCase("", 8, vocab, 1.0, rows))
    ids = sample(logits, inputs, device)
    assert torch.equal(ids, reference.sample(logits, inputs))
    for first, allowed in enumerate((3, vocab // 10, vocab // 2, min(33, vocab) // 2 + 1)):
        assert ids[first::4].max() < allowed


def test_greedy_and_unfiltered_batches(device):
    logits, inputs = make_case(SamplingCase("", 6, 777, 2.0, ((0.0, 0, 1.0, 0.0), (0.9, 0, 1.0, 0.0)), step=0.5))
    unfiltered = replace(inputs, any_filter=False)
    assert torch.equal(sample(logits, unfiltered, device), reference.sample(logits, unfiltered))
    greedy = replace(inputs, temperature=torch.zeros(6), any_random=False, any_filter=False)
    assert torch.equal(sample(logits, greedy, device), logits.argmax(dim=-1))


def test_unusable_row_fails_alone(tiny_splits, device):
    logits, inputs = make_case(SamplingCase("", 8, 150, 3.0, CASES[0].rows))
    good = sample(logits, inputs, device)
    bad = logits.clone()
    bad[0, 5] = float("nan")
    bad[1, 149] = float("inf")
    bad[2] = float("-inf")
    bad[3] = -float("nan")
    bad[5, 7] = float("nan")
    bad[5, 8] = float("inf")
    ids = sample(bad, inputs, device)
    assert ids[[0, 1, 2, 3, 5]].tolist() == [-1, -1, -2, -1, -1]
    assert ids[[4, 6, 7]].tolist() == good[[4, 6, 7]].tolist()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0), (-3e38,) * 3, (3e38, -3e38, 3e38), (-0.0, 0.0)])
def test_extreme_rows_stay_inside_the_vocabulary(values, device):
    row = torch.tensor([values])
    for parameters in ((0.00001, 2, 0.5, 0.5), (0.0, 0, 1.0, 0.0), (1e30, 0, 0.3, 0.0)):
        _, inputs = make_case(SamplingCase("", 1, row.shape[1], 1.0, (parameters,)))
        ids = sample(row, inputs, device)
        assert 0 <= ids.item() < row.shape[1]
        assert torch.equal(ids, reference.sample(row, inputs))


def test_rows_do_not_depend_on_their_neighbours(tiny_splits, device):
    logits, inputs = make_case(SamplingCase("", 12, 200, 2.0, FILTERS))
    together = sample(logits, inputs, device)
    fields = ("temperature", "top_k", "top_p", "log_min_p", "position", "choice")
    for i in (0, 4, 8):
        alone = replace(
            inputs, key=inputs.key[:, i : i + 1], **{name: getattr(inputs, name)[i : i + 1] for name in fields}
        )
        assert torch.equal(sample(logits[i : i + 1], alone, device), together[i : i + 1])


def packed_words(allowed: torch.Tensor) -> torch.Tensor:
    """Pack [M, vocab] bool into mask words; bits beyond the vocabulary are set."""
    rows, vocab = allowed.shape
    bits = torch.ones(rows, -(-vocab // 32) * 32, dtype=torch.int64)
    bits[:, :vocab] = allowed
    words = (bits.view(rows, -1, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("indexed", [False, True])
def test_grammar_masks(indexed, tiny_splits, cpu, device):
    case = SamplingCase("", 12, 141, 2.0, (*CASES[0].rows, FILTERS[8], FILTERS[4]))
    logits, inputs = make_case(case)
    allowed = torch.rand(12, 141, generator=torch.Generator().manual_seed(2)) < 0.1
    allowed[3] = False
    logits[4, ~allowed[4]] = float("nan")  # masked, so the value must not matter
    rows = torch.arange(12)
    if indexed:
        rows = torch.tensor([5, 5, -1, 3, 4, -1, 0, 1, 2, 6, 7, -1], dtype=torch.int32)
    inputs = replace(inputs, mask=packed_words(allowed), mask_rows=rows if indexed else None)
    masked = torch.where(allowed[rows.long().clamp(min=0)] | (rows < 0)[:, None], logits, float("-inf"))
    expected = reference.sample(masked, replace(inputs, mask=None, mask_rows=None))
    assert expected[3] == -2 and (expected[4:] >= 0).all()
    assert torch.equal(reference.sample(logits, inputs), expected)
    assert torch.equal(sample(logits, inputs, device), expected)
    assert torch.equal(cpu.sample(logits, inputs), expected)


def test_parameters_are_read_from_tables_of_32_bits(tiny_splits, cpu, device):
    logits, inputs = make_case(SamplingCase("", 8, 140, 2.0, CASES[0].rows))
    order = torch.tensor([6, 1, 9, 0, 4, 3, 8, 2])
    table = torch.full((10, 10), -1, dtype=torch.int32)
    table[order, 0] = inputs.temperature.view(torch.int32)
    table[order, 1] = inputs.top_k.int()
    table[order, 2:4] = inputs.top_p.unsqueeze(1).view(torch.int32)
    table[order, 4] = inputs.log_min_p.view(torch.int32)
    table[order, 5:7] = torch.where(inputs.key >= 2**31, inputs.key - 2**32, inputs.key).int().t()
    table[order, 7] = inputs.choice.int()
    tables = SamplingInputs(
        temperature=table.view(torch.float32)[:, 0],
        top_k=table[:, 1],
        top_p=table[:, 2:4].view(torch.float64)[:, 0],
        log_min_p=table.view(torch.float32)[:, 4],
        key=table[:, 5:7].t(),
        position=inputs.position.int(),
        choice=table[:, 7],
        any_random=True,
        any_filter=True,
        rows=order.int(),
    )
    expected = reference.sample(logits, inputs)
    assert torch.equal(reference.sample(logits, tables), expected)
    assert torch.equal(cpu.sample(logits, tables), expected)
    table_on_device = table.to(device)  # keeps the strides
    tables = replace(
        tables,
        temperature=table_on_device.view(torch.float32)[:, 0],
        top_k=table_on_device[:, 1],
        top_p=table_on_device[:, 2:4].view(torch.float64)[:, 0],
        log_min_p=table_on_device.view(torch.float32)[:, 4],
        key=table_on_device[:, 5:7].t(),
        choice=table_on_device[:, 7],
        position=tables.position.to(device),
        rows=order.int().to(device),
    )
    assert torch.equal(TritonSamplingOps(device).sample(logits.to(device), tables).cpu(), expected)


def test_rows_beyond_32_bit_offsets(device):
    logits, inputs = make_case(SamplingCase("", 2, 200, 2.0, ((0.8, 9, 0.9, 0.0), (1.0, 0, 1.0, 0.0))))
    apart = torch.empty(2**31 + 300, device=device).as_strided((2, 200), (2**31 + 64, 1))
    apart.copy_(logits)
    scratch = torch.zeros(triton_splits.scratch_size(2, 200), dtype=torch.int32, device=device)
    assert torch.equal(kernels.sample(apart, inputs.on(device), scratch).cpu(), reference.sample(logits, inputs))


def test_no_rows_and_scratch_that_grows(device):
    ops = TritonSamplingOps(device)
    for num_rows in (0, 3, 1, 5):
        logits, inputs = make_case(SamplingCase("", max(num_rows, 1), 90, 2.0, CASES[0].rows), num_rows)
        ids = ops.sample(logits[:num_rows].to(device), inputs.on(device))
        assert torch.equal(ids.cpu(), reference.sample(logits, inputs)[:num_rows])


def test_compile_launches_every_variant(device, monkeypatch):
    launched, widths = [], set()

    def record(name, method):
        def recording(*args):
            launched.append(name)
            if name == "logprobs":
                widths.add(split(130, args[2]).width)
            return method(*args)

        return recording

    def compile_for(vocab_size):
        ops = TritonSamplingOps(device, vocab_size)
        for name in ("adjust", "penalize", "sample", "logprobs"):
            monkeypatch.setattr(ops, name, record(name, getattr(ops, name)))
        ops.compile()

    compile_for(130)
    assert sorted(set(launched)) == ["adjust", "logprobs", "penalize", "sample"] and launched.count("sample") == 6
    assert widths == {split(130, num_top).width for num_top in range(MAX_LOGPROBS + 1)}
    launched.clear()
    compile_for(0)  # for no vocabulary
    assert not launched


@pytest.mark.parametrize(
    "logits, scratch, message",
    [
        (torch.zeros(2, 8).half(), 4096, "must be float32"),
        (torch.zeros(8, 2).t(), 4096, "must be float32"),
        (torch.zeros(2, 0), 4096, "at least one token"),
        (torch.zeros(2, 8), 5, "scratch"),
    ],
)
def test_invalid_arguments_are_rejected(logits, scratch, message):
    _, inputs = make_case(SamplingCase("", 2, 8, 1.0, CASES[0].rows))
    with pytest.raises(ValueError, match=message):
        kernels.sample(logits, inputs, torch.zeros(scratch, dtype=torch.int32))


@triton.jit
def noise_kernel(p_noise, p_bound, first, position, choice, key_low, key_high, TILE: tl.constexpr):
    b_counter = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    counter = tl.load(position).to(tl.uint32), tl.load(choice).to(tl.uint32)
    key = tl.load(key_low).to(tl.uint32), tl.load(key_high).to(tl.uint32)
    b_word = words_of_tokens(b_counter, (counter[0], counter[1], key[0], key[1]))
    tl.store(p_noise + tl.arange(0, TILE), gumbel(b_word))
    tl.store(p_bound + tl.arange(0, TILE), gumbel_bound(b_word))


@triton.jit
def extremes_kernel(p_words, p_noise, p_bound, SIZE: tl.constexpr):
    b_word = tl.load(p_words + tl.arange(0, SIZE)).to(tl.uint32)
    tl.store(p_noise + tl.arange(0, SIZE), gumbel(b_word))
    tl.store(p_bound + tl.arange(0, SIZE), gumbel_bound(b_word))


@triton.jit
def philox_kernel(p_out, p_counter, p_key):
    noise = (
        tl.load(p_counter + 1).to(tl.uint32),
        tl.load(p_counter + 2).to(tl.uint32),
        tl.load(p_key).to(tl.uint32),
        tl.load(p_key + 1).to(tl.uint32),
    )
    words = philox_words(tl.load(p_counter).to(tl.uint32), noise)
    for i in tl.static_range(4):
        tl.store(p_out + i, words[i].to(tl.int64))


# seed, choice, position, token id, word, noise: docs/randomness.md
VECTORS = [
    (0, 0, 0, 0, 0x088F10B4, -1.22324944),
    (0, 0, 0, 1, 0x2A4DAA8E, -0.587959111),
    (42, 0, 17, 100, 0x059BC901, -1.34048247),
    (42, 1, 17, 100, 0xE9FEA0B6, 2.40928817),
    (42, 0, 18, 100, 0xD772B2F8, 1.75760329),
    (-1, 0, 17, 100, 0x8C7328CB, 0.510280669),
    (1234567890123456789, 3, 8191, 49151, 0x92461C8C, 0.580360174),
    (-9223372036854775808, 127, 131071, 128255, 0x4EBCBFBA, -0.164717928),
]


@pytest.mark.parametrize("seed, choice, position, token_id, word, noise", VECTORS)
def test_vectors_of_the_documentation(seed, choice, position, token_id, word, noise, device):
    out = torch.zeros(4, dtype=torch.int64, device=device)
    counter = torch.tensor([token_id // 4, position, choice], device=device)
    key = torch.tensor([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], device=device)
    philox_kernel[(1,)](out, counter, key, num_warps=1, enable_fp_fusion=False)
    assert out[token_id % 4].item() == word
    result = torch.zeros((2, 1), device=device)
    extremes_kernel[(1,)](out[token_id % 4 :], *result, SIZE=1, num_warps=1, enable_fp_fusion=False)
    assert result[0].item() == torch.tensor(noise).item()


def test_noise_equals_reference_and_is_bounded(device):
    first, key = 48128, torch.tensor([[0xDEADBEEF], [0xFEDCBA98]])
    position, choice = torch.tensor([0x7FFFFFFF]), torch.tensor([127])
    result = torch.full((2, 1024), float("nan"), device=device)
    arguments = [x.to(device) for x in (position, choice, key[0], key[1])]
    noise_kernel[(1,)](*result, first, *arguments, TILE=1024, num_warps=4, enable_fp_fusion=False)
    expected = gumbel_noise(key, choice, position, first + 1024)[0, first:]
    assert torch.equal(result[0].cpu(), expected)
    gap = result[1] - result[0]
    assert gap.min() >= 0
    assert gap[result[0] > 3].max() < 0.12


def test_noise_of_extreme_words(device):
    words = torch.tensor([0, 255, 256, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1], device=device)
    result = torch.full((2, 8), float("nan"), device=device)
    extremes_kernel[(1,)](words, *result, SIZE=8, num_warps=1, enable_fp_fusion=False)
    uniform = ((words >> 8).double() + 0.5) * 2.0**-24
    assert torch.equal(result[0], (-torch.log(-torch.log(uniform))).float())
    assert result[0].isfinite().all() and (result[1] >= result[0]).all()
    assert result[0].min() > NO_CUT
