"""Default model on a processor without AVX512-BF16, simulated on every machine."""

from __future__ import annotations

import pytest
import torch

from kernels.common.cpu import bf16
from kernels.ops.linear_panels import cpu as linear_panels
from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from tests.fakes.weights import make_batch
from worker.executor.resolve import resolve_kv_dtype
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles

PAGE = 16
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712] * 2
CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "supported", lambda: False)
    monkeypatch.setattr(linear_panels, "processor_supported", lambda: False)


def make_decoder(files: ModelFiles, dtype: torch.dtype, *, deterministic: bool = False) -> Decoder:
    return Decoder(
        files.spec,
        files.weights,
        dtype=dtype,
        device=CPU,
        max_model_len=64,
        deterministic=deterministic,
    )


def log_probabilities(decoder: Decoder, kv: KVStorage) -> torch.Tensor:
    """Return [len(PROMPT), vocab] log-probabilities, computed in a large step, a small step and a one-token step."""
    out, start = [], 0
    for count in (len(PROMPT) - 6, 5, 1):
        out.append(decoder.forward(make_batch([(PROMPT[start : start + count], start, [3, 1, 5])], PAGE), kv))
        start += count
    return torch.cat(out).log_softmax(dim=-1)


def test_model_without_avx512_bf16_is_close_to_float32(files: ModelFiles) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = make_decoder(files, dtype)
        kv_dtype = resolve_kv_dtype(WorkerSettings(), CPU, dtype)
        assert kv_dtype is torch.float32
        kv = KVStorage(files.spec, 8, PAGE, kv_dtype, CPU)
        decoder.fuse_layers(kv)
        found.append(log_probabilities(decoder, kv))
    exact, ours = found
    # bfloat16 itself deviates by about 1e-3.
    assert 0 < float((exact.exp() * (exact - ours)).sum(dim=-1).mean()) < 3e-3


def test_deterministic_mode_is_refused(files: ModelFiles) -> None:
    with pytest.raises(ConfigurationError, match="AVX512-BF16"):
        make_decoder(files, torch.bfloat16, deterministic=True)
