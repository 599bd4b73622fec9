"""`encrypted_content` of reasoning items: a model's reasoning as a value that clients keep and send back.

OpenAI hides reasoning in it from clients. Here reasoning is shown anyway, so there is nothing to hide and nothing to
protect: a client may send any reasoning as text, too. The value is the text itself with a checksum, which finds one
that was cut or is another server's; every gateway can read it, also after a restart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from shared.errors import InvalidRequestError

_MARK = "pelton1."
_DIGEST_SIZE = 8


def packed_reasoning(text: str) -> str:
    """The value for a text."""
    data = text.encode()
    return _MARK + base64.urlsafe_b64encode(_digest(data) + data).decode()


def unpacked_reasoning(value: str, place: str) -> str:
    """The text of a value. Raises InvalidRequestError with `place` as its parameter where it has none."""
    if value.startswith(_MARK):
        try:
            raw = base64.b64decode(value[len(_MARK) :], altchars=b"-_", validate=True)
            digest, data = raw[:_DIGEST_SIZE], raw[_DIGEST_SIZE:]
            if digest == _digest(data):
                return data.decode()
        except (binascii.Error, ValueError):
            pass
    raise InvalidRequestError(
        f"{place} cannot be read: it was not made by Pelton, or is not whole. Leave the item out.",
        param=place,
        code="invalid_encrypted_content",
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest()
