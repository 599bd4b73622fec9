"""A sampler over a small vocabulary."""

import numpy as np
import torch

from kernels.sampling.dispatch import CpuOps, ReferenceOps
from shared.sampling_params import SamplingParams
from worker.sampling.parameters import SampledRows, SamplingParameters
from worker.sampling.sampler import Sampler
from worker.scheduler.plan import NewRow

CPU = torch.device("cpu")


def compiled_ops():
    ops = CpuOps(1)
    ops.compile()
    return ops


class SmallSampler:
    """Rows of requests and their sampler."""

    def __init__(self, vocab_size=40, max_num_seqs=8, ops=None):
        self.parameters = SamplingParameters(max_num_seqs, vocab_size, CPU)
        self.sampler = Sampler(self.parameters, ops or ReferenceOps())

    def add(self, row, token_ids=(1, 2, 3), num_prompt_tokens=None, eos=(), choice=0, **sampling):
        sampling.setdefault("max_tokens", 100)
        self.parameters.set(
            NewRow(
                row=row,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
                sampling=SamplingParams(**sampling),
                eos_token_ids=list(eos),
                choice=choice,
            )
        )

    def sample(self, logits, rows, positions):
        sampled = SampledRows(rows=np.array(rows), device_rows=torch.tensor(rows), positions=torch.tensor(positions))
        return self.sampler.sample(logits.clone(), sampled)

    def ids(self, logits, rows, positions):
        return self.sample(logits, rows, positions)[0].tolist()
