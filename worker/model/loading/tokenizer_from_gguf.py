"""Conversion of the vocabulary in a GGUF file to tokenizer.json (the format of the `tokenizers` library).

The text is composed directly. The library parses it once, and no tokenizer objects are created on the way.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import ModelFileError
from worker.model.loading.fields import Fields
from worker.model.loading.gguf_reader import GGUFFile, StringArray

# Increase when the conversion changes, so that cached results of the old one are not used.
CONVERTER_VERSION = 1

_CONTROL, _USER_DEFINED = 3, 4

# Every way to cut a SentencePiece piece in two is tried, so its length is bounded; real pieces have some tens of
# characters.
_MAX_PIECE = 512

# Splitting rules of each pre-tokenizer type, as in the tokenizer.json files of the model cards.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    split: str | None = None
    digits: bool = False
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(digits=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, normalizer="NFC")
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a GGUF file.

    Attributes:
        tokens: Tokens by id, as in the file.
        types: Types by id, as in the file.
        special_ids: Ids of control tokens.
        bos_token_id: Beginning-of-text id; None if the file declares none.
        eos_token_id: End-of-text id; None if the file declares none.
        add_bos_token: A plain text begins with bos_token_id.
        add_eos_token: A plain text ends with eos_token_id. Embedding models end theirs so: the state of that token
            is the vector.
    """

    tokens: StringArray
    special_ids: list[int]
    user_defined_ids: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos_token: bool
    add_eos_token: bool


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Read and check the vocabulary. Raises ModelFileError if it is missing or inconsistent."""
    fields = Fields(file.metadata, f"{file.name}: ")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not len(tokens):
        raise fields.error("tokenizer.ggml.tokens", "is missing or not an array of strings")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.ones(len(tokens), dtype=np.int32)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"does not contain {len(tokens)} numbers, one per token")
    model = fields.text("tokenizer.ggml.model")
    default_bos = model == "llama" or (model == "gpt2" and _pre_tokenizer(fields).add_bos)
    bos = fields.optional_integer("tokenizer.ggml.bos_token_id", high=len(tokens) - 1)
    eos = fields.optional_integer("tokenizer.ggml.eos_token_id", high=len(tokens) - 1)
    return Vocabulary(
        tokens=tokens,
        special_ids=[int(i) for i in np.flatnonzero(types == _CONTROL)],
        user_defined_ids=[int(i) for i in np.flatnonzero(types == _USER_DEFINED)],
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos_token=bos is not None and fields.boolean("tokenizer.ggml.add_bos_token", default_bos),
        add_eos_token=eos is not None and fields.boolean("tokenizer.ggml.add_eos_token", False),
    )


def convert_tokenizer(file: GGUFFile, vocabulary: Vocabulary) -> bytes:
    """Return tokenizer.json for the vocabulary.

    Raises:
        ModelFileError: The kind of tokenizer, or its splitting rule, is unknown. A guess would give other tokens
            than the model was trained on, unnoticed.
    """
    fields = Fields(file.metadata, f"{file.name}: ")
    converters = {"gpt2": _byte_level, "llama": _sentencepiece}
    parts = converters[fields.choice("tokenizer.ggml.model", converters)](file, fields, vocabulary)
    tokens = vocabulary.tokens
    special = set(vocabulary.special_ids)
    parts["version"] = "1.0"
    parts["added_tokens"] = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": i in special,
        }
        for i in sorted([*vocabulary.special_ids, *vocabulary.user_defined_ids])
    ]  # fmt: skip
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()


def _vocab(file: GGUFFile, vocabulary: Vocabulary) -> dict[str, int]:
    listed = vocabulary.tokens.to_list()
    vocab = {token: i for i, token in enumerate(listed)}
    if len(vocab) != len(listed):
        double = Counter(listed).most_common(1)[0][0]
        raise ModelFileError(f"{file.name}: tokenizer.ggml.tokens holds {double!r} twice")
    return vocab


def _pre_tokenizer(fields: Fields) -> _PreTokenizer:
    return _PRE_TOKENIZERS[fields.choice("tokenizer.ggml.pre", _PRE_TOKENIZERS)]


def _template(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return a post-processor that adds the tokens which the model expects around a text; None if it expects none."""
    begin = [vocabulary.bos_token_id] if vocabulary.add_bos_token else []
    end = [vocabulary.eos_token_id] if vocabulary.add_eos_token else []
    texts = {token_id: vocabulary.tokens[token_id] for token_id in (*begin, *end) if token_id is not None}
    if not texts:
        return None
    before, after = (
        [{"SpecialToken": {"id": texts[token_id], "type_id": 0}} for token_id in ids if token_id is not None]
        for ids in (begin, end)
    )
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, second, *after],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]} for token_id, text in texts.items()},
    }


def _byte_level(file: GGUFFile, fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """Convert byte-level BPE as of GPT-2: every byte has a printable stand-in, so nothing is unknown."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, StringArray):
        raise fields.error("tokenizer.ggml.merges", "is missing or not an array of strings")
    pre = _pre_tokenizer(fields)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.split is None}
    steps: list[dict[str, Any]] = [byte_level]
    if pre.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if pre.split is not None:
        pattern = {"Regex": pre.split}
        steps.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    post: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "normalizer": {"type": pre.normalizer} if pre.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _template(vocabulary) or post,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": _vocab(file, vocabulary),
            "merges": merges.to_list(),
        },
    }


def _sentencepiece(file: GGUFFile, fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """Convert SentencePiece BPE with byte fallback: the score of a piece ranks the merges that form it."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise fields.error("tokenizer.ggml.scores", f"does not contain {len(vocabulary.tokens)} numbers, one per token")
    vocab = _vocab(file, vocabulary)
    longest = max(map(len, vocab))
    if longest > _MAX_PIECE:
        raise fields.error(
            "tokenizer.ggml.tokens", f"contains a piece of {longest} characters; at most {_MAX_PIECE} are allowed"
        )
    unknown = fields.optional_integer("tokenizer.ggml.unknown_token_id", high=len(vocab) - 1)
    prefix = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replace]},
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges_by_score(vocab, scores.tolist()),
        },
    }


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every way to form a piece from two others, best piece first; among equals, longer parts first."""
    merges = []
    for piece, i in vocab.items():
        ways = []
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ways.append((left, right, cut))
        for _, _, cut in sorted(ways):
            merges.append((scores[i], cut, len(piece) - cut, piece[:cut], piece[cut:]))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in merges]
