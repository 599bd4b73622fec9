"""Hugging Face folders: configuration, rope, shards, tokenizer and template, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shared.errors import ConfigurationError, ModelFileError
from tests.unit.worker.model.loading.checkpoints import edited, opened
from worker.kv.geometry import KVGroupSpec
from worker.model.families import hf_names, required_shapes
from worker.model.loading import open_model
from worker.model.loading.fields import Fields
from worker.model.loading.hf_config import rope_from_config, spec_from_config, token_ids
from worker.model.spec import RopeSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": [1],
}
SIZES = {key: CONFIG[key] for key in CONFIG if key.startswith(("num_", "hidden_", "vocab", "max_", "inter", "rms"))}


def _values(**changes: Any) -> dict[str, Any]:
    """Return the configuration with changes; `...` removes a key."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


def _spec(**changes: Any) -> Any:
    fields = Fields(_values(**changes), "config.json: ")
    return spec_from_config(fields, tuple(token_ids(fields, "eos_token_id")))


def _tokenizer() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<|im_end|>", "<|eot_id|>", *"abcdefghijklmnop"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>", "<|eot_id|>"])
    return tokenizer


def _folder(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_values(**changes)))
    spec = _spec(tie_word_embeddings=changes.get("tie_word_embeddings"))
    names = hf_names(spec.num_layers)
    torch.manual_seed(0)
    tensors = {names[name]: torch.randn(shape) for name, shape in required_shapes(spec).items()}
    save_file(tensors, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_opens(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    files = opened(folder)
    assert files.default_name == "tiny-model"
    assert files.spec.rope == RopeSpec(theta=5000.0, rotary_dim=8)
    assert files.spec.kv_groups == (KVGroupSpec(layers=(0, 1)),)
    assert files.spec.eos_token_ids == files.eos_token_ids == (1,)
    stored = load_file(folder / "model.safetensors")
    q = stored["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(files.weights.get("layers.1.q.weight").data, q)
    part = files.weights.get("layers.1.q.weight", rows=slice(8, 16), cols=slice(4, 8))
    assert torch.equal(part.data, q[8:16, 4:8])
    assert torch.equal(files.weights.get("head.weight").data, stored["lm_head.weight"])
    files.weights.close()


def test_a_tied_head_may_be_stored_and_is_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, tie_word_embeddings=True)
    with edited(folder) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    files = opened(folder)
    assert files.spec.tie_word_embeddings and "head.weight" not in files.weights


def test_the_hash_covers_configuration_and_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    first = opened(folder).model_hash
    assert opened(folder).model_hash == first
    (folder / "config.json").write_text(json.dumps(_values(rope_theta=6000.0)))
    second = opened(folder).model_hash
    with edited(folder) as tensors:
        tensors["model.norm.weight"] += 1
    assert len({first, second, opened(folder).model_hash}) == 3


def test_end_ids_are_united_from_every_place(tmp_path: Path) -> None:
    folder = _folder(tmp_path, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    (folder / "chat_template.jinja").write_text("{{ '<|im_end|>' }}")
    files = opened(folder)
    assert files.eos_token_ids == (1, 2, 5, 6, 7)
    assert files.bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert opened(folder).bundle.chat_template is None
    listed = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    places = [
        ("tokenizer_config.json", json.dumps({"chat_template": "config"}), "config"),
        ("tokenizer_config.json", json.dumps({"chat_template": listed}), "list"),
        ("chat_template.json", json.dumps({"chat_template": "json"}), "json"),
        ("chat_template.jinja", "jinja ü", "jinja ü"),
    ]
    for name, content, expected in places:
        (folder / name).write_text(content)
        assert opened(folder).bundle.chat_template == expected
    (folder / "chat_template.jinja").write_text("x" * (1 << 20) + "x")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: has 1048577 bytes"):
        opened(folder)


def test_whether_a_beginning_is_added_comes_from_the_tokenizer(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    assert opened(folder).bundle.add_bos_token is False
    tokenizer = _tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert opened(folder).bundle.add_bos_token is True


@pytest.mark.filterwarnings("ignore")
def test_a_missing_tokenizer_json_is_made_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path, model_type="qwen2", eos_token_id=1)
    (folder / "tokenizer.json").unlink()
    vocab = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate("abcdefgh")}, "ab": 9}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ModelFileError, match=r"q_proj\.bias is missing"):
        opened(folder)
    (cached,) = (tmp_path / "cache").rglob("*.bin")
    tokenizer = Tokenizer.from_buffer(cached.read_bytes()[32:])
    assert tokenizer.encode("abc").ids == [9, 3]


