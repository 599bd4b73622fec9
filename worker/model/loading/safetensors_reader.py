"""Reader of one safetensors file.

The library `safetensors` checks the header: its length, its entries, and that the tensors cover the file without
overlaps or holes. It maps files into memory, and reading a mapped file that has shrunk ends the process. Tensors are
therefore read with `pread` from the offsets that follow from the header.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelFileError
from worker.model.loading.fields import open_for_reading, pread_exactly, readable
from worker.quant.gguf_formats import WeightFormat
from worker.quant.raw_weight import RawWeight, bounds

# Bits of one value. All types of the format are listed, because offsets follow from the sizes of all tensors.
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_TORCH_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "I32": torch.int32,
}  # fmt: skip
_FORMATS: dict[str, WeightFormat] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of an open file; `offset` counts bytes from the start of the file."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def format(self) -> WeightFormat:
        """Format of an unquantized weight. Raises ModelFileError for any other type."""
        if self.dtype not in _FORMATS:
            raise self._error(f"has the type {self.dtype}; supported are {', '.join(_FORMATS)}")
        return _FORMATS[self.dtype]

    def read_rows(self, rows: slice | None = None) -> RawWeight:
        """Read rows of an unquantized weight; only their bytes are read."""
        weight_format, values = self.format, self.read(rows)
        return RawWeight(weight_format, tuple(values.shape), values)

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Read rows of a tensor; only their bytes are read. A tensor without dimensions is [1]."""
        shape = self.shape or (1,)
        if not self.num_bytes:
            raise self._error("is empty")
        start, stop = bounds(rows, shape[0])
        size = self.num_bytes // shape[0]
        name = readable(f"{self.file.name}: tensor {self.name}")
        raw = pread_exactly(self.file.descriptor, self.offset + start * size, (stop - start) * size, name)
        return torch.from_numpy(raw).view(_TORCH_DTYPES[self.dtype]).reshape(stop - start, *shape[1:])

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(readable(f"{self.file.name}: tensor {self.name} {what}"))


class SafetensorsFile:
    """Open safetensors file.

    Raises:
        ModelFileError: The file is malformed or truncated; the error names the file.

    Attributes:
        data_start: Length of the header with its length field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.descriptor, self._size = open_for_reading(path)
        try:
            self.data_start, self.tensors = self._parse()
        except (SafetensorError, OSError, KeyError) as error:
            self.close()
            raise ModelFileError(
                readable(f"{self.name}: is not a safetensors file or is incomplete: {str(error)[:200]}")
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _parse(self) -> tuple[int, dict[str, StoredTensor]]:
        tensors: dict[str, StoredTensor] = {}
        with safe_open(self.path, framework="pt") as library:
            length = int.from_bytes(pread_exactly(self.descriptor, 0, 8, self.name).tobytes(), "little")
            end = data_start = 8 + length
            for name in library.offset_keys():
                entry = library.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                num_bytes = math.prod(shape) * _DTYPE_BITS[dtype] // 8
                tensors[name] = StoredTensor(self, name, dtype, shape, end, num_bytes)
                end += num_bytes
        if end != self._size:
            raise ModelFileError(f"{self.name}: its tensors end at byte {end}, but the file has {self._size} bytes")
        return data_start, tensors
