"""Hash that distinguishes models without reading all of their weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from shared.errors import ModelFileError

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_hash(files: Iterable[tuple[Path, int]], configuration: bytes = b"") -> str:
    """Return SHA-256 over configuration, sizes, the head of each file and evenly spaced blocks of the rest.

    Args:
        files: Path and length of the head (header and tensor table) of each file, in an order independent of the
            folder.
        configuration: Configuration of the model.
    """
    digest = hashlib.sha256(configuration)
    for path, head in files:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                digest.update(file.read(min(head, size)))
                step = max(_SAMPLE_BYTES, (size - head) // _NUM_SAMPLES)
                for offset in range(head, size, step):
                    digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
        except OSError as error:
            raise ModelFileError(f"{path.name}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
