"""Text side of a folder in Hugging Face's format: tokenizer, chat template, special tokens."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.errors import ModelFileError
from shared.messages import Bundle
from worker.model.loading.bundle import MAX_CHAT_TEMPLATE, cached_conversion, make_bundle, parse_tokenizer, turn_end_ids
from worker.model.loading.fields import Fields, read_bounded, read_json_object

_MAX_TOKENIZER = 1 << 28
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Files that transformers may read when it converts a tokenizer.
_TOKENIZER_FILES = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
)


def read_text_side(folder: Path, cache_dir: Path) -> tuple[Bundle, list[int]]:
    """Return the bundle, and the end-of-text ids from tokenizer_config.json and the chat template.

    Raises:
        ModelFileError: A file is missing, malformed or too large.
    """
    config = _optional_json(folder / "tokenizer_config.json")
    tokenizer_json = _tokenizer_json(folder, cache_dir)
    tokenizer = parse_tokenizer(tokenizer_json, "tokenizer.json")
    special = _special_tokens(config, _optional_json(folder / "special_tokens_map.json"))
    template = _chat_template(folder, config)
    bundle = make_bundle(tokenizer_json, template, special, _adds_bos(tokenizer, special.get("bos_token")))
    return bundle, _end_ids(tokenizer, special.get("eos_token"), template)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _tokenizer_json(folder: Path, cache_dir: Path) -> bytes:
    path = folder / "tokenizer.json"
    if path.exists():
        return read_bounded(path, _MAX_TOKENIZER)
    digest = hashlib.sha256(f"transformers {version('transformers')}".encode())
    for name in _TOKENIZER_FILES:
        if (folder / name).exists():
            digest.update(name.encode() + hashlib.sha256(read_bounded(folder / name, _MAX_TOKENIZER)).digest())
    return cached_conversion(cache_dir, digest.hexdigest(), lambda: _convert(folder))


def _convert(folder: Path) -> bytes:
    """Create tokenizer.json with transformers.

    The import takes seconds and most folders do not need it, so it is here.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # noqa: BLE001 - anything may go wrong in there, and only the reason matters
        reason = str(error).replace(str(folder), folder.name).split("\n")[0][:200]
        raise ModelFileError(
            f"tokenizer.json is missing and cannot be created from the other files: {reason}"
        ) from None
    converted: str = backend.to_str()
    return converted.encode()


def _text(value: object) -> str | None:
    """Return a token's text, which may be a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    special = {}
    for name in _SPECIAL_TOKENS:
        text = _text(config[name] if name in config else token_map.get(name))
        if text is not None:
            special[name] = text
    return special


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template. A file of its own takes precedence over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, MAX_CHAT_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise ModelFileError("chat_template.jinja is not valid UTF-8") from None
    source = "tokenizer_config.json"
    template = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        source = "chat_template.json"
        template = read_json_object(folder / source).get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is None:
        return None
    text = Fields({"chat_template": template}, f"{source}: ").text("chat_template")
    if len(text) > MAX_CHAT_TEMPLATE:
        raise ModelFileError(f"{source}: chat_template is longer than {MAX_CHAT_TEMPLATE} characters")
    return text


def _adds_bos(tokenizer: Tokenizer, bos: str | None) -> bool:
    """Return True if the tokenizer itself prepends the beginning-of-text token to a plain text."""
    if bos is None or (bos_id := tokenizer.token_to_id(bos)) is None:
        return False
    return tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _end_ids(tokenizer: Tokenizer, eos: str | None, template: str | None) -> list[int]:
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    ids = turn_end_ids(template, added.get)
    eos_id = tokenizer.token_to_id(eos) if eos is not None else None
    return ids if eos_id is None else [*ids, eos_id]
