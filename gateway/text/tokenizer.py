"""Tokenization with the `tokenizers` library. Synchronous: pipeline.py calls it in threads."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.text.detokenizer import TokenBytes, build_token_bytes
from shared.errors import ConfigurationError, ContextLengthError, PayloadTooLargeError
from shared.messages import Bundle

MAX_TEXT_BYTES = 16_777_216
_LONG_TEXT_BYTES = 2_097_152
_LONG_TOKEN_BYTES = 16
"""Maximum number of bytes per token, and of a text with few tokens.

Tokenizing takes 200 times the memory of a text, and seconds per few million bytes, during which other long texts wait.
"""
_SCAN_WINDOW = 65_536
"""Characters that one call of `re` may scan. Between calls other threads can take the interpreter lock."""


class TextTokenizer:
    """Tokenizer of one model.

    User text in a conversation must not become control tokens (CVE-2026-44222). `guard` inserts a mark after the first
    character of every occurrence of a special token's text, and after the whole text. The mark is an added token of
    this tokenizer, so it splits the text there, and its id is removed from the result. Text without special tokens is
    unchanged and keeps its ids.

    Attributes:
        added_ids: Id by text of each added token.

    Raises:
        ConfigurationError: tokenizer.json is malformed or of an unsupported kind.
    """

    def __init__(self, bundle: Bundle) -> None:
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
            config: dict[str, Any] = json.loads(bundle.tokenizer_json)
        except Exception as error:
            raise ConfigurationError(f"the tokenizer cannot be parsed: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.token_bytes: TokenBytes = build_token_bytes(config, vocab)
        added = config.get("added_tokens") or []
        self.added_ids: dict[str, int] = {entry["content"]: entry["id"] for entry in added}
        self._bos_id = vocab.get(bundle.special_tokens.get("bos_token", ""))
        self._add_bos_token = bundle.add_bos_token
        special_texts = {entry["content"] for entry in added if entry.get("special")}
        special_texts |= set(bundle.special_tokens.values()) & vocab.keys()
        self._special = _trie_pattern(text for text in special_texts if len(text) > 1 and not text.isspace())
        self._max_special_length = max(map(len, special_texts), default=0)
        # Private use characters, drawn anew in each process, so that text contains the mark only by chance.
        self._mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(2))
        self._tokenizer.add_tokens([AddedToken(self._mark, normalized=False, special=False)])
        self._mark_id = self._tokenizer.token_to_id(self._mark)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a plain prompt. Text of special tokens becomes special tokens.

        The beginning-of-text id is prepended once if the model declares that it wants one.
        """
        ids = self._encode(self.unguard(text), add_special_tokens)
        if not add_special_tokens or self._bos_id is None:
            return ids
        if self._add_bos_token and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        if ids[:2] == [self._bos_id, self._bos_id]:
            del ids[0]
        return ids

    def encode_guarded(self, text: str) -> list[int]:
        """Tokenize a rendered conversation, which contains its own special tokens and guarded text of users."""
        ids = self._encode(text, False)
        if self._mark not in text:
            return ids
        mark_id = self._mark_id
        return [token_id for token_id in ids if token_id != mark_id]

    def check_size(self, text: str, max_tokens: int | None, param: str) -> None:
        """Check the length before time is spent on a text that cannot fit."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if max_tokens is not None and size > (allowed := max(_LONG_TEXT_BYTES, _LONG_TOKEN_BYTES * max_tokens)):
            raise ContextLengthError(
                f"the prompt is too long: it has {size} bytes; at most {allowed} are tokenized "
                f"because the maximum context length is {max_tokens} tokens",
                param=param,
            )
        if size > MAX_TEXT_BYTES:
            raise PayloadTooLargeError(
                f"the text has {size} bytes; at most {MAX_TEXT_BYTES} are tokenized", param=param
            )

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return None if found == self._mark_id else found

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Lone surrogates, which JSON can express, have no UTF-8 encoding, and the library would refuse the text.
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        # Only the batch methods release the interpreter lock. The fast one computes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def unguard(self, text: str) -> str:
        """Remove the marks from a text."""
        return text.replace(self._mark, "")

    def guard(self, value: Any) -> Any:
        """Return a copy of a JSON value in which no string or key contains the text of a special token."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, Mapping):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.guard(item) for item in value]
        return value

    def _guard_text(self, text: str) -> str:
        pieces: list[str] = []
        copied = 0
        for start, end in self._find_special(text):
            pieces.append(text[copied:start])
            pieces.append(self._broken(text[start:end]))
            copied = end
        if not pieces:
            return text
        pieces.append(text[copied:])
        return "".join(pieces)

    def _broken(self, special: str) -> str:
        """Return a special token's text with marks, so that no special token remains in it or across its end.

        A token across its beginning would have been found first.
        """
        tail = special[1:]
        if self._special is not None and self._special.search(tail):
            tail = self._mark.join(tail)
        return special[0] + self._mark + tail + self._mark

    def _find_special(self, text: str) -> Iterator[tuple[int, int]]:
        if self._special is None:
            return
        position = 0
        while position < len(text):
            window = position + _SCAN_WINDOW
            match = self._special.search(text, position, window + self._max_special_length)
            if match is not None:
                yield match.span()
                position = match.end()
            else:
                position = window


def _trie_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for the longest of the texts at a position.

    Its time is bounded by the length of the texts, not by their number.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_trie_source(root)) if root else None


def _trie_source(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        char, node = next(iter(node.items()))
        prefix += re.escape(char)
    branches = [re.escape(char) + _trie_source(child) for char, child in sorted(node.items()) if char]
    if not branches:
        return prefix
    # An optional tail is tried first, so the longest text wins.
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
