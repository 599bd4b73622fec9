"""Bounded reader of safetensors files, alone or in shards with an index.

The header is checked as the description of the format requires (length, one object, known types, shapes that match the
bytes, tensors that are disjoint and without holes) before any tensor is read. Tensor bytes are read by pread, only the
requested rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import torch

from shared.errors import ModelFileError
from worker.model.loading.fields import readable, shown
from worker.model.loading.reads import open_for_reading, parse_object, pread_exactly, read_json_object
from worker.quant.gguf_formats import WeightFormat
from worker.quant.raw_weight import RawWeight, bounds

MAX_HEADER = 100_000_000
_MAX_INDEX = 1 << 26
_MAX_FILES = 10_000

# Bytes of one value. Types below a byte are listed so that the error about support names them.
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_FORMATS: dict[str, WeightFormat] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_READABLE: dict[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Location of a tensor; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """Open safetensors file.

    Raises:
        ModelFileError: The file is malformed or truncated; the error names file and tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._fd, self.file_size = open_for_reading(path)
        try:
            self.data_start, self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_rows(self, tensor: SafeTensor, rows: slice | None) -> RawWeight:
        """Read rows of a tensor of values; only their bytes are read."""
        weight_format = self.format_of(tensor)
        values = self.read_values(tensor, rows)
        return RawWeight(weight_format, tuple(values.shape), values)

    def read_values(self, tensor: SafeTensor, rows: slice | None = None) -> torch.Tensor:
        """Read rows of a tensor of any type that torch has; only their bytes are read."""
        dtype = _READABLE.get(tensor.dtype)
        if dtype is None:
            raise self._fail(f"tensor {tensor.name} has the type {tensor.dtype}; supported are {', '.join(_READABLE)}")
        where = readable(f"{self.name}: tensor {tensor.name}")
        if not tensor.shape or not tensor.num_bytes:
            raise ModelFileError(f"{where} is empty or has no dimensions")
        start, stop = bounds(rows, tensor.shape[0])
        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw = pread_exactly(self._fd, tensor.offset + start * row_bytes, (stop - start) * row_bytes, where)
        return torch.from_numpy(raw).view(dtype).reshape(stop - start, *tensor.shape[1:])

    def format_of(self, tensor: SafeTensor) -> WeightFormat:
        """Return the format of a tensor. Raises ModelFileError for unsupported types."""
        weight_format = _FORMATS.get(tensor.dtype)
        if weight_format is None:
            raise self._fail(f"tensor {tensor.name} has the type {tensor.dtype}; supported are {', '.join(_FORMATS)}")
        return weight_format

    def _fail(self, what: str) -> ModelFileError:
        return ModelFileError(readable(f"{self.name}: {what}"))

    def _parse(self) -> tuple[int, dict[str, SafeTensor]]:
        if self.file_size < 8:
            raise self._fail("is too short for a safetensors file")
        length = int.from_bytes(pread_exactly(self._fd, 0, 8, self.name).tobytes(), "little")
        if length > MAX_HEADER:
            raise self._fail(f"claims a header of {length} bytes; at most {MAX_HEADER} are allowed")
        if length > self.file_size - 8:
            raise self._fail(f"truncated: its header of {length} bytes ends beyond the file of {self.file_size}")
        raw = pread_exactly(self._fd, 8, length, self.name).tobytes()
        if not raw.startswith(b"{"):
            raise self._fail("is not a safetensors file: its header does not begin with {")
        header = parse_object(raw, f"{self.name}: header")
        header.pop("__metadata__", None)
        data_start = 8 + length
        tensors = {name: self._entry(name, entry, data_start) for name, entry in header.items()}
        self._check_layout(tensors, data_start)
        return data_start, tensors

    def _entry(self, name: str, entry: object, data_start: int) -> SafeTensor:
        where = f"tensor {readable(name, 200)}"
        if not isinstance(entry, Mapping):
            raise self._fail(f"{where} is described by {shown(entry)}, which is not an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
            raise self._fail(f"{where} has the unknown type {shown(dtype)}")
        if not _counts(shape) or len(shape) > 8:
            raise self._fail(f"{where} has the impossible shape {shown(shape)}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fail(f"{where} has the impossible data_offsets {shown(offsets)}")
        begin, end = offsets
        if end > self.file_size - data_start:
            raise self._fail(f"truncated: {where} would end at byte {data_start + end} of {self.file_size}")
        if math.prod(shape) * _DTYPE_BITS[dtype] != (end - begin) * 8:
            raise self._fail(f"{where} has {end - begin} bytes, which are not {dtype} of shape {shape}")
        return SafeTensor(name, dtype, tuple(shape), data_start + begin, end - begin)

    def _check_layout(self, tensors: dict[str, SafeTensor], data_start: int) -> None:
        end, before = data_start, "the header"
        for tensor in sorted(tensors.values(), key=lambda one: (one.offset, one.num_bytes)):
            if tensor.offset < end:
                raise self._fail(f"tensors {before} and {tensor.name} overlap")
            if tensor.offset > end:
                raise self._fail(f"there is a hole of {tensor.offset - end} bytes before tensor {tensor.name}")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
        if end != self.file_size:
            raise self._fail(f"{self.file_size - end} bytes follow the last tensor")


def _counts(values: object) -> TypeGuard[list[int]]:
    """Return True if the value is a list of integers from 0 to 2^62."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and its file."""

    file: SafetensorsFile
    tensor: SafeTensor

    @property
    def dtype(self) -> str:
        """Type of the tensor in the file."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.tensor.shape

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Return the tensor, or rows of it, as stored. A tensor without dimensions is [1]."""
        if not self.tensor.shape:
            whole = replace(self.tensor, shape=(1,))
            return self.file.read_values(whole)
        return self.file.read_values(self.tensor, rows)


class Checkpoint:
    """Tensors of a folder: one file, or shards with an index."""

    def __init__(self, files: list[SafetensorsFile], tensors: dict[str, Stored]) -> None:
        self.files = files
        self.tensors = tensors

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def open_checkpoint(paths: list[Path], weight_map: Mapping[str, str] | None = None) -> Checkpoint:
    """Open files and, with an index, check that each tensor is in the file that the index names."""
    files: list[SafetensorsFile] = []
    try:
        # One by one, so that files already open are closed when one fails.
        for path in paths:
            files.append(SafetensorsFile(path))  # noqa: PERF401
        tensors = {name: Stored(file, tensor) for file in files for name, tensor in file.tensors.items()}
        if weight_map is not None:
            by_name = {file.name: file for file in files}
            for name, file_name in weight_map.items():
                if name not in by_name[file_name].tensors:
                    raise ModelFileError(f"{file_name}: tensor {readable(name)} is missing, though the index names it")
                tensors[name] = Stored(by_name[file_name], by_name[file_name].tensors[name])
    except BaseException:
        for file in files:
            file.close()
        raise
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
