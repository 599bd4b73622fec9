"""Selection of the draft model, and checks that it can draft for the served model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from worker.model.loading.bundle import parse_tokenizer
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import open_model

_METHODS = ("draft_model", "auto")


def open_draft(settings: WorkerSettings, target: ModelFiles, cache_dir: Path) -> ModelFiles | None:
    """Open the draft model named in the settings. Return None if there is none.

    Raises:
        ConfigurationError: The speculative settings contradict each other, the model does not exist, or it cannot draft
            for the target.
        ModelFileError: The model's files cannot be used.
    """
    method, model = settings.speculative_method, settings.speculative_model
    _check_acceptance(settings)
    if not model:
        if method == "draft_model":
            raise ConfigurationError("--speculative-method draft_model needs a --speculative-model")
        return None
    if method not in _METHODS:
        raise ConfigurationError(
            f"--speculative-model is {model}, but --speculative-method {method} does not use a model; set "
            f"--speculative-method to draft_model or auto"
        )
    try:
        draft = open_model(model, cache_dir)
    except ConfigurationError as error:
        raise type(error)(f"--speculative-model: {error}") from error
    try:
        check_draft(target, draft)
    except BaseException:
        draft.weights.close()
        raise
    return draft


def _check_acceptance(settings: WorkerSettings) -> None:
    if settings.speculative_acceptance != "rejection":
        return
    if settings.speculative_method == "off":
        raise ConfigurationError(
            "--speculative-acceptance rejection has no effect, because --speculative-method is off; choose a method or "
            "remove --speculative-acceptance"
        )
    if settings.deterministic:
        raise ConfigurationError(
            "--speculative-acceptance rejection and --deterministic exclude each other: with rejection, sampled text "
            "depends on which tokens were drafted, and so on the load; use --speculative-acceptance shared_noise"
        )


def check_draft(target: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigurationError, naming both models, if `draft` cannot draft for `target`."""
    names = f"{draft.default_name} cannot draft for {target.default_name}"
    groups = draft.spec.kv_groups
    if len(groups) > 1 or groups[0].window is not None:
        raise ConfigurationError(
            f"{names}: it has layers with a sliding window, which are not supported in a draft model"
        )
    target_vocabulary = _vocabulary(target)
    if draft.bundle.tokenizer_json != target.bundle.tokenizer_json:
        _check_vocabularies(names, target, draft, target_vocabulary, _vocabulary(draft))
    needed = min(max(target_vocabulary, default=-1) + 1, target.spec.vocab_size)
    if draft.spec.vocab_size < needed:
        raise ConfigurationError(
            f"{names}: it computes logits for {draft.spec.vocab_size} tokens, but the tokenizer of both has {needed}"
        )


def _check_vocabularies(
    names: str, target: ModelFiles, draft: ModelFiles, expected: dict[int, str], found: dict[int, str]
) -> None:
    different = [
        token_id for token_id in expected.keys() | found.keys() if expected.get(token_id) != found.get(token_id)
    ]
    if different:
        first = min(different)
        raise ConfigurationError(
            f"{names}: their tokenizers differ in {len(different)} tokens. Token {first} is "
            f"{_quote(found.get(first))} in {draft.default_name} and {_quote(expected.get(first))} in "
            f"{target.default_name}; a draft model needs the same ids for the same tokens"
        )


def _vocabulary(files: ModelFiles) -> dict[int, str]:
    """Return the token text by id, including added tokens. Placeholders of unused ids are omitted."""
    tokenizer: Tokenizer = parse_tokenizer(files.bundle.tokenizer_json, files.default_name)
    tokens = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    # GGUF files have placeholders with the id as a number, where folders in Hugging Face's format have no entry.
    return {token_id: text for token_id, text in tokens.items() if text != f"[PAD{token_id}]"}


def _quote(text: str | None) -> str:
    return "missing" if text is None else repr(text[:40])
