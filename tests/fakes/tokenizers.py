"""Small generated tokenizers as text bundles."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.messages import Bundle

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop, sign: beta gamma",
    "Grüße 你好 🛑 naïve café",
    "user system",
]


@cache
def byte_level_json() -> bytes:
    """Return a byte-level BPE of about 400 tokens; <|endoftext|> is 0, <|im_start|> 1, <|im_end|> 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer.to_str().encode()


@cache
def byte_fallback_json() -> bytes:
    """Return a BPE with byte fallback and U+2581 for spaces, as SentencePiece builds them."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "\u2581abcdefghijklmnopqrstuvwxyz.,":
        vocab[char] = len(vocab)
    merges = [("\u2581", "h"), ("l", "l"), ("\u2581h", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer.to_str().encode()


@cache
def characters_json() -> bytes:
    """Return a tokenizer with one token per printable character except ` and ~, 96 in all; </s> is 2, the space 3."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u0120": 3}
    for code in range(33, 127):
        if chr(code) not in "`~":
            vocab[chr(code)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


def make_bundle(tokenizer_json: bytes | None = None, chat_template: str | None = CHATML, **changes: Any) -> Bundle:
    """Return a bundle with a tokenizer (byte_level_json by default)."""
    tokenizer_json = byte_level_json() if tokenizer_json is None else tokenizer_json
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    fields: dict[str, Any] = {"special_tokens": names, "add_bos_token": False, **changes}
    digest = hashlib.sha256(tokenizer_json + json.dumps([chat_template, fields], sort_keys=True).encode())
    return Bundle(bundle_hash=digest.hexdigest(), tokenizer_json=tokenizer_json, chat_template=chat_template, **fields)
