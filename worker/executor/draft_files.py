"""Which model drafts, and whether it can draft for the one that is served."""

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
    """The draft model that the settings name; None where there is none.

    Raises:
        ConfigurationError: method and model do not go together, there is no such model, or it cannot draft for the
            target.
        ModelFileError: the model cannot be used.
    """
    method, model = settings.speculative_method, settings.speculative_model
    _check_acceptance(settings)
    if not model:
        if method == "draft_model":
            raise ConfigurationError("speculative-method draft_model needs a speculative-model")
        return None
    if method not in _METHODS:
        raise ConfigurationError(
            f"speculative-model is {model}, but speculative-method {method} uses none: set it to draft_model or auto"
        )
    try:
        draft = open_model(model, cache_dir)
    except ConfigurationError as error:
        raise type(error)(f"speculative-model: {error}") from error
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
            "speculative-acceptance rejection has no use where speculative-method is off: nothing is drafted"
        )
    if settings.deterministic:
        raise ConfigurationError(
            "speculative-acceptance rejection and deterministic exclude each other: with rejection a sampled text "
            "depends on which of its tokens were drafted, and so on the load; shared_noise does not"
        )


def check_draft(target: ModelFiles, draft: ModelFiles) -> None:
    """Raises ConfigurationError, which names both models, where one cannot draft for the other."""
    names = f"{draft.default_name} cannot draft for {target.default_name}"
    groups = draft.spec.kv_groups
    if len(groups) > 1 or groups[0].window is not None:
        raise ConfigurationError(f"{names}: it has layers with a sliding window, and a draft model must have none")
    if draft.bundle.tokenizer_json == target.bundle.tokenizer_json:
        num_tokens = _num_tokens(_vocabulary(target))
    else:
        theirs, ours = _vocabulary(target), _vocabulary(draft)
        num_tokens = _num_tokens(theirs)
        different = [token_id for token_id in theirs.keys() | ours.keys() if theirs.get(token_id) != ours.get(token_id)]
        if different:
            first = min(different)
            raise ConfigurationError(
                f"{names}: their tokenizers differ in {len(different)} tokens. Token {first} is "
                f"{_shown(ours.get(first))} in {draft.default_name} and {_shown(theirs.get(first))} in "
                f"{target.default_name}; a draft model needs the same ids for the same tokens"
            )
    wanted = min(num_tokens, target.spec.vocab_size)
    if draft.spec.vocab_size < wanted:
        raise ConfigurationError(
            f"{names}: it computes {draft.spec.vocab_size} tokens, and the tokenizer of both has {wanted}"
        )


def _vocabulary(files: ModelFiles) -> dict[int, str]:
    """Text by id, added tokens included. What files put in for ids that no token has is left out."""
    tokenizer: Tokenizer = parse_tokenizer(files.bundle.tokenizer_json, files.default_name)
    found = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    # GGUF files name such ids by their number, where folders in Hugging Face's format have nothing.
    return {token_id: text for token_id, text in found.items() if text != f"[PAD{token_id}]"}


def _num_tokens(vocabulary: dict[int, str]) -> int:
    return max(vocabulary, default=-1) + 1


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(text[:40])
