"""Page hashes: fixed vectors, chaining, salt."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.block_hash import ROOT, next_page_hash, page_hashes


def test_vectors():
    # Computed by the formula in the module's docstring, independently of the code.
    first = hashlib.sha256(b"\x00" + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**31 - 1)).digest()
    assert page_hashes([1, 2, 3, 2**31 - 1, 9], 2, b"") == [first, second]
    salted = hashlib.sha256(b"\x04salt" + struct.pack("<2I", 1, 2)).digest()
    assert page_hashes([1, 2], 2, b"salt") == [salted]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 20), st.binary(max_size=64))
def test_incremental_form_gives_the_same(token_ids, page_size, salt):
    hashes = page_hashes(token_ids, page_size, salt)
    assert len(hashes) == len(token_ids) // page_size
    parent = ROOT
    for i, expected in enumerate(hashes):
        parent = next_page_hash(parent, token_ids[i * page_size : (i + 1) * page_size], salt)
        assert parent == expected


@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=64), st.data())
def test_a_changed_token_changes_every_hash_from_its_page_on(token_ids, data):
    position = data.draw(st.integers(0, len(token_ids) // 8 * 8 - 1))
    changed = list(token_ids)
    changed[position] ^= 1
    before, after = page_hashes(token_ids, 8, b"s"), page_hashes(changed, 8, b"s")
    page = position // 8
    assert before[:page] == after[:page]
    assert all(a != b for a, b in zip(before[page:], after[page:], strict=True))


def test_salts_never_share_a_hash():
    pages = [set(page_hashes(list(range(64)), 16, salt)) for salt in (b"", b"a", b"ab", b"\x00", b"\x01a")]
    assert sum(len(page) for page in pages) == len(set().union(*pages))
    # The length prefix distinguishes 4 bytes of salt from one more token.
    assert page_hashes([2, 3], 2, struct.pack("<I", 1)) != page_hashes([1, 2, 3], 3, b"")


def test_bad_input_is_refused():
    for token_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            page_hashes([token_id], 1, b"")
    with pytest.raises(ValueError, match="salt has 256 bytes"):
        page_hashes([1], 1, b"x" * 256)
