"""Bounded reader of GGUF files, versions 2 and 3, little endian.

Every count and size is compared with the rest of the file before anything is allocated or visited. All bytes are read
by pread into memory of our own. Nothing is mapped, so a file that shrinks later gives an error here and cannot kill a
serving process by SIGBUS. Strings of arrays are kept as offsets and decoded on request.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shared.errors import ModelFileError
from worker.model.loading.fields import open_for_reading, pread_exactly, readable
from worker.quant.gguf_formats import FORMATS, GGML_TYPE_NAMES, SUPPORTED_TYPES, WeightFormat

_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

_MIN_KV_BYTES = 8 + 1 + 4 + 1  # key length, one byte of key, type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one byte of name, number of dimensions, one, type, offset
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 255
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 62
_MAX_METADATA_BYTES = 1 << 29
_READ_AHEAD = 1 << 22
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20


class StringArray:
    """Array of strings that are decoded on request."""

    def __init__(self, buffer: bytes, starts: array[int], ends: array[int], where: str) -> None:
        self._buffer = buffer
        self._starts = starts
        self._ends = ends
        self._where = where

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> str:
        raw = self.raw(index)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._where}[{index}] is not valid UTF-8") from None

    def raw(self, index: int) -> bytes:
        """Return the bytes of one string."""
        return self._buffer[self._starts[index] : self._ends[index]]

    def digest(self) -> bytes:
        """Return the SHA-256 of the strings with their lengths, as stored in the file."""
        if not self._starts:
            return hashlib.sha256().digest()
        return hashlib.sha256(memoryview(self._buffer)[self._starts[0] - 8 : self._ends[-1]]).digest()

    def to_list(self) -> list[str]:
        """Return all strings, which takes some 10 ms for 50,000."""
        buffer = self._buffer
        try:
            return [buffer[start:end].decode() for start, end in zip(self._starts, self._ends, strict=True)]
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._where} has a string that is not valid UTF-8") from None


MetadataValue = int | float | bool | str | npt.NDArray[np.generic] | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor.

    Attributes:
        name: Name of the tensor.
        shape: Slowest dimension first, the reverse of the file's order: (out, in) for a matrix.
        format: Format of the values.
        offset: Offset from the start of the file.
        num_bytes: Size of the whole tensor.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Cursor:
    """Forward reader of the metadata; `buffer` holds the file from its start as far as it was needed."""

    def __init__(self, fd: int, file_size: int, name: str) -> None:
        self.file_size = file_size
        self.name = name
        self.position = 0
        self.buffer = b""
        self._fd = fd

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(readable(f"{self.name}: {what}"))

    @property
    def remaining(self) -> int:
        return self.file_size - self.position

    def need(self, count: int, what: str) -> None:
        """Make `count` bytes from the position available. Raises ModelFileError if `what` is cut off."""
        if count > self.remaining:
            self.fail(f"truncated or malformed: {what} needs {count} bytes and {self.remaining} are left")
        end = self.position + count
        if end > len(self.buffer):
            self._grow(end)

    def _grow(self, end: int) -> None:
        if end > _MAX_METADATA_BYTES:
            self.fail(f"its metadata is larger than {_MAX_METADATA_BYTES} bytes")
        target = min(self.file_size, _MAX_METADATA_BYTES, max(end + _READ_AHEAD, 2 * len(self.buffer)))
        more = pread_exactly(self._fd, len(self.buffer), target - len(self.buffer), self.name)
        self.buffer += more.tobytes()

    def array(self, dtype: str, count: int, what: str) -> npt.NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        self.need(size, what)
        values = np.frombuffer(self.buffer, dtype=dtype, count=count, offset=self.position).copy()
        self.position += size
        return values

    def integer(self, dtype: str, what: str) -> int:
        return int(self.array(dtype, 1, what)[0])

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.integer("<u8", f"the length of {what}")
        if limit is not None and not 0 < length <= limit:
            self.fail(f"{what} has {length} bytes; 1 to {limit} are allowed")
        self.need(length, what)
        raw = self.buffer[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")


def _read_strings(cursor: _Cursor, count: int, what: str) -> tuple[array[int], array[int]]:
    """Return starts and ends of `count` strings in the buffer without decoding them."""
    if count * 8 > cursor.remaining:
        cursor.fail(f"{what} claims {count} strings, more than the rest of the file can hold")
    starts, ends = array("Q"), array("Q")
    unpack = struct.Struct("<Q").unpack_from
    buffer, position, available = cursor.buffer, cursor.position, len(cursor.buffer)
    for index in range(count):
        start = position + 8
        if start > available or (end := start + unpack(buffer, position)[0]) > available:
            cursor.position = position
            cursor.need(8, f"{what}[{index}]")
            length = struct.unpack_from("<Q", cursor.buffer, position)[0]
            cursor.need(8 + length, f"{what}[{index}]")
            buffer, available = cursor.buffer, len(cursor.buffer)
            end = start + length
        starts.append(start)
        ends.append(end)
        position = end
    cursor.position = position
    return starts, ends


class GGUFFile:
    """Open GGUF file: metadata by key, tensors by name, tensor bytes on request.

    Raises:
        ModelFileError: The file is malformed, truncated or of an unsupported kind; the error names the file and
            the tensor or key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._types: dict[str, int] = {}
        self._pending: dict[str, tuple[array[int], array[int]]] = {}
        self._fd, self.file_size = open_for_reading(path)
        try:
            self._parse(_Cursor(self._fd, self.file_size, self.name))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; metadata remains available."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, tensor: TensorInfo, offset: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Return bytes of a tensor, [count], in memory of our own; `offset` counts from the tensor's start."""
        count = tensor.num_bytes - offset if count is None else count
        if offset < 0 or count < 0 or offset + count > tensor.num_bytes:
            raise ValueError(f"bytes {offset} to {offset + count} are outside of {tensor.name}")
        return pread_exactly(self._fd, tensor.offset + offset, count, readable(f"{self.name}: tensor {tensor.name}"))

    def _parse(self, cursor: _Cursor) -> None:
        num_tensors, num_kv = self._header(cursor)
        for _ in range(num_kv):
            self._pair(cursor)
        for key, (starts, ends) in self._pending.items():
            self.metadata[key] = StringArray(cursor.buffer, starts, ends, readable(f"{self.name}: {key}", 200))
        alignment = self._alignment(cursor)
        infos = [self._tensor(cursor) for _ in range(num_tensors)]
        data_start = -(-cursor.position // alignment) * alignment
        self._place(infos, data_start, alignment, cursor)

    def _header(self, cursor: _Cursor) -> tuple[int, int]:
        if self.file_size < 4 or pread_exactly(self._fd, 0, 4, self.name).tobytes() != b"GGUF":
            cursor.fail("is not a GGUF file")
        cursor.position = 4
        version = cursor.integer("<u4", "the version")
        if version not in (2, 3):
            reason = "big endian" if version in (0x0200_0000, 0x0300_0000) else f"of version {version}"
            cursor.fail(f"is {reason}; little-endian versions 2 and 3 are supported")
        num_tensors = cursor.integer("<u8", "the number of tensors")
        num_kv = cursor.integer("<u8", "the number of metadata keys")
        if num_tensors * _MIN_TENSOR_BYTES > cursor.remaining:
            cursor.fail(f"claims {num_tensors} tensors, more than the file can hold")
        if num_kv * _MIN_KV_BYTES > cursor.remaining:
            cursor.fail(f"claims {num_kv} metadata keys, more than the file can hold")
        return num_tensors, num_kv

    def _pair(self, cursor: _Cursor) -> None:
        key = cursor.string(f"metadata key number {len(self._types)}", _MAX_KEY_BYTES)
        if key in self._types:
            cursor.fail(f"metadata key {key} appears twice")
        kind = cursor.integer("<u4", f"the type of {key}")
        self._types[key] = kind
        if kind == _STRING:
            self.metadata[key] = cursor.string(key)
        elif kind == _ARRAY:
            self._array(cursor, key)
        else:
            self.metadata[key] = self._values(cursor, key, kind, 1)[0].item()

    def _array(self, cursor: _Cursor, key: str) -> None:
        kind = cursor.integer("<u4", f"the element type of {key}")
        count = cursor.integer("<u8", f"the length of {key}")
        if kind == _STRING:
            self._pending[key] = _read_strings(cursor, count, key)
            return
        if kind == _ARRAY:
            cursor.fail(f"{key} is an array of arrays, which is not supported")
        self.metadata[key] = self._values(cursor, key, kind, count)

    def _values(self, cursor: _Cursor, key: str, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _SCALARS:
            cursor.fail(f"{key} has the unknown value type {kind}")
        values = cursor.array(_SCALARS[kind], count, key)
        if kind == _BOOL and count and values.max() > 1:
            cursor.fail(f"{key} is a boolean with the value {values.max()}")
        return values.astype(np.bool_) if kind == _BOOL else values

    def _alignment(self, cursor: _Cursor) -> int:
        value = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if self._types.get("general.alignment", _UINT32) != _UINT32 or not isinstance(value, int):
            cursor.fail("general.alignment is not a 32-bit unsigned integer")
        if not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            cursor.fail(f"general.alignment is {value}; a power of two up to {_MAX_ALIGNMENT} is needed")
        return value

    def _tensor(self, cursor: _Cursor) -> TensorInfo:
        """Read one entry of the tensor table; its offset is still relative to the start of the data."""
        name = cursor.string(f"the name of tensor number {len(self.tensors)}", _MAX_NAME_BYTES)
        if name in self.tensors:
            cursor.fail(f"tensor {name} appears twice")
        num_dimensions = cursor.integer("<u4", f"the number of dimensions of tensor {name}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            cursor.fail(f"tensor {name} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
        dimensions = [cursor.integer("<u8", f"the dimensions of tensor {name}") for _ in range(num_dimensions)]
        kind = cursor.integer("<u4", f"the type of tensor {name}")
        offset = cursor.integer("<u8", f"the offset of tensor {name}")
        elements = 1
        for dimension in dimensions:
            elements *= dimension
            if not 0 < elements < _MAX_ELEMENTS:
                cursor.fail(f"tensor {name} has the impossible dimensions {dimensions}")
        weight_format = SUPPORTED_TYPES.get(kind)
        if weight_format is None:
            known = GGML_TYPE_NAMES.get(kind, f"number {kind}, which is unknown")
            names = ", ".join(one.upper() for one in FORMATS)
            cursor.fail(f"tensor {name} has the type {known}; supported are {names}")
        info = FORMATS[weight_format]
        if dimensions[0] % info.block:
            cursor.fail(
                f"tensor {name} has rows of {dimensions[0]} values, which is not a multiple of its block of "
                f"{info.block}"
            )
        tensor = TensorInfo(
            name, weight_format, tuple(reversed(dimensions)), offset, elements // info.block * info.block_bytes
        )
        self.tensors[name] = tensor
        return tensor

    def _place(self, infos: list[TensorInfo], data_start: int, alignment: int, cursor: _Cursor) -> None:
        """Check that the tensors are inside the file, aligned and disjoint, and make their offsets absolute."""
        end, before = 0, ""
        for info in sorted(infos, key=lambda one: one.offset):
            if info.offset % alignment:
                cursor.fail(f"tensor {info.name} is at offset {info.offset}, which is not aligned to {alignment}")
            last = data_start + info.offset + info.num_bytes
            if last > self.file_size:
                cursor.fail(f"truncated: tensor {info.name} would end at byte {last} of {self.file_size}")
            if info.offset < end:
                cursor.fail(f"tensors {before} and {info.name} overlap")
            end, before = info.offset + info.num_bytes, info.name
            self.tensors[info.name] = replace(info, offset=data_start + info.offset)
