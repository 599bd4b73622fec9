"""Opening of a model in one GGUF file: specification, weights and text bundle."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from shared.messages import Bundle
from worker.model.loading.bundle import MAX_CHAT_TEMPLATE, cached_conversion, make_bundle, parse_tokenizer
from worker.model.loading.end_tokens import turn_end_ids, united
from worker.model.loading.fields import Fields
from worker.model.loading.gguf_model import read_gguf_model
from worker.model.loading.gguf_reader import GGUFFile, MetadataValue, StringArray
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.model_hash import model_hash
from worker.model.loading.tokenizer_from_gguf import CONVERTER_VERSION, Vocabulary, convert_tokenizer, read_vocabulary

_FORMAT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
"""Suffix of the file name.

`Name.Q4_1.gguf` and `Name-Q4_K_M.gguf` are formats of one model; clients use the model's name.
"""


def open_gguf(path: Path, cache_dir: Path) -> ModelFiles:
    """Open a GGUF file. Raises ModelFileError if it cannot be used."""
    file = GGUFFile(path)
    try:
        vocabulary = read_vocabulary(file)
        template = _gguf_template(file)
        eos = _gguf_eos(file, vocabulary, template)
        spec, weights = read_gguf_model(file, len(vocabulary.tokens), eos)
        bundle = _gguf_bundle(file, vocabulary, template, cache_dir)
        head = min((info.offset for info in file.tensors.values()), default=file.file_size)
        files = ModelFiles(
            spec=spec,
            weights=weights,
            bundle=bundle,
            eos_token_ids=eos,
            default_name=_FORMAT_SUFFIX.sub("", path.stem),
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
    added = {vocabulary.tokens[i]: i for i in (*vocabulary.special_ids, *vocabulary.user_defined_ids)}
    return united([i for i in declared if i is not None], turn_end_ids(template, added.get))


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
