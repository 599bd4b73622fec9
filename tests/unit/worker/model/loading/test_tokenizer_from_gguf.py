"""Tokenizers converted from GGUF vocabularies give the ids of independent tokenizers."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.errors import ModelFileError
from tests.unit.worker.model.loading.forge import TINY_METADATA, tiny_gguf
from worker.model.loading import ModelFiles, default_model_path, open_model
from worker.model.loading.gguf_reader import GGUFFile
from worker.model.loading.tokenizer_from_gguf import convert_tokenizer, read_vocabulary

CORPUS = [
    "Hello world! Café déjà vu — 123 😊",
    "  two  spaces   three\n\n\nlines\t\ttabs \r\n",
    "中文字符测试，日本語テキスト 한국어 ไทย العربية",
    "12345 67 8 9.10  11   12",
    "½ ² Ⅷ ١٢٣ १२३",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<repo_name>x<file_sep> <| im_start |>",
    "it's don't I'LL we've They'd",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0nbsp\u3000ideographic",
    "def f(x):\n    return x ** 2  # square\n",
    "\x00\x01\x7f\u200b\ufeff",
    "a" * 300,
    " ",
    "",
]


def _split_digits(text: str, special: list[str]) -> list[str]:
    """Pieces of a text in which each character of category N stands alone; special tokens stay whole."""
    pieces = [""]
    position = 0
    while position < len(text):
        token = next((one for one in special if text.startswith(one, position)), None)
        if token or unicodedata.category(text[position]).startswith("N"):
            pieces += [token or text[position], ""]
        else:
            pieces[-1] += text[position]
        position += len(token or "x")
    return [piece for piece in pieces if piece]


@pytest.mark.filterwarnings("ignore")
def test_the_default_model_tokenizes_as_with_transformers(files: ModelFiles) -> None:
    from transformers import AutoTokenizer

    path = default_model_path()
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = Tokenizer.from_buffer(files.bundle.tokenizer_json)
    special = [token.content for token in ours.get_added_tokens_decoder().values()]
    for text in CORPUS:
        # transformers leaves the file's pre-tokenizer type out: this model's splits each digit off beforehand.
        pieces = _split_digits(text, special)
        expected = [token_id for piece in pieces for token_id in reference.encode(piece, add_special_tokens=False)]
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == expected, text
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.encode(text).ids == ids
    plain = [text for text in CORPUS if not any(unicodedata.category(one).startswith("N") for one in text)]
    assert len(plain) > 8
    for text in plain:
        assert ours.encode(text).ids == reference.encode(text), text


def test_control_tokens_are_special_and_the_vocabulary_is_whole(files: ModelFiles) -> None:
    tokenizer = Tokenizer.from_buffer(files.bundle.tokenizer_json)
    assert tokenizer.get_vocab_size() == files.spec.vocab_size == 49152
    added = tokenizer.get_added_tokens_decoder()
    assert len(added) == 17 and all(token.special for token in added.values())
    assert tokenizer.decode([1, 33, 2], skip_special_tokens=True) == "1"


def _converted(path: Path | None = None, *, absent: str = "", **changes: object) -> Tokenizer:
    """Return the tokenizer of a file, by default the default model's, with changes to the vocabulary's keys."""
    with GGUFFile(path or default_model_path()) as file:
        file.metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        file.metadata.pop(absent, None)
        return Tokenizer.from_buffer(convert_tokenizer(file, read_vocabulary(file)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_pre_tokenizers_split_as_those_of_transformers(pre: str) -> None:
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    ours = _converted(pre=pre)
    parts: dict[str, Any] = json.loads(ours.to_str())["model"]
    merges = [tuple(merge) for merge in parts["merges"]]
    kind = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
    reference = kind(vocab=parts["vocab"], merges=merges)
    for text in CORPUS:
        if "<" not in text:
            assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text), text


def test_llama3_splits_digits_by_threes_and_keeps_whole_tokens() -> None:
    tokenizer = _converted(pre="llama-bpe")
    assert tokenizer.pre_tokenizer is not None
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'LL pay 12345 now!\n\n  x")]
    assert pieces == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "Ġnow", "!ĊĊ", "Ġ", "Ġx"]
    assert json.loads(tokenizer.to_str())["model"]["ignore_merges"] is True
    # The type begins texts with the beginning-of-text token unless the file says otherwise.
    assert tokenizer.encode("hi").ids[0] != 1
    unsaid = _converted(pre="llama-bpe", absent="tokenizer.ggml.add_bos_token")
    assert unsaid.encode("hi").ids == [1, *unsaid.encode("hi", add_special_tokens=False).ids]


# ---- SentencePiece -------------------------------------------------------------------------------------------

PIECES = ["▁", *"helowrd", "he", "ll", "llo", "hello", "▁he", "▁hello", "▁w", "or", "ld", "▁world"]
PIECES += ["lo", "el", "ello", "▁▁", "wor", "orl", "世"]
SPM: dict[str, object] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *PIECES],
    "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(PIECES))],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def _spm_tokenizer(tmp_path: Path, **changes: object) -> tuple[Tokenizer, dict[str, int]]:
    path = tmp_path / "spm.gguf"
    path.write_bytes(tiny_gguf({**SPM, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}))
    tokenizer = _converted(path)
    return tokenizer, tokenizer.get_vocab()


def _sentencepiece_ids(text: str, vocab: dict[str, int], prefix: str = "▁") -> list[int]:
    """SentencePiece BPE as defined: merge the neighbours whose union scores best, leftmost first; then bytes."""
    scores = {piece: -float(i) for i, piece in enumerate(PIECES)}
    symbols = list((prefix + text).replace(" ", "▁"))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joined:
            break
        i = -max(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize(
    "text", ["hello world", "hello  world", " hello", "helloworld", "wordl é😊世", "ellohe llo", "o"]
)
def test_sentencepiece_vocabularies_merge_by_score_and_fall_back_to_bytes(tmp_path: Path, text: str) -> None:
    tokenizer, vocab = _spm_tokenizer(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == _sentencepiece_ids(text, vocab)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).ids == [1, *ids]


def test_a_piece_too_long_to_cut_up_is_refused_at_once(tmp_path: Path) -> None:
    tokens = [*SPM["tokenizer.ggml.tokens"][:-1], "h" * 1_000_000]  # type: ignore[index]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens contains a piece of 1000000 characters"):
        _spm_tokenizer(tmp_path, tokens=tokens)


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    tokenizer, vocab = _spm_tokenizer(tmp_path, add_space_prefix=False, add_bos_token=False)
    ids = tokenizer.encode("hello world").ids
    assert ids == _sentencepiece_ids("hello world", vocab, prefix="")
    assert ids[0] == vocab["hello"]
    assert tokenizer.decode(ids) == "hello world"


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_text_ends_with_the_end_token_where_the_file_says_so(tmp_path: Path, add_bos: bool) -> None:
    tokenizer, vocab = _spm_tokenizer(tmp_path, add_bos_token=add_bos, add_eos_token=True)
    ids = _sentencepiece_ids("hello world", vocab)
    assert tokenizer.encode("hello world").ids == [*([1] if add_bos else []), *ids, 2]
    assert tokenizer.encode("hello world", add_special_tokens=False).ids == ids
    if add_bos:
        byte_level = _converted(add_eos_token=True)
        assert byte_level.encode("hi").ids == [*byte_level.encode("hi", add_special_tokens=False).ids, 2]


# ---- refusals ------------------------------------------------------------------------------------------------

TWICE = [*TINY_METADATA["tokenizer.ggml.tokens"][:-1], "A"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is missing or not an array"),
        ({"tokenizer.ggml.tokens": TWICE}, "tokenizer.ggml.tokens holds 'A' twice"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["q x z"]}, "the tokenizer cannot be used"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type does not contain"),
        ({"tokenizer.ggml.eos_token_id": 1 << 20}, "tokenizer.ggml.eos_token_id is 1048576"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores does not contain"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3"),
        ({"tokenizer.chat_template": "x" * (1 << 20) + "x"}, "tokenizer.chat_template is longer"),
    ],
)
def test_vocabularies_that_cannot_be_used_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny_gguf(changes))
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path), tmp_path / "cache")
    assert message in str(caught.value) and str(caught.value).startswith("bad.gguf: ")
    assert not list((tmp_path / "cache").rglob("*.bin"))
