"""The default model's small steps as one op, against its separate ops and against float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.linear_weight_only.cpu import MAX_ROWS, supported
from tests.fakes.weights import make_batch
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import open_model

PAGE = 16
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]

pytestmark = [
    pytest.mark.skipif(not supported(), reason="the processor has no AVX512-BF16"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    opened = open_model("", Path(tmp_path_factory.mktemp("cache")))
    yield opened
    opened.weights.close()


def make_decoder(files: ModelFiles, dtype: torch.dtype) -> tuple[Decoder, KVStorage]:
    decoder = Decoder(files.spec, files.weights, dtype=dtype, device="cpu", max_num_tokens=256, max_model_len=256)
    return decoder, KVStorage(files.spec, 16, PAGE, torch.float32, "cpu")


def decode(decoder: Decoder, kv: KVStorage, chunks: list[int]) -> torch.Tensor:
    """[len(PROMPT), vocab] log-probabilities, the prompt computed in chunks of these sizes."""
    out, start = [], 0
    for count in chunks:
        batch = make_batch([(PROMPT[start : start + count], start, [3, 1])], PAGE)
        out.append(decoder.forward(batch, kv))
        start += count
    return torch.cat(out).log_softmax(dim=-1)


def divergence(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Kullback-Leibler divergence from the exact distributions, the mean over positions."""
    return float((exact.exp() * (exact - ours)).sum(dim=-1).mean())


def test_small_steps_are_as_near_to_float32_as_large_ones(files: ModelFiles) -> None:
    chunks = [1, 2, 3, MAX_ROWS, 4]
    exact = decode(*make_decoder(files, torch.float32), [len(PROMPT)])
    decoder, kv = make_decoder(files, torch.bfloat16)
    large = decode(decoder, kv, [len(PROMPT)])
    separate = decode(decoder, kv, chunks)
    decoder.fuse_layers(kv)
    fused = decode(decoder, kv, chunks)
    assert not torch.equal(fused, separate), "the steps were not one op"
    plain = divergence(large, exact)
    # bfloat16 itself is about 1e-3 away; the small steps must not add to that.
    assert plain < 5e-3
    assert divergence(separate, exact) < 2 * plain
    assert divergence(fused, exact) < 2 * plain


def test_what_the_op_does_not_cover_stays_separate(files: ModelFiles) -> None:
    decoder, kv = make_decoder(files, torch.float32)
    before = decode(decoder, kv, [4, 14])
    decoder.fuse_layers(kv)
    assert torch.equal(decode(decoder, kv, [4, 14]), before)
