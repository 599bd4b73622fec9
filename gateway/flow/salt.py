"""Salts of the prefix cache.

Requests with another key or another cache_salt share no cached pages, so that nobody can learn by timing what others
have asked (CVE-2025-46570).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from shared.errors import ConfigurationError

_SECRET_FILE = "cache-secret"
_SECRET_BYTES = 32
_SALT_BYTES = 32


class Salts:
    """Derivation of salts. They are equal in every gateway with the same secret, and after a restart.

    Args:
        secret: The setting `cache_secret`, or the result of `load_or_create_secret`.
        shared: All keys share one cache (`shared_prefix_cache`).
    """

    def __init__(self, secret: bytes, *, shared: bool) -> None:
        self._secret = secret
        self._shared = shared

    def derive(self, key_hash: bytes, cache_salt: str | None = None) -> bytes:
        """Return the salt of a request, 32 bytes, or no bytes if the cache is shared and the client sent no salt.

        Args:
            key_hash: Hash of the API key; empty on an open server.
            cache_salt: The client's own salt, which separates its requests further.
        """
        if self._shared and not cache_salt:
            return b""
        owner = b"" if self._shared else key_hash
        # Length prefixes ensure that no two pairs give the same message.
        message = len(owner).to_bytes(4, "little") + owner + (cache_salt or "").encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256")[:_SALT_BYTES]


def load_or_create_secret(directory: Path) -> bytes:
    """Return the secret of this runtime directory. The first process creates it, in a file with mode 0600.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    path = directory / _SECRET_FILE
    try:
        if not path.exists():
            _make(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigurationError(f"{path} must belong to this user alone (mode 0600)")
            secret = file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be used: {error.strerror}") from error
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(f"{path} must have {_SECRET_BYTES} bytes; remove it, and a new one is created")
    return secret


def _make(path: Path) -> None:
    """Create the secret atomically.

    It is written to a temporary file and linked into place: no process reads an incomplete file, and the first of
    several processes wins.
    """
    aside = path.with_name(f"{_SECRET_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.unlink(aside)
