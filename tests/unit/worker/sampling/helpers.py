"""Sampler with a small vocabulary."""

from kernels.backends.cpu_sampling import CpuSamplingOps
from kernels.backends.reference import SamplingOps
from shared.sampling_params import SamplingParams
from worker.executor.device import Device
from worker.executor.request_rows import RequestRows
from worker.plan import NewRow, ScheduledTokens, StepPlan
from worker.sampling.sampler import Sampler


def compiled_ops():
    ops = CpuSamplingOps(1)
    ops.compile()
    return ops


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
