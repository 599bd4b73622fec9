"""Sampler with a small vocabulary, and a test of the distribution of its tokens."""

import math

import numpy as np
import torch

from kernels.backends.reference import SamplingOps
from shared.sampling_params import SamplingParams
from worker.executor.device import Device
from worker.executor.request_rows import RequestRows
from worker.plan import NewRow, ScheduledTokens, StepPlan
from worker.sampling.sampler import Sampler


class SmallSampler:
    """Rows of requests and their sampler, used in the same way as by the runner."""

    def __init__(self, vocab_size=40, max_num_seqs=512, ops=None):
        self.max_num_seqs = max_num_seqs
        self.rows = RequestRows(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_seqs,
            max_model_len=20_000,
            page_size=20_000,
            num_groups=1,
            vocab_size=vocab_size,
            device=Device(),
        )
        self.sampler = Sampler(self.rows.sampling, ops or SamplingOps())

    def add(self, row, token_ids=(1, 2, 3), num_prompt_tokens=None, eos=(), choice=0, mu=None, **sampling):
        sampling.setdefault("max_tokens", 100)
        new = NewRow(
            row=row,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            sampling=SamplingParams(**sampling),
            eos_token_ids=list(eos),
            choice=choice,
            mu=mu,
        )
        self.rows.stage(StepPlan(step=0, scheduled=[], new_rows=[new]))

    def sample(self, logits, rows, positions):
        items = [ScheduledTokens(row, position - 1, 1, True) for row, position in zip(rows, positions, strict=True)]
        return self.sampler.sample(logits.clone(), self.rows.stage(StepPlan(step=1, scheduled=items)).sampled)

    def ids(self, logits, rows, positions):
        found = []
        for begin in range(0, len(rows), self.max_num_seqs):
            part = slice(begin, begin + self.max_num_seqs)
            found += self.sample(logits[part], rows[part], positions[part]).token_ids.tolist()
        return found


def logits_like(seed=0, rows=1, vocab=40, spread=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def assert_distribution(ops, row, probabilities, **sampling):
    """Check that 20,000 tokens sampled from a row match the probabilities at level 1e-5 (Wilson and Hilferty 1931)."""
    count = 20_000
    small = SmallSampler(ops=ops)
    small.add(0, seed=1234, **sampling)
    ids = small.ids(row.expand(count, -1).contiguous(), [0] * count, list(range(count)))
    counts = np.bincount(ids, minlength=len(probabilities))
    expected = probabilities / probabilities.sum() * count
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    share = 2 / (9 * degrees)
    limit = degrees * (1 - share + 4.265 * math.sqrt(share)) ** 3
    assert ((observed - wanted) ** 2 / wanted).sum() < limit
