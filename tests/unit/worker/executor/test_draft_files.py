"""Acceptance and rejection of draft models for a target."""

from __future__ import annotations

import dataclasses
import shutil

import msgspec
import pytest
from tokenizers import Tokenizer, models

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.executor.draft_files import check_draft, open_draft
from worker.kv.geometry import KVGroupSpec
from worker.model.loading.open_model import open_model

VOCAB = 263


@pytest.fixture
def target(tiny_folder):
    files = open_model(str(tiny_folder), tiny_folder / "none")
    yield files
    files.weights.close()


def tokenizer_of(texts, added=()):
    """Return a tokenizer.json with these texts by id, followed by added tokens."""
    tokenizer = Tokenizer(models.WordLevel({text: token_id for token_id, text in texts.items()}, unk_token=texts[0]))
    tokenizer.add_tokens(list(added))
    return tokenizer.to_str().encode()


def words(count=VOCAB):
    return {token_id: f"t{token_id}" for token_id in range(count)}


def variant(files, name="small", tokenizer=None, **spec):
    """Return the model under another name, with another tokenizer or specification."""
    bundle = files.bundle if tokenizer is None else msgspec.structs.replace(files.bundle, tokenizer_json=tokenizer)
    spec = dataclasses.replace(files.spec, **spec)
    return dataclasses.replace(files, default_name=name, bundle=bundle, spec=spec)


def test_only_the_vocabularies_must_match(target):
    check_draft(target, target)
    other = variant(target, tokenizer=tokenizer_of(words()))
    assert other.bundle.tokenizer_json != target.bundle.tokenizer_json
    check_draft(target, other)


@pytest.mark.parametrize(
    ("texts", "added", "said"),
    [
        (words() | {7: "seven"}, (), r"differ in 1 tokens\. Token 7 is 'seven' in small and 't7' in tiny"),
        (words() | {7: "t9", 9: "t7"}, (), r"differ in 2 tokens\. Token 7 is 't9' in small and 't7' in tiny"),
        (words(), ("<tool>", "</tool>"), r"differ in 2 tokens\. Token 263 is '<tool>' in small and missing in tiny"),
        (words(VOCAB - 1), (), r"Token 262 is missing in small and 't262' in tiny"),
        (words() | {3: "x" * 1000}, (), rf"Token 3 is '{'x' * 40}' in small"),
    ],
)
def test_a_different_vocabulary_is_rejected_naming_the_first_difference(target, texts, added, said):
    with pytest.raises(ConfigurationError, match=rf"^small cannot draft for tiny: .*{said}"):
        check_draft(target, variant(target, tokenizer=tokenizer_of(texts, added)))


def test_placeholders_of_unused_ids_are_ignored(target):
    padded = words() | {token_id: f"[PAD{token_id}]" for token_id in range(VOCAB, VOCAB + 25)}
    other = variant(target, tokenizer=tokenizer_of(padded), vocab_size=VOCAB + 25)
    check_draft(target, other)
    check_draft(other, target)
    with pytest.raises(ConfigurationError, match=r"Token 263 is '\[PAD264\]' in small"):
        check_draft(target, variant(target, tokenizer=tokenizer_of(words() | {VOCAB: f"[PAD{VOCAB + 1}]"})))


def test_the_draft_must_cover_the_tokenizer(target):
    check_draft(variant(target, "large", vocab_size=VOCAB + 57), target)
    check_draft(target, variant(target, vocab_size=VOCAB + 57))
    check_draft(variant(target, vocab_size=VOCAB - 3), variant(target, vocab_size=VOCAB - 3))
    with pytest.raises(ConfigurationError, match=r"small cannot draft for tiny.* logits for 260 tokens.* has 263"):
        check_draft(target, variant(target, vocab_size=VOCAB - 3))


@pytest.mark.parametrize(
    "groups",
    [
        (KVGroupSpec(layers=(0, 1), window=64),),
        (KVGroupSpec(layers=(0,)), KVGroupSpec(layers=(1,), window=64)),
    ],
)
def test_a_draft_with_a_window_is_rejected(target, groups):
    with pytest.raises(ConfigurationError, match="small cannot draft for tiny: it has layers with a sliding window"):
        check_draft(target, variant(target, kv_groups=groups))
    check_draft(variant(target, kv_groups=groups), target)


def settings(model="", method="off"):
    return WorkerSettings(speculative_model=str(model), speculative_method=method)


@pytest.mark.parametrize("method", ["off", "ngram", "auto"])
def test_without_a_draft_model_none_is_opened(target, method, tmp_path):
    assert open_draft(settings(method=method), target, tmp_path) is None


def test_contradicting_methods_and_models_are_rejected(target, tiny_folder, tmp_path):
    with pytest.raises(ConfigurationError, match="draft_model needs a --speculative-model"):
        open_draft(settings(method="draft_model"), target, tmp_path)
    for method in ("off", "ngram"):
        with pytest.raises(ConfigurationError, match=f"speculative-method {method} does not use a model"):
            open_draft(settings(tiny_folder, method), target, tmp_path)


def test_rejection_sampling_without_drafts_or_with_deterministic_is_rejected(target, tmp_path):
    rejecting = dataclasses.replace(settings(), speculative_acceptance="rejection")
    with pytest.raises(ConfigurationError, match=r"speculative-acceptance rejection .*, because .*-method is off"):
        open_draft(rejecting, target, tmp_path)
    rejecting = dataclasses.replace(rejecting, speculative_method="ngram")
    assert open_draft(rejecting, target, tmp_path) is None
    with pytest.raises(ConfigurationError, match="rejection and --deterministic exclude each other"):
        open_draft(dataclasses.replace(rejecting, deterministic=True), target, tmp_path)


@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_a_draft_is_opened_and_checked(target, tiny_folder, tmp_path, method):
    small = tmp_path / "small"
    shutil.copytree(tiny_folder, small)
    draft = open_draft(settings(small, method), target, tmp_path)
    assert draft is not None and draft.default_name == "small"
    draft.weights.close()
    (small / "tokenizer.json").write_bytes(tokenizer_of(words() | {0: "zero"}))
    with pytest.raises(ConfigurationError, match="small cannot draft for tiny"):
        open_draft(settings(small, method), target, tmp_path)
    with pytest.raises(ConfigurationError, match=r"^--speculative-model: there is no model file or folder"):
        open_draft(settings(tmp_path / "absent", method), target, tmp_path)
