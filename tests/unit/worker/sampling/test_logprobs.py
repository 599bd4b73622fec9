"""Log-probabilities are computed from the raw logits and are always finite."""

import pytest
import torch

from kernels.ops.logprobs.reference import compute_logprobs
from tests.unit.worker.sampling.helpers import SmallSampler
from worker.executor.pending_step import token_logprobs


def test_values_ranks_and_alternatives():
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 4
    token_ids = torch.tensor([0, 7, 32, 9, 9])
    expected = torch.log_softmax(logits.double(), dim=-1)
    entries = token_logprobs(compute_logprobs(logits, token_ids, 20), [20, 1, 0, 5, 3])
    for i, (entry, count) in enumerate(zip(entries, [20, 1, 0, 5, 3])):
        row = expected[i]
        assert entry.token_id == token_ids[i]
        assert entry.logprob == pytest.approx(row[token_ids[i]].item(), abs=1e-5)
        assert entry.rank == 1 + (row > row[token_ids[i]]).sum().item()
        order = row.argsort(descending=True)[:count].tolist()
        assert entry.top_ids == order
        assert entry.top_logprobs == pytest.approx([row[j].item() for j in order], abs=1e-5)


def test_the_sampler_reports_raw_log_probabilities_of_selected_rows():
    small = SmallSampler()
    small.add(0, temperature=0.0)
    small.add(1, temperature=0.3, top_k=1, logit_bias={4: 100.0}, logprobs=2)
    small.add(2, temperature=0.0, frequency_penalty=2.0, logprobs=0)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    tokens = small.sample(logits, [0, 1, 2], [3, 3, 3])
    ids, logprobs = tokens.token_ids, tokens.logprobs
    assert logprobs is not None and logprobs.token_ids.tolist() == ids[1:].tolist()
    raw = torch.log_softmax(logits, dim=-1)
    assert ids[1] == 4
    assert logprobs.logprobs[0].item() == pytest.approx(raw[1, 4].item(), abs=1e-5)
