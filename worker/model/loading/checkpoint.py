"""Tensors of a safetensors checkpoint, and the quantized weights that several of them form."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shared.errors import ModelFileError
from worker.model.loading.fields import read_json_object, readable, shown
from worker.model.loading.model_files import StoredWeight
from worker.model.loading.safetensors_reader import SafetensorsFile, StoredTensor

_MAX_INDEX = 1 << 26
_MAX_FILES = 10_000


class Checkpoint:
    """Tensors of a folder: one file, or shards with an index."""

    def __init__(self, files: list[SafetensorsFile], tensors: dict[str, StoredTensor]) -> None:
        self.files = files
        self.tensors = tensors

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def open_checkpoint(paths: list[Path], weight_map: Mapping[str, str] | None = None) -> Checkpoint:
    """Open files and, with an index, check that each tensor is in the file that the index names."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(contextlib.closing(SafetensorsFile(path))) for path in paths]
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        by_name = {file.name: file for file in files}
        for name, file_name in (weight_map or {}).items():
            if name not in by_name[file_name].tensors:
                raise ModelFileError(f"{file_name}: tensor {readable(name)} is missing, though the index names it")
            tensors[name] = by_name[file_name].tensors[name]
        opened.pop_all()
    return Checkpoint(files, tensors)


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises ModelFileError if a name would leave the folder."""
    weight_map = read_json_object(path, _MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path.name}: weight_map is missing or not an object")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name == os.path.basename(name) and not {"\\", "\0"} & set(name)
        if not plain or not name.endswith(".safetensors"):
            where = f"{path.name}: tensor {readable(tensor)}"
            raise ModelFileError(
                f"{where} is said to be in {shown(name)}, which is not a safetensors file of this folder"
            )
    if len(set(weight_map.values())) > _MAX_FILES:
        raise ModelFileError(f"{path.name}: names more than {_MAX_FILES} files")
    return weight_map


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule(StoredWeight):
    """Weight [out, in] that several tensors form; `leaves` are their names within the module."""

    leaves: frozenset[str]


class QuantizedCheckpoint(Protocol):
    """Quantization of the modules of a checkpoint, from `quantization_config` of its config.json."""

    def module(self, name: str, tensors: Mapping[str, StoredTensor]) -> QuantizedModule | None:
        """Return the module's weight; None if it is not quantized and its tensors are used unchanged.

        Args:
            name: Name of the module, for errors.
            tensors: Tensors by name within the module.

        Raises:
            ModelFileError: A tensor is missing or misshapen, or a variant is not supported.
        """


def need(
    module: str,
    tensors: Mapping[str, StoredTensor],
    leaf: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...] | None = None,
) -> StoredTensor:
    """Return a tensor of a module. Raises ModelFileError if it is missing or has another type or shape."""
    stored = tensors.get(leaf)
    if stored is None:
        raise ModelFileError(f"tensor {readable(module)}.{leaf} is missing")
    where = f"{stored.file.name}: tensor {readable(module)}.{leaf}"
    if stored.dtype not in dtypes:
        raise ModelFileError(f"{where} has the type {stored.dtype}; {' or '.join(dtypes)} is needed")
    if shape is not None and stored.shape != shape:
        raise ModelFileError(f"{where} has the shape {stored.shape}; {shape} is needed")
    return stored


def factors_of(stored: StoredTensor, rows: slice | None = None, *, positive: bool = False) -> torch.Tensor:
    """Return scales, or rows of them. Raises ModelFileError if one is not finite, or not positive where required."""
    values = stored.read(rows)
    good = values.isfinite()
    if positive:
        good &= values > 0
    if not good.all():
        where = f"{stored.file.name}: tensor {readable(stored.name)}"
        kind = "positive" if positive else "finite"
        raise ModelFileError(f"{where} holds {values[~good][0].item()}; {kind} scales are needed")
    return values


def find_modules(
    tensors: Mapping[str, StoredTensor], quantization: QuantizedCheckpoint | None
) -> tuple[dict[str, QuantizedModule], dict[str, StoredTensor]]:
    """Separate the quantized weights of a checkpoint from its other tensors.

    Returns:
        Quantized weights by name (`<module>.weight`), and the remaining tensors.

    Raises:
        ModelFileError: A module is misshapen or present twice.
    """
    if quantization is None:
        return {}, dict(tensors)
    by_module: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        by_module.setdefault(prefix, {})[leaf] = stored
    modules, rest = {}, {}
    for prefix, leaves in by_module.items():
        module = quantization.module(prefix, leaves)
        if module is not None:
            if "weight" in leaves and "weight" not in module.leaves:
                raise ModelFileError(f"tensor {readable(prefix)}.weight is present both quantized and unquantized")
            modules[f"{prefix}.weight"] = module
        for leaf, stored in leaves.items():
            if module is None or leaf not in module.leaves:
                name = f"{prefix}.{leaf}" if prefix else leaf
                rest[name] = stored
    return modules, rest
