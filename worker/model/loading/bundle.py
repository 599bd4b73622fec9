"""Text side of a model: the bundle for gateways, end-of-text tokens, and the cache of tokenizer conversions."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer

from shared.errors import ModelFileError
from shared.log import get_logger
from shared.messages import Bundle

MAX_CHAT_TEMPLATE = 1 << 20

_log = get_logger("worker.loading")
# Names of tokens that end a turn. One counts if it is an added token of the vocabulary (a piece that ordinary text does
# not merge into) and the chat template writes it.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)


def make_bundle(
    tokenizer_json: bytes, chat_template: str | None, special_tokens: dict[str, str], add_bos_token: bool
) -> Bundle:
    """Return a bundle with its hash: SHA-256 over every field, each with its length in front."""
    digest = hashlib.sha256()
    fields = [tokenizer_json, b"none" if chat_template is None else b"some", (chat_template or "").encode()]
    fields.append(b"bos" if add_bos_token else b"")
    for name, text in sorted(special_tokens.items()):
        fields += [name.encode(), text.encode()]
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return Bundle(
        bundle_hash=digest.hexdigest(),
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        special_tokens=special_tokens,
        add_bos_token=add_bos_token,
    )


def parse_tokenizer(tokenizer_json: bytes, where: str) -> Tokenizer:
    """Parse tokenizer.json, so that a bad one is found here and not in a gateway."""
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ModelFileError(f"{where}: the tokenizer cannot be used: {str(error)[:200]}") from None


def cached_conversion(cache_dir: Path, key: str, convert: Callable[[], bytes]) -> bytes:
    """Return the conversion of a tokenizer, from the cache if it is there and complete.

    Args:
        cache_dir: Directory of the cache.
        key: Hash of the source and of the converter's version.
        convert: Function that performs the conversion.
    """
    path = cache_dir / "tokenizers" / f"{key}.bin"
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    if stored:
        body = stored[32:]
        if hashlib.sha256(body).digest() == stored[:32]:
            return body
        _log.warning("tokenizer_cache_corrupt", file=path.name)
    body = convert()
    _write_atomically(path, hashlib.sha256(body).digest() + body)
    return body


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically. A failure to write only costs time at the next start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("tokenizer_cache_not_written", file=path.name, reason=error.strerror)


def turn_end_ids(chat_template: str | None, added_token_id: Callable[[str], int | None]) -> list[int]:
    """Return the ids of the turn ends that the template uses."""
    if not chat_template:
        return []
    found = (added_token_id(name) for name in TURN_ENDS if name in chat_template)
    return [token_id for token_id in found if token_id is not None]


def united(*places: Iterable[int]) -> tuple[int, ...]:
    """Return all ids, once each, in ascending order."""
    return tuple(sorted({token_id for place in places for token_id in place}))
