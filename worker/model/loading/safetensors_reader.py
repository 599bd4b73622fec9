"""Bounded reader of one safetensors file.

The library `safetensors` reads the tensors. Its errors name neither the file nor the tensor, so this module first
checks the header as the description of the format requires: length, one object, known types, shapes that match the
bytes, tensors that are disjoint and without holes. The library maps the file into memory. A tensor is therefore copied
when it is read, after a check that the file has not shrunk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelFileError
from worker.model.loading.fields import open_for_reading, parse_object, pread_exactly, readable, shown
from worker.quant.gguf_formats import WeightFormat
from worker.quant.raw_weight import RawWeight, bounds

MAX_HEADER = 100_000_000

# Bits of one value. All types of the format are listed, so that an error about support can name them.
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_FORMATS: dict[str, WeightFormat] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


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
        self._library: safe_open | None = None
        self._fd, self.file_size = open_for_reading(path)
        try:
            self.data_start, self.tensors = self._parse()
            self._library = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            self.close()
            raise self._fail(f"cannot be opened: {str(error)[:200]}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._library = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_rows(self, tensor: SafeTensor, rows: slice | None) -> RawWeight:
        """Read rows of a tensor of values; only their bytes are read."""
        weight_format = self.format_of(tensor)
        values = self.read_values(tensor, rows)
        return RawWeight(weight_format, tuple(values.shape), values)

    def read_values(self, tensor: SafeTensor, rows: slice | None = None) -> torch.Tensor:
        """Read rows of a tensor of any type; only their bytes are read. A tensor without dimensions is [1]."""
        if self._library is None:
            raise ValueError(f"{self.name} is closed")
        if not tensor.num_bytes:
            raise self._fail(f"tensor {tensor.name} is empty")
        size = os.fstat(self._fd).st_size
        if size < self.file_size:
            raise self._fail(f"tensor {tensor.name}: the file shrank from {self.file_size} to {size} bytes")
        try:
            mapped: torch.Tensor
            if tensor.shape:
                start, stop = bounds(rows, tensor.shape[0])
                mapped = self._library.get_slice(tensor.name)[start:stop]  # type: ignore[no-untyped-call]
            else:
                mapped = self._library.get_tensor(tensor.name).reshape(1)  # type: ignore[no-untyped-call]
            return mapped.clone()
        except (SafetensorError, OSError) as error:
            raise self._fail(f"tensor {tensor.name} cannot be read: {str(error)[:200]}") from None

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
