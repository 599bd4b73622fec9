"""Comparisons, grid control and model runs shared by kernel tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.common.tolerances import TOLERANCES
from tests.fakes.weights import make_batch, on_device
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading import ModelFiles


def name_of(value: Any) -> str | None:
    """Return the name of a case for the id of a test, None for other values."""
    return getattr(value, "name", None)


def assert_same_bits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check for equality: bitwise on a GPU, approximate in the interpreter.

    On some processors numpy sums a row of a product in an order that depends on its position in the tile.
    """
    if actual.is_cuda:
        assert torch.equal(actual, wanted)
        return
    relative, absolute = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, wanted, rtol=relative, atol=absolute)


def run_only_the_last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run only the last program of each grid for the rest of the test; on a GPU run all programs."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def run_last(self, *args, **kwargs):
        last = self.grid[0] - 1
        self.grid = (1,)
        with monkeypatch.context() as patch:
            builder = interpreter.interpreter_builder
            patch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (last, 0, 0)))
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_last)


def logits(files: ModelFiles, device: torch.device) -> torch.Tensor:
    """Return [18, vocab] logits of two requests, from a prefill step and a decode step."""
    decoder = Decoder(files.spec, files.weights, dtype=torch.float16, device=device, max_model_len=64)
    kv = KVStorage(files.spec, 8, 16, torch.float32, device)
    steps = [
        make_batch([(list(range(3, 17)), 0, [0, 1]), ([9, 8], 0, [2])], 16),
        make_batch([([7], 14, [0, 1]), ([5], 2, [2])], 16),
    ]
    return torch.cat([decoder.forward(on_device(step, device), kv) for step in steps])
