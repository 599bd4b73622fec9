"""Fake decoder whose logits are a hash of all previous tokens, which it reads from the pages of its KV cache."""

import torch

from kernels.backends.reference import SamplingOps
from tests.fakes.late_device import LateDevice
from worker.executor.device import Device
from worker.executor.model_runner import ModelRunner
from worker.executor.request_rows import RequestRows
from worker.sampling.sampler import Sampler

VOCAB = 50
PAGE = 4


class FakeKV:
    """Storage of one integer per slot: the token id written there, or -1."""

    def __init__(self, num_pages):
        self.tokens = torch.full((num_pages, PAGE), -1, dtype=torch.int64)

    def copy_pages(self, copies):
        self.tokens[copies.targets] = self.tokens[copies.sources]


def expected_logits(token_ids):
    """Return the [VOCAB] float32 logits after these tokens."""
    value = 17
    for token in token_ids:
        value = (value * 31 + int(token) + 1) % 1_000_003
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(value)) * 2


class FakeDecoder:
    """Decoder whose hidden states are the contexts: one row of token ids, padded with -1, per requested token."""

    def __init__(self, max_model_len):
        self.max_model_len = max_model_len
        self.batches = []
        self.logits_rows = []
        self.fail = None
        self.poisoned = None

    def hidden_states(self, batch, kv):
        if self.fail is not None:
            raise self.fail
        self.batches.append(batch)
        kv.tokens.view(-1)[batch.slot_mapping[0]] = batch.input_ids.long()
        bounds = batch.cu_seqlens_q.tolist()
        out = torch.full((len(batch.logits_indices), self.max_model_len), -1, dtype=torch.int64)
        for i, index in enumerate(batch.logits_indices.tolist()):
            request = next(r for r in range(batch.num_requests) if bounds[r] <= index < bounds[r + 1])
            length = int(batch.positions[index]) + 1
            out[i, :length] = kv.tokens[batch.block_tables[0][request].long()].flatten()[:length]
        return out

    def logits(self, hidden):
        self.logits_rows.append(len(hidden))
        rows = [expected_logits(row[row >= 0].tolist()) for row in hidden]
        logits = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
        if self.poisoned is not None:
            logits[self.poisoned] = float("nan")
        return logits


def make_runner(max_num_seqs=4, max_model_len=64, num_pages=64, late=False):
    """Return (runner, decoder, rows, kv), on a late device if `late` is set."""
    device = LateDevice() if late else Device()
    rows = RequestRows(
        max_num_seqs=max_num_seqs,
        max_num_tokens=1024,
        max_model_len=max_model_len,
        page_size=PAGE,
        num_groups=1,
        vocab_size=VOCAB,
        device=device,
    )
    decoder, kv = FakeDecoder(max_model_len), FakeKV(num_pages)
    runner = ModelRunner(decoder, kv, rows, Sampler(rows.sampling, SamplingOps()), device, graphs=False)
    return runner, decoder, rows, kv
