"""Unusable model files: one clear message, exit code 1, no traceback and no crash loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.model.loading import default_model_path


def _serve(model: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return _run([*flags, "-m", "shared.cli", "serve", str(model), "--cache-dir", str(tmp_path / "cache")], tmp_path)


def _run(arguments: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, "--port", "0", "--runtime-dir", str(tmp_path / "run")]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_a_truncated_file_is_named(tmp_path: Path, flags: tuple[str, ...]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model_path().read_bytes()[:50_000_000])
    ended = _serve(broken, tmp_path, *flags)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert "broken.gguf" in output
    assert "Traceback" not in output


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    ended = _serve(folder, tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert "Traceback" not in output
    assert not (tmp_path / "marker").exists()


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    ended = _serve(tmp_path / "nowhere.gguf", tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1 and "Traceback" not in output
    assert output.endswith(f"\npelton serve: there is no model file or folder {tmp_path}/nowhere.gguf\n")


def test_what_only_the_gateway_can_tell_ends_all_too(tmp_path: Path) -> None:
    ended = _run(["-m", "shared.cli", "serve", "--tool-call-parser", "nonsense"], tmp_path)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert "the model cannot be served: --tool-call-parser is 'nonsense'" in output
    assert "Traceback" not in output
