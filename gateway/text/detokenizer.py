"""Exact and incremental conversion of token ids to text.

A table contains the bytes of each id. The text is the UTF-8 decoding of their concatenation. Each maximal ill-formed
subpart becomes U+FFFD (Unicode 16, section 3.9, as in the `tokenizers` library and in Python). A stream and a complete
decode therefore give the same text, at O(1) per token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

from shared.errors import ConfigurationError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Token that stands for one byte."""
_new_decoder = codecs.getincrementaldecoder("utf-8")

SPACE_MARK = "\u2581"
"""Character that SentencePiece vocabularies use for a space."""


class TokenBytes:
    """Bytes of each token id.

    Attributes:
        table: Bytes by id; empty for ids below the model's vocabulary size that the tokenizer lacks.
        special_ids: Ids that `skip_special_tokens` leaves out.
        strip_leading_space: A text that is decoded from its beginning loses one leading space, which such
            vocabularies prepend to every text.
    """

    def __init__(self, table: list[bytes], special_ids: frozenset[int], *, strip_leading_space: bool) -> None:
        self.table = table
        self.special_ids = special_ids
        self.strip_leading_space = strip_leading_space

    def __getitem__(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def join(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """Return the bytes of a sequence that starts a text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join([self[token_id] for token_id in token_ids if token_id not in skipped])
        return joined[1:] if self.strip_leading_space and joined.startswith(b" ") else joined


class Detokenizer:
    """Text of one growing sequence that continues a prompt. Holds back only incomplete code points.

    Args:
        token_bytes: Bytes of the vocabulary.
        skip_special_tokens: Leave special tokens out.
        shown_ids: Special ids that have text nevertheless.
    """

    __slots__ = ("_decoder", "_skipped", "_table")

    def __init__(
        self, token_bytes: TokenBytes, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._table = token_bytes.table
        special_ids = token_bytes.special_ids
        # The same set object for all sequences that show none of them, because some models have hundreds.
        hidden = special_ids - shown_ids if shown_ids else special_ids
        self._skipped = hidden if skip_special_tokens else frozenset()
        self._decoder = _new_decoder("replace")

    def push(self, token_id: int) -> str:
        """Return the text that one more token completes, which may be empty. Ids without a table entry have no text."""
        if token_id in self._skipped or token_id >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token_id])

    def finish(self) -> str:
        """Return U+FFFD if a code point is still incomplete, else nothing."""
        return self._decoder.decode(b"", True)

    def copy(self) -> Detokenizer:
        """Return an independent copy."""
        other = copy(self)
        other._decoder = _new_decoder("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other


def build_token_bytes(tokenizer_config: Mapping[str, Any], vocab: Mapping[str, int]) -> TokenBytes:
    """Build the table of a tokenizer.

    Args:
        tokenizer_config: Parsed tokenizer.json (its `model.vocab` is not read).
        vocab: Ids by token, including added tokens.

    Raises:
        ConfigurationError: The kind of the tokenizer's decoder is not supported; the message names it.
    """
    steps = list(_decoder_steps(tokenizer_config.get("decoder")))
    kinds = {step["type"] for step in steps}
    byte_level = "ByteLevel" in kinds
    marks = [step for step in steps if step["type"] in ("Metaspace", "Replace")]
    replacements = [_replacement(step) for step in marks]
    byte_fallback = "ByteFallback" in kinds
    by_char = _bytes_by_char() if byte_level else {}
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if byte_level:
            table[token_id] = _byte_level_bytes(token, by_char)
        elif byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            table[token_id] = bytes.fromhex(found[1])
        else:
            for old, new in replacements:
                token = token.replace(old, new)
            table[token_id] = token.encode("utf-8", "replace")
    added = tokenizer_config.get("added_tokens") or []
    special_ids = frozenset(entry["id"] for entry in added if entry.get("special"))
    return TokenBytes(table, special_ids, strip_leading_space=any(map(_strips_leading_space, steps)))


def _decoder_steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        raise ConfigurationError("the tokenizer has no decoder; ByteLevel, ByteFallback and Metaspace are supported")
    kind = decoder.get("type")
    if kind == "Sequence":
        for step in decoder.get("decoders", []):
            yield from _decoder_steps(step)
    elif kind in ("ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip", "Replace"):
        yield decoder
    else:
        raise ConfigurationError(
            f"the tokenizer's decoder {kind!r} is not supported; ByteLevel, ByteFallback and Metaspace are"
        )


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step.get("replacement", SPACE_MARK), " "
    pattern = step.get("pattern", {})
    if "String" not in pattern:
        raise ConfigurationError("the tokenizer's decoder replaces a regular expression, which is not supported")
    return pattern["String"], step.get("content", "")


def _strips_leading_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)


def _byte_level_bytes(token: str, by_char: Mapping[str, int]) -> bytes:
    """Return the bytes of a byte-level token.

    A token with a character outside the byte alphabet (an added one) is plain text.
    """
    try:
        return bytes([by_char[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _bytes_by_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (Radford et al. 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
