"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to; what was written takes `path`'s place when the block ends well, and on the disk, too.

    Others may read it. What is left of a process that was killed meanwhile is written over by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
