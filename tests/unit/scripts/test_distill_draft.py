"""Tests of distill_draft with a tiny target: texts, training, interruption, export and acceptance."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import msgspec
import pytest
import torch

from kernels.common.cpu.pool import use_cache_directory
from scripts._distill import acceptance, export, main
from scripts._distill.acceptance import measure, rounds, summary
from scripts._distill.draft import Draft, draft_spec
from scripts._distill.loaded_model import Draw, LoadedModel
from scripts._distill.prompts import own_prompts, read_prompts, tokenize
from scripts._distill.texts import Order, Recipe, evaluation_orders, make_texts, orders
from scripts._distill.training import Schedule, Training, batch_of, candidates, divergence, loss_of
from shared.errors import ConfigurationError
from shared.messages import Bundle
from tests.fakes.tiny_model import write_tiny_model
from tests.fakes.weights import MemoryWeights
from tests.unit.worker.model.loading.forge import tiny_gguf, tiny_tensors
from worker.executor.draft_files import check_draft
from worker.model.families import required_shapes
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import open_model
from worker.model.spec import DecoderSpec, RopeSpec

CACHE = Path(__file__).parents[3] / ".pytest_cache" / "numba"
COMMON = ["--cache-dir", str(CACHE), "--threads", "1"]
SPEC = DecoderSpec(
    family="llama", num_layers=3, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=320, max_position=128, norm_eps=1e-5, rope=RopeSpec(theta=10000.0, rotary_dim=16),
    tie_word_embeddings=True, eos_token_ids=(2,),
)  # fmt: skip
RECIPE = Recipe(num_texts=20, max_prompt=16, max_tokens=12, num_top=8, temperature=0.8, seed=3)
SCHEDULE = Schedule(
    steps=12, batch=4, learning_rate=3e-3, warm_up=2, weight_decay=0.01, negatives=40, seed=1, save_every=5
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Run the tiny models on one thread, with the kernel cache of other tests."""
    use_cache_directory(CACHE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _weights(spec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return MemoryWeights(
        {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1) + ("norm" in name)
            for name, shape in required_shapes(spec).items()
        }
    )


def _files(spec, weights):
    return ModelFiles(
        spec=spec, weights=weights, bundle=Bundle(bundle_hash="", tokenizer_json=b""), default_name="tiny", created=0,
        eos_token_ids=spec.eos_token_ids, model_hash="tiny",
    )  # fmt: skip


def _loaded(files, num_texts=1):
    return LoadedModel(files, num_texts=num_texts, max_length=64, dtype=torch.float32)


@pytest.fixture(scope="module")
def target():
    return _loaded(_files(SPEC, _weights(SPEC)), num_texts=20)


@pytest.fixture(scope="module")
def texts(target):
    prompts = [[3 + i, 40, 7 * i % 300] for i in range(20)]
    return target.generate(prompts, [Draw(0.8, i) for i in range(20)], max_tokens=12, num_top=8)


def _folder(path):
    """Write a target of two layers with a tokenizer that the gateway accepts."""
    write_tiny_model(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def _gguf(path):
    """Write a target of two layers as GGUF."""
    second = [tensor for tensor in tiny_tensors(1) if tensor.name.startswith("blk.0.")]
    layers = [dataclasses.replace(tensor, name=tensor.name.replace("blk.0", "blk.1")) for tensor in second]
    path.write_bytes(tiny_gguf({"llama.block_count": 2}, [*tiny_tensors(0), *layers]))
    return path


KINDS = {
    "llama": {},
    "interleaved": {"rope": dataclasses.replace(SPEC.rope, interleaved=True)},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True, "activation": "gelu_tanh"},
    "partial rope": {"rope": RopeSpec(theta=500.0, rotary_dim=8), "mlp_bias": True, "attention_output_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_draft_computes_the_same_as_decoder(kind, texts):
    spec = dataclasses.replace(SPEC, **KINDS[kind])
    weights = _weights(spec)
    draft = Draft(draft_spec(spec, 3), weights, torch.float32)
    (positions, logits), *more = list(_loaded(_files(spec, weights)).predictions(texts[0]))
    assert not more
    ids = texts[0].token_ids.long()[None]
    mine = draft.logits(draft.hidden(ids)[0, positions - 1])
    torch.testing.assert_close(mine, logits, atol=2e-3, rtol=2e-3)
    assert logits.std() > 0.1


def test_padding_does_not_change_loss(texts):
    draft = Draft(draft_spec(SPEC, 1), _weights(SPEC), torch.float32)
    whole = loss_of(draft, texts[:4], 400, torch.Generator())
    short = [dataclasses.replace(text, **_cut(text, 3)) for text in texts[:2]]
    each = [loss_of(draft, [text], 400, torch.Generator()) * text.num_outputs for text in (*short, texts[3])]
    together = loss_of(draft, [*short, texts[3]], 400, torch.Generator()) * (6 + texts[3].num_outputs)
    assert together.item() == pytest.approx(sum(each).item(), rel=1e-4)
    assert whole.item() > 0.1


def _cut(text, count):
    return {
        "token_ids": text.token_ids[: text.num_prompt + count],
        "top_ids": text.top_ids[:count],
        "top_logprobs": text.top_logprobs[:count],
    }


def test_unsupported_target_is_rejected():
    with pytest.raises(ConfigurationError, match="the target has 3 layers"):
        draft_spec(SPEC, 4)


def test_texts_record_the_distributions_of_the_target(target, texts):
    text = next(text for text in texts if text.num_outputs == 12)
    (_, logits), *_ = target.predictions(text)
    expected = logits.log_softmax(dim=-1).gather(1, text.top_ids.long())
    torch.testing.assert_close(text.top_logprobs.float(), expected, atol=5e-3, rtol=5e-3)
    assert (text.top_logprobs.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_target_accepts_all_of_its_own_tokens(target, temperature):
    draws = [Draw(temperature, 2**40 + i) for i in range(4)]
    texts = target.generate([[5, 6], [7], [8, 9, 10], [11]], draws, max_tokens=24, num_top=4)
    found = measure(target, texts, draws)
    assert found.match == 1.0
    assert found.by_position[0] == 1.0
    if temperature:
        other = measure(target, texts, [Draw(temperature, 99 + i) for i in range(4)])
        assert other.match < 0.9


def test_rounds_continue_after_first_mismatch():
    yes, no = True, False
    assert rounds([yes, yes, no, yes, yes, yes], 2) == [2, 2]
    assert rounds([yes, yes, no, yes, yes, yes], 3) == [2, 3]
    assert rounds([no, no, yes], 3) == [0, 0, 1]
    found = summary([[yes, yes, no, yes], [no, yes]])
    assert found.num_tokens == 6
    assert found.match == pytest.approx(4 / 6)
    assert found.per_round[1] == pytest.approx(6 / 5)
    assert found.per_round[7] == pytest.approx(6 / 4)
    assert found.by_position[:3] == [3 / 4, 1 / 4, 0]
    assert acceptance.table({"trained, greedy": summary([[yes, no]])})[1].split()[:3] == ["trained,", "greedy", "50.0%"]


def test_sampled_softmax_sum_is_unbiased():
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0))
    top = logits.topk(4).indices
    whole = logits.exp().sum().item()
    sums = []
    for seed in range(200):
        tokens, weights, at = candidates(top, 2000, 100, torch.Generator().manual_seed(seed))
        assert torch.equal(tokens[at], top)
        assert len(tokens) == len(set(tokens.tolist())) == 104
        sums.append((logits[:, tokens] + weights).exp().sum().item())
    assert sum(sums) / len(sums) == pytest.approx(whole, rel=0.02)


def test_divergence_is_exact_over_all_tokens():
    generator = torch.Generator().manual_seed(1)
    draft, target = torch.randn(2, 5, 50, generator=generator)
    likely = target.log_softmax(dim=-1).topk(50)
    expected = torch.nn.functional.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence(draft, likely.indices, likely.values).item() == pytest.approx(expected.item(), abs=1e-4)
    # Merging the other tokens into one class can only reduce the divergence.
    part = target.log_softmax(dim=-1).topk(6)
    assert 0 < divergence(draft, part.indices, part.values) < expected


def test_each_round_uses_every_text_once(texts):
    schedule = msgspec.structs.replace(SCHEDULE, batch=6)
    seen = [id(text) for step in range(10) for text in batch_of(texts, schedule, step)]
    for start in range(0, 60, 20):
        assert sorted(seen[start : start + 20]) == sorted(map(id, texts))
    assert seen[:20] != seen[20:40]


def _training(folder, digest="same"):
    draft = Draft(draft_spec(SPEC, 1), _weights(SPEC), torch.float32)
    return draft, Training(draft, SCHEDULE, folder / "checkpoint.safetensors", digest)


def test_interrupted_training_resumes_with_same_result(tmp_path, texts):
    losses: list[float] = []
    whole, training = _training(tmp_path / "whole")
    training.run(texts, lambda step, loss: losses.append(loss))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    # Interrupted after step 8; the last checkpoint is that of step 5.
    _, first = _training(tmp_path / "stopped")
    first.run(texts, lambda step, loss: None, until=8)
    stopped, second = _training(tmp_path / "stopped")
    second.resume()
    assert second.step == 5
    again: list[float] = []
    second.run(texts, lambda step, loss: again.append(loss))
    assert again == losses[5:]
    for name, weight in whole.trained.items():
        assert torch.equal(weight, stopped.trained[name]), name
    assert not [path for path in (tmp_path / "stopped").iterdir() if path.name != "checkpoint.safetensors"]


def test_checkpoint_of_another_run_is_rejected(tmp_path, texts):
    _, training = _training(tmp_path)
    training.run(texts, lambda step, loss: None, until=5)
    _, other = _training(tmp_path, "other")
    with pytest.raises(ConfigurationError, match="other texts or settings"):
        other.resume()


def test_texts_are_generated_once(tmp_path, target):
    wanted = [Order([3, 4], Draw(0.0, 1)), Order([5], Draw(0.9, 2))]
    made = list(make_texts(wanted, tmp_path, RECIPE, "tiny", lambda: target))

    def unused_model():
        raise AssertionError("the texts are on disk")

    read = list(make_texts(wanted, tmp_path, RECIPE, "tiny", unused_model))
    for one, other in zip(made[0], read[0]):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.top_logprobs, other.top_logprobs)
        assert one.num_prompt == other.num_prompt
    with pytest.raises(AssertionError, match="on disk"):
        list(make_texts(wanted, tmp_path, RECIPE, "another model", unused_model))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    again = list(make_texts(wanted, tmp_path, RECIPE, "tiny", lambda: target))
    assert torch.equal(again[0][1].token_ids, made[0][1].token_ids)


def test_texts_are_distinct():
    wanted = orders([[1], [2], [3]], RECIPE)
    assert len(wanted) == 20
    assert [order.draw.temperature == 0 for order in wanted].count(True) == 1
    assert len({(tuple(order.prompt), order.draw) for order in wanted}) == 20
    assert set(evaluation_orders([[1]], RECIPE)) == {0.0, 0.7}


def test_draft_without_training_has_first_layers_of_target(tmp_path):
    for path in (_gguf(tmp_path / "target.gguf"), _folder(tmp_path / "folder")):
        out = tmp_path / f"draft-of-{path.name}"
        arguments = ["--steps", "0", "--layers", "1", "--no-measure", "--model", str(path), "--out", str(out)]
        assert main.main([*arguments, *COMMON]) == 0
        target, draft = open_model(str(path), CACHE), open_model(str(out), CACHE)
        check_draft(target, draft)
        assert draft.spec.num_layers == 1
        assert draft.eos_token_ids == target.eos_token_ids
        assert draft.bundle.bundle_hash == target.bundle.bundle_hash
        exact = torch.float32 if path.suffix == ".gguf" else torch.bfloat16
        for name in draft.weights.names():
            mine, theirs = draft.weights.get(name), target.weights.get(name)
            assert torch.equal(mine.dequantize(exact), theirs.dequantize(exact)), name


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_written_draft_computes_the_same_as_trained_one(tmp_path, monkeypatch, texts, kind):
    monkeypatch.setattr(export, "_TRAINED_FORMAT", gguf.GGMLQuantizationType.BF16)
    path = _gguf(tmp_path / "target.gguf") if kind == "gguf" else _folder(tmp_path / "target")
    target = open_model(str(path), CACHE)
    draft = Draft(draft_spec(target.spec, 1), target.weights, torch.float32)
    for weight in draft.trained.values():
        weight.data = (weight.data + 0.05 * torch.randn_like(weight)).bfloat16().float()
    out = export.write_draft(tmp_path / "draft", path, draft.written_spec, draft.written(), target.weights)
    text = dataclasses.replace(texts[0], token_ids=texts[0].token_ids % 200)
    (positions, logits), *_ = _loaded(open_model(str(out), CACHE)).predictions(text)
    if kind == "folder":
        draft.embedding = draft.embedding.bfloat16().float()
    mine = draft.logits(draft.hidden(text.token_ids.long()[None])[0, positions - 1])
    assert (mine - logits).std() < 0.01 * logits.std()  # the written head is rounded
    check_draft(target, open_model(str(out), CACHE))


def test_trained_matrices_have_8_bits_in_gguf(tmp_path):
    path = _gguf(tmp_path / "target.gguf")
    target = open_model(str(path), CACHE)
    draft = Draft(draft_spec(target.spec, 1), target.weights, torch.float32)
    export.write_draft(tmp_path, path, draft.written_spec, draft.written(), target.weights)
    written = open_model(str(tmp_path / "draft.gguf"), CACHE).weights
    formats = {"layers.0.q.weight": "q8_0", "head.weight": "q8_0", "embed.weight": "f32", "norm.weight": "f32"}
    assert {name: written.get(name).format for name in formats} == formats
    error = written.get("layers.0.q.weight").dequantize(torch.float32) - draft.written()["layers.0.q.weight"]
    assert 0 < error.abs().max() < 0.02


def test_complete_run_reduces_loss_and_can_be_repeated(tmp_path, capsys):
    path = _folder(tmp_path / "target")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# not a prompt\n" + "\n".join(f"t{i} t{2 * i}" for i in range(3, 43)))
    arguments = [
        "--model", str(path), "--out", str(tmp_path / "draft"), "--prompts", str(prompts), "--layers", "1",
        "--steps", "60", "--texts", "24", "--max-tokens", "16", "--batch", "4", "--learning-rate", "5e-3", *COMMON,
    ]  # fmt: skip
    assert main.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["last_loss"] < 0.8 * figures["first_loss"]
    assert list(figures["acceptance"]) == [
        f"{name}, {how}" for name in ("first layers", "trained") for how in ("greedy", "temperature 0.7")
    ]
    assert figures == json.loads((tmp_path / "draft" / "report.json").read_text())
    assert open_model(str(tmp_path / "draft"), CACHE).spec.num_layers == 1
    # A repeated run reuses all files and gives the same result.
    assert main.main(arguments) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["acceptance"] == figures["acceptance"]


def test_missing_target_is_reported(tmp_path, capsys):
    assert main.main(["--model", str(tmp_path / "none.gguf"), "--out", str(tmp_path), *COMMON]) == 1
    assert "there is no file or folder" in capsys.readouterr().err


def test_prompts_are_read_from_files(tmp_path):
    path = tmp_path / "log.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    lines = [{"arrival": 0, "prompt": "One"}, {"messages": messages}, {"arrival": 1, "input_length": 5}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    training, evaluation = read_prompts(path, 0)
    assert len(evaluation) == 1
    assert sorted(map(str, training + evaluation)) == sorted(["One", str(messages)])
    path.write_text('{"prompt": "One"}\n{"prompt": 5}')
    with pytest.raises(ConfigurationError, match="line 2: `prompt` must be a string"):
        read_prompts(path, 0)
    path.write_text('{"prompt": "One"}\n')
    with pytest.raises(ConfigurationError, match="at least 2 are required"):
        read_prompts(path, 0)


def test_built_in_prompts_for_training_and_evaluation_are_disjoint():
    training, evaluation = own_prompts(0)
    assert len(training) == len(set(map(str, training))) > 1000
    assert len(evaluation) >= 30
    assert not set(map(str, training)) & set(map(str, evaluation))
    assert own_prompts(1)[0] != training


def test_long_prompts_keep_the_end(tmp_path):
    bundle = open_model(str(_folder(tmp_path)), CACHE).bundle
    assert tokenize(["t5 t6 t7 t8"], bundle, 3) == [[6, 7, 8]]
    with pytest.raises(ConfigurationError, match="no chat template"):
        tokenize([[{"role": "user", "content": "t5"}]], bundle, 3)
