"""Fused layers of the default model compared with separate ops and float32, and processors that cannot fuse them."""

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
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712] * 4
SMALL_STEPS = [1, 2, 3, 8, 16, 17, 25]

pytestmark = pytest.mark.timeout(300)
needs_bf16 = pytest.mark.skipif(not bf16.supported(), reason="the processor has no AVX512-BF16")


def make_decoder(
    files: ModelFiles, dtype: torch.dtype, kv_dtype: torch.dtype, *, deterministic: bool = False
) -> tuple[Decoder, KVStorage]:
    decoder = Decoder(
        files.spec, files.weights, dtype=dtype, device="cpu", max_model_len=256, deterministic=deterministic
    )
    return decoder, KVStorage(files.spec, 16, PAGE, kv_dtype, "cpu")


def decode(decoder: Decoder, kv: KVStorage, chunks: list[int]) -> torch.Tensor:
    """Return [len(PROMPT), vocab] log-probabilities with the prompt computed in chunks of the given sizes."""
    out, start = [], 0
    for count in chunks:
        batch = make_batch([(PROMPT[start : start + count], start, [3, 1, 5, 7, 2])], PAGE)
        out.append(decoder.forward(batch, kv))
        start += count
    return torch.cat(out).log_softmax(dim=-1)


def divergence(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence from the exact distributions, averaged over positions."""
    return float((exact.exp() * (exact - ours)).sum(dim=-1).mean())


@pytest.fixture(scope="module")
def exact_model(files: ModelFiles) -> tuple[Decoder, KVStorage]:
    return make_decoder(files, torch.float32, torch.float32)


@pytest.fixture(scope="module")
def decoder(files: ModelFiles) -> Decoder:
    return make_decoder(files, torch.bfloat16, torch.bfloat16)[0]


@pytest.fixture(scope="module")
def unfused(decoder: Decoder, files: ModelFiles) -> dict[torch.dtype, torch.Tensor]:
    """Return the log-probabilities of the separate ops, by dtype of the KV cache."""
    kinds = torch.bfloat16, torch.float32
    return {kind: decode(decoder, KVStorage(files.spec, 16, PAGE, kind, "cpu"), SMALL_STEPS) for kind in kinds}


@needs_bf16
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
def test_all_step_sizes_are_close_to_float32(
    files: ModelFiles,
    exact_model: tuple[Decoder, KVStorage],
    unfused: dict[torch.dtype, torch.Tensor],
    decoder: Decoder,
    kv_dtype: torch.dtype,
) -> None:
    exact, separate = decode(*exact_model, [len(PROMPT)]), unfused[kv_dtype]
    kv = KVStorage(files.spec, 16, PAGE, kv_dtype, "cpu")
    decoder.fuse_layers(kv)
    fused = decode(decoder, kv, SMALL_STEPS)
    assert not torch.equal(fused, separate), "the layers were not fused"
    # bfloat16 itself deviates by about 1e-3, through rounded weights, inputs, keys and values.
    assert divergence(separate, exact) < 3e-3
    assert divergence(fused, exact) < 3e-3
    assert divergence(decode(decoder, kv, [len(PROMPT)]), exact) < 3e-3


@needs_bf16
def test_deterministic_tokens_are_bitwise_equal_in_every_step(files: ModelFiles) -> None:
    decoder, kv = make_decoder(files, torch.bfloat16, torch.bfloat16, deterministic=True)
    decoder.fuse_layers(kv)
    whole = decode(decoder, kv, [len(PROMPT)])
    for chunks in (SMALL_STEPS, [50, 1, 1, 20], [1] * len(PROMPT)):
        assert torch.equal(decode(decoder, kv, chunks), whole)
    beside = make_batch([(PROMPT[:40], 0, [3, 1, 5]), (PROMPT[:7], 0, [9]), (PROMPT[5:60], 0, [10, 11, 12, 13])], PAGE)
    assert torch.equal(decoder.forward(beside, kv)[:40].log_softmax(dim=-1), whole[:40])


def test_unsupported_layers_are_not_fused(exact_model: tuple[Decoder, KVStorage]) -> None:
    decoder, kv = exact_model
    before = decode(decoder, kv, [4, 68])
    decoder.fuse_layers(kv)
    assert torch.equal(decode(decoder, kv, [4, 68]), before)


def test_model_without_avx512_bf16_is_close_to_float32(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a processor without AVX512-BF16, where layers are not fused and deterministic mode is refused."""
    monkeypatch.setattr(bf16, "supported", lambda: False)
    monkeypatch.setattr(linear_panels, "processor_supported", lambda: False)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        kv_dtype = resolve_kv_dtype(WorkerSettings(), torch.device("cpu"), dtype)
        assert kv_dtype is torch.float32
        decoder, kv = make_decoder(files, dtype, kv_dtype)
        decoder.fuse_layers(kv)
        # A large step, a small step and a one-token step.
        found.append(decode(decoder, kv, [len(PROMPT) - 6, 5, 1]))
    exact, ours = found
    assert 0 < divergence(ours, exact) < 3e-3
    with pytest.raises(ConfigurationError, match="AVX512-BF16"):
        make_decoder(files, torch.bfloat16, kv_dtype, deterministic=True)
