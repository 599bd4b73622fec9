"""Pelton's own source files, parsed once, for the tests of its structure."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "kernels", "worker", "gateway")


@functools.cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """All Python files below these folders, scripts without an ending included."""
    every = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file())
    return tuple(path for path in every if path.suffix == ".py" or _is_script(path))


def _is_script(path: Path) -> bool:
    if path.suffix or "__pycache__" in path.parts:
        return False
    with open(path, "rb") as file:
        first = file.readline(100)
    return first.startswith(b"#!") and b"python" in first


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"), str(path))


def relative(path: Path) -> str:
    """For messages."""
    return str(path.relative_to(ROOT))
