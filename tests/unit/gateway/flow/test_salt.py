"""Cache salts: different per key and per cache_salt, stable, with a private secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.flow.salt import Salts, load_or_create_secret
from shared.errors import ConfigurationError


def test_each_key_and_each_cache_salt_has_its_own() -> None:
    salts = Salts(b"secret", shared=False)
    derived = [
        *(salts.derive(key) for key in (b"key-1", b"key-2", b"")),
        *(salts.derive(*pair) for pair in ((b"key-1", "mine"), (b"key-2", "mine"), (b"key-1m", "ine"))),
        salts.derive(b"key-1", "\ud800"),
        Salts(b"other", shared=False).derive(b"key-1"),
    ]
    assert len(set(derived)) == len(derived)
    assert {len(salt) for salt in derived} == {32}
    assert salts.derive(b"key-1", "mine") == Salts(b"secret", shared=False).derive(b"key-1", "mine")
    assert salts.derive(b"key-1", "") == salts.derive(b"key-1")


def test_a_shared_cache_is_shared_unless_the_client_wants_its_own() -> None:
    salts = Salts(b"secret", shared=True)
    assert salts.derive(b"key-1") == salts.derive(b"key-2") == b""
    assert salts.derive(b"key-1", "x") == salts.derive(b"key-2", "x") != b""


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path)
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path) == secret
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # A secret that others could read, or that is truncated or elsewhere, is refused.
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0600"):
        load_or_create_secret(tmp_path)
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="32 bytes"):
        load_or_create_secret(tmp_path)
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(ConfigurationError):
        load_or_create_secret(tmp_path)
