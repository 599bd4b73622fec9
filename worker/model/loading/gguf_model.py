"""Model in one GGUF file: specification from its metadata, weights by canonical name, and text bundle."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.errors import ModelFileError
from shared.messages import Bundle
from worker.kv.geometry import KVGroupSpec
from worker.model.families import BY_GGUF_ARCHITECTURE, Family, gguf_names
from worker.model.loading import bundle, checks
from worker.model.loading.fields import Fields
from worker.model.loading.gguf_reader import GGUFFile, MetadataValue, StringArray, TensorInfo
from worker.model.loading.model_files import FileWeights, ModelFiles, StoredWeight, model_hash
from worker.model.loading.tokenizer_from_gguf import CONVERTER_VERSION, Vocabulary, convert_tokenizer, read_vocabulary
from worker.model.spec import DecoderSpec, RopeSpec
from worker.quant.gguf_formats import PLAIN_DTYPES
from worker.quant.raw_weight import RawWeight, bounds, slice_columns

_FORMAT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
"""Suffix of the file name.

`Name.Q4_1.gguf` and `Name-Q4_K_M.gguf` are formats of one model; clients use the model's name.
"""
_ROPE_FREQUENCIES = "rope_freqs.weight"
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"


def open_gguf(path: Path, cache_dir: Path) -> ModelFiles:
    """Open a GGUF file. Raises ModelFileError if it cannot be used."""
    file = GGUFFile(path)
    try:
        vocabulary = read_vocabulary(file)
        template = _gguf_template(file)
        eos = _gguf_eos(file, vocabulary, template)
        spec, weights = read_gguf_model(file, len(vocabulary.tokens), eos)
        head = min((info.offset for info in file.tensors.values()), default=file.file_size)
        files = ModelFiles(
            spec=spec,
            weights=weights,
            bundle=_gguf_bundle(file, vocabulary, template, cache_dir),
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
    if len(template) > bundle.MAX_CHAT_TEMPLATE:
        raise fields.error("tokenizer.chat_template", f"is longer than {bundle.MAX_CHAT_TEMPLATE} characters")
    return template


def _gguf_eos(file: GGUFFile, vocabulary: Vocabulary, template: str | None) -> tuple[int, ...]:
    fields = Fields(file.metadata, f"{file.name}: ")
    top = len(vocabulary.tokens) - 1
    declared = [fields.optional_integer(f"tokenizer.ggml.{name}_token_id", high=top) for name in ("eos", "eot", "eom")]
    added = {vocabulary.tokens[i]: i for i in (*vocabulary.special_ids, *vocabulary.user_defined_ids)}
    return bundle.united([i for i in declared if i is not None], bundle.turn_end_ids(template, added.get))


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
        bundle.parse_tokenizer(converted, file.name)
        return converted

    tokenizer_json = bundle.cached_conversion(cache_dir, digest.hexdigest(), convert)
    fields = Fields(file.metadata, f"{file.name}: ")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {}
    for key, name in names.items():
        token_id = fields.optional_integer(f"tokenizer.ggml.{key}_token_id", high=len(vocabulary.tokens) - 1)
        if token_id is not None:
            special[name] = vocabulary.tokens[token_id]
    return bundle.make_bundle(tokenizer_json, template, special, vocabulary.add_bos_token)


def read_rows(file: GGUFFile, info: TensorInfo, rows: slice | None) -> RawWeight:
    """Read rows of a tensor; only their bytes are read."""
    start, stop = bounds(rows, info.shape[0])
    bytes_per_row = info.num_bytes // info.shape[0]
    raw = torch.from_numpy(file.read(info, start * bytes_per_row, (stop - start) * bytes_per_row))
    shape = (stop - start, *info.shape[1:])
    if info.format in PLAIN_DTYPES:
        return RawWeight(info.format, shape, raw.view(PLAIN_DTYPES[info.format]).reshape(shape))
    if len(shape) != 2:
        raise ModelFileError(f"{file.name}: tensor {info.name} is quantized and has {len(shape)} dimensions, not 2")
    return RawWeight(info.format, shape, raw.reshape(stop - start, bytes_per_row))


def read_gguf_model(file: GGUFFile, num_tokens: int, eos_token_ids: tuple[int, ...]) -> tuple[DecoderSpec, FileWeights]:
    """Return specification and weights.

    Args:
        file: The open file.
        num_tokens: Number of tokens of the file's vocabulary; the embedding may be padded beyond it.
        eos_token_ids: Ids that end a text.

    Raises:
        ModelFileError: The architecture is not supported, a key is missing or invalid, or a tensor is missing or
            misshapen.
    """
    metadata: dict[str, Any] = file.metadata
    general = Fields(metadata, f"{file.name}: ")
    if general.integer("split.count", 1) > 1:
        raise general.error("split.count", "is more than 1; merge the parts into one file first")
    family = BY_GGUF_ARCHITECTURE[general.choice("general.architecture", BY_GGUF_ARCHITECTURE)]
    spec = _spec(family, file, general, num_tokens, eos_token_ids)
    names = gguf_names(spec.num_layers)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    needed = checks.check_tensors(spec, names, shapes, lambda name: name == _ROPE_FREQUENCIES, file.name)
    weights = {canonical: _weight(file, file.tensors[name]) for canonical, name in needed.items()}
    return spec, FileWeights(weights, file.close)


def _weight(file: GGUFFile, info: TensorInfo) -> StoredWeight:
    return StoredWeight(shape=info.shape, read=lambda rows, cols: slice_columns(read_rows(file, info, rows), cols))


def _spec(
    family: Family, file: GGUFFile, general: Fields, num_tokens: int, eos_token_ids: tuple[int, ...]
) -> DecoderSpec:
    prefix = f"{family.gguf_architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.name}: {prefix}")
    if fields.integer("expert_count", 0):
        raise fields.error("expert_count", "is set; mixtures of experts are not supported")
    num_layers = fields.integer("block_count", low=1, high=checks.MAX_LAYERS)
    hidden = fields.integer("embedding_length", low=1, high=checks.MAX_HIDDEN)
    num_heads = fields.integer("attention.head_count", low=1, high=checks.MAX_HEADS)
    head_dim = fields.integer("attention.key_length", hidden // num_heads, low=1, high=checks.MAX_HEAD_DIM)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"differs from the key length {head_dim}")
    max_position = fields.integer("context_length", low=1, high=checks.MAX_POSITION)
    window = fields.optional_integer("attention.sliding_window", low=0, high=checks.MAX_POSITION)
    groups = (KVGroupSpec(layers=tuple(range(num_layers)), window=window),) if window else ()
    spec = DecoderSpec(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", low=1, high=checks.MAX_HIDDEN * 16),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads, low=1, high=num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", num_tokens, low=num_tokens, high=checks.MAX_VOCAB),
        max_position=max_position,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        rope=_rope(fields, file, head_dim, max_position, family.gguf_interleaved),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=family.qk_norm,
        attention_scale=fields.optional_number("attention.scale"),
        kv_groups=groups,
        eos_token_ids=eos_token_ids,
        bos_token_id=general.optional_integer("tokenizer.ggml.bos_token_id"),
    )
    checks.check_spec(spec, file.name)
    return spec


def _rope(fields: Fields, file: GGUFFile, head_dim: int, max_position: int, interleaved: bool) -> RopeSpec:
    """Return the rope of a GGUF file. Its llama3 scaling is a tensor of factors that divide the frequencies."""
    rope = RopeSpec(
        theta=fields.number("rope.freq_base", 10000.0, high=1e15),
        rotary_dim=fields.integer("rope.dimension_count", head_dim, low=2, high=checks.MAX_HEAD_DIM),
        interleaved=interleaved,
        frequency_factors=_frequency_factors(file),
    )
    default = "linear" if "rope.scale_linear" in fields else "none"
    kind = fields.choice("rope.scaling.type", ("none", "linear", "yarn"), default)
    if kind == "none":
        return rope
    legacy = fields.number("rope.scale_linear", 1.0, high=1e6)
    factor = fields.number("rope.scaling.factor", legacy, high=1e6)
    if kind == "linear":
        return replace(rope, kind="linear", factor=factor)
    attention = fields.optional_number("rope.scaling.attn_factor", high=1e6)
    if attention is not None:
        # In GGUF this multiplies YaRN's own temperature; in RopeSpec, as in config.json, it replaces it.
        attention *= 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_max_position=fields.integer(_ORIGINAL_CONTEXT, max_position, low=1, high=checks.MAX_POSITION),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
        attention_factor=attention,
    )


def _frequency_factors(file: GGUFFile) -> tuple[float, ...]:
    info = file.tensors.get(_ROPE_FREQUENCIES)
    if info is None:
        return ()
    if info.format != "f32" or len(info.shape) != 1 or info.shape[0] > checks.MAX_HEAD_DIM:
        raise ModelFileError(f"{file.name}: tensor {info.name} is not a short vector of type F32")
    return tuple(float(factor) for factor in file.read(info).view(np.float32))