# ---- configuration -----------------------------------------------------------------------------------------------


def test_families_differ_as_their_rows_say() -> None:
    assert not _spec().attention_bias
    biased = _spec(attention_bias=True, mlp_bias=True)
    assert biased.attention_bias and biased.attention_output_bias and biased.mlp_bias
    qwen2 = _spec(model_type="qwen2")
    assert qwen2.attention_bias and not qwen2.attention_output_bias and not qwen2.kv_groups[0].window
    qwen3 = _spec(model_type="qwen3", head_dim=16)
    assert qwen3.qk_norm and qwen3.head_dim == 16 and required_shapes(qwen3)["layers.0.o.weight"] == (32, 64)
    assert _spec(model_type="mistral", sliding_window=64).kv_groups == (KVGroupSpec(layers=(0, 1), window=64),)
    assert _spec(model_type="mistral", sliding_window=4096).kv_groups == (KVGroupSpec(layers=(0, 1)),)
    assert _spec(model_type="mistral", sliding_window=None).kv_groups == (KVGroupSpec(layers=(0, 1)),)


def test_windows_of_some_layers_make_two_groups() -> None:
    halves = (KVGroupSpec(layers=(0,)), KVGroupSpec(layers=(1,), window=64))
    window = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}
    assert _spec(**window, max_window_layers=1).kv_groups == halves
    assert _spec(**window, layer_types=["full_attention", "sliding_attention"]).kv_groups == halves
    assert _spec(**{**window, "use_sliding_window": False}).kv_groups == (KVGroupSpec(layers=(0, 1)),)
    with pytest.raises(ModelFileError, match="layer_types"):
        _spec(**window, layer_types=["full_attention", "chunked_attention"])


YARN = {"factor": 4.0, "original_max_position": 32, "beta_fast": 16.0, "mscale": 1, "mscale_all_dim": 0.5}
LLAMA3_CONFIG = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 32}


@pytest.mark.parametrize(
    ("kind", "values", "added"),
    [
        ("none", {}, {}),
        ("linear", {"factor": 2.0}, {}),
        ("dynamic", {"factor": 2}, {"original_max_position": 128}),
        ("llama3", LLAMA3, {}),
        (
            "yarn",
            {"factor": 4.0, "original_max_position": 32, "beta_fast": 16.0, "mscale": 1, "mscale_all_dim": 0.5},
            {},
        ),
        ("yarn", {"original_max_position": 32, "truncate": False, "attention_factor": 1.5}, {"factor": 4.0}),
    ],
)
def test_rope_is_read_in_every_notation(kind: str, values: dict[str, Any], added: dict[str, Any]) -> None:
    wanted = RopeSpec(theta=5000.0, rotary_dim=8, kind=kind, **values, **added)
    given = {key.replace("max_position", "max_position_embeddings"): value for key, value in values.items()}
    kind = "default" if kind == "none" else kind
    for config in (
        {"rope_theta": 5000.0, "rope_scaling": {"type": kind, **given}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": kind, **given}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **given}},
    ):
        assert rope_from_config(Fields(config, ""), 8, 128) == wanted


def test_partial_rotation() -> None:
    assert _spec(partial_rotary_factor=0.5).rope.rotary_dim == 4
    rope = _spec(rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 0.25}).rope
    assert rope == RopeSpec(theta=7.0, rotary_dim=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map asks for code"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config says 'hqq'; supported are awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is missing"),
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'"),
        ({"model_type": 5}, "model_type is 5"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 1e6}, "hidden_size is 1000000.0"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"vocab_size": 2**40}, f"vocab_size is {2**40}"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"head_dim": 7}, "rope rotates 7 of 7"),
        ({"rope_scaling": []}, "rope_scaling is []"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0.5}}, "rope_scaling.beta_fast is 0.5"),
        (
            {"rope_scaling": {**LLAMA3_CONFIG, "high_freq_factor": 1}},
            "rope_scaling.high_freq_factor is 1",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters differs between kinds of layers"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"bos_token_id": 20}, "token id 20 is not in the vocabulary of 20"),
    ],
)
def test_missing_and_absurd_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        _spec(**changes)
    assert message in str(caught.value) and str(caught.value).startswith("config.json: ")


