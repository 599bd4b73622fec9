"""Models that cannot be served: one clear message, exit code 1, no traceback and no restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.numba_cache import CACHE
from tests.fakes.tiny_model import write_tiny_model
from worker.model.loading import default_model_path


@pytest.mark.parametrize("fault", ["truncated", "missing", "tokenizer"])
def test_a_model_that_cannot_be_served_is_named(tmp_path: Path, fault: str) -> None:
    model = tmp_path / "model.gguf"
    arguments = ["-m", "shared.cli", "serve", str(model), "--cache-dir", str(tmp_path / "cache")]
    reason = f"pelton serve: there is no model file or folder {model}\n"
    if fault == "truncated":
        model.write_bytes(default_model_path().read_bytes()[:50_000_000])
        # Without assertions, as an operator may run it.
        arguments.insert(0, "-O")
        reason = "model.gguf"
    elif fault == "tokenizer":
        # Only the gateway can tell.
        arguments[3:] = [str(write_tiny_model(tmp_path / "tiny")), "--dtype", "float32", "--cache-dir", str(CACHE)]
        reason = "the model cannot be served: the tokenizer has no decoder"
    command = [sys.executable, *arguments, "--port", "0", "--runtime-dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, check=False)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1 and reason in output and "Traceback" not in output, output
