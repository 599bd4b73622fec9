"""Chained SHA-256 of pages of token ids, used by the worker's prefix cache and by the gateway's routing.

        h_0 = SHA-256(salt_length as one byte || salt || page_0),  h_i = SHA-256(h_{i-1} || page_i)

A page is its token ids as little-endian uint32. The hash of a page thereby identifies everything before it, and
prompts with different salts share no hash. The parent of the first page is the empty byte string.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

ROOT = b""
"""Parent of a prompt's first page."""

_MAX_SALT_BYTES = 255


def next_page_hash(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
    """Return the hash of one full page.

    Args:
        parent: Hash of the previous page; ROOT for the first.
        token_ids: Ids of the page, each in [0, 2**32).
        salt: At most 255 bytes. Only the first page includes it; the others inherit it through `parent`.

    Returns:
        32 bytes.

    Raises:
        ValueError: The salt is too long.
        OverflowError: A token id is out of range.
    """
    if parent:
        return sha256(parent + _page_bytes(token_ids)).digest()
    if len(salt) > _MAX_SALT_BYTES:
        raise ValueError(f"salt has {len(salt)} bytes; at most {_MAX_SALT_BYTES} are allowed")
    return sha256(bytes([len(salt)]) + salt + _page_bytes(token_ids)).digest()


def page_hashes(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """Return the hashes of all full pages of token_ids, in order. A partial last page has none."""
    hashes: list[bytes] = []
    parent = ROOT
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        parent = next_page_hash(parent, token_ids[start : start + page_size], salt)
        hashes.append(parent)
    return hashes


def _page_bytes(token_ids: Sequence[int]) -> bytes:
    page = array("I", token_ids)
    if sys.byteorder == "big":
        page.byteswap()
    return page.tobytes()