# ---- folders that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pkl"])
def test_pickled_weights_are_refused_by_name_and_never_loaded(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(ModelFileError, match=f"{name}: pickled weights"):
        opened(folder)
    assert not Path("marker").exists()


def test_code_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelFileError, match=r"config\.json: auto_map"):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: is not valid JSON"),
        ("config.json", "[1]", "config.json: is not a JSON object"),
        ("config.json", "[" * 100_000, "config.json: is not valid JSON"),
        ("config.json", '{"hidden_size": 1, "hidden_size": 2}', "config.json: the key 'hidden_size' appears twice"),
        ("config.json", " " * (1 << 24) + "{}", "config.json: has 16777218 bytes"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id is '</s>'"),
        ("generation_config.json", '{"eos_token_id": 20}', "token id 20 is not in the vocabulary"),
        ("tokenizer_config.json", "nope", "tokenizer_config.json: is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": 7}', "tokenizer_config.json: chat_template is 7"),
        ("tokenizer.json", "{}", "tokenizer.json: the tokenizer cannot be used"),
        ("model.safetensors", "{}", "model.safetensors: is not a safetensors file or is incomplete"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = _folder(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(ModelFileError, match=re.escape(message)):
        opened(folder)


def test_tensors_that_are_missing_misshapen_unknown_or_of_another_type_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    path = folder / "model.safetensors"
    whole = load_file(path)
    down = "model.layers.1.mlp.down_proj.weight"
    bias = "model.layers.1.self_attn.q_proj.bias"
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: tensor for name, tensor in whole.items() if name != down}, f"tensor {down} is missing"),
        ({**whole, down: torch.ones(32, 47)}, rf"tensor {down} has the shape \(32, 47\); \(32, 48\) is needed"),
        ({**whole, down: torch.ones(32, 48, dtype=torch.int8)}, f"tensor {down} has the type I8"),
        ({**whole, bias: torch.ones(32)}, "q_proj.bias is not known in the family llama"),
    ]
    for tensors, message in changes:
        save_file(tensors, path)
        with pytest.raises(ModelFileError, match=message):
            opened(folder)


def test_several_files_need_an_index(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert opened(folder).spec.num_layers == 2
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json is missing"):
        opened(folder)
    (folder / "a.safetensors").unlink()
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match="there are no safetensors files"):
        opened(folder)


def test_hub_ids_are_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0123456789abcdef" * 2 + "01234567"
    cached = tmp_path / "hub" / "models--some-org--tiny"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    _folder(tmp_path).rename(cached / "snapshots" / revision)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (cached / "refs" / "main").write_text("../../../outside")
    with pytest.raises(ConfigurationError, match="some-org/tiny is neither"):
        open_model("some-org/tiny", tmp_path / "cache")
    (cached / "refs" / "main").write_text(revision)
    assert open_model("some-org/tiny", tmp_path / "cache").default_name == "some-org/tiny"


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:  # who runs the tests may read everything
        raise PermissionError(13, "Permission denied", str(path))

    folder = _folder(tmp_path)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigurationError, match=f"^the folder {folder.name} cannot be read: Permission denied$"):
        opened(folder)
