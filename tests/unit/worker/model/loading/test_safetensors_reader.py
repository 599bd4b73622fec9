"""The safetensors reader: files of the library, and malformed ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import ModelFileError
from worker.model.loading.checkpoint import open_checkpoint, read_index
from worker.model.loading.safetensors_reader import SafetensorsFile


def _raw(header: bytes, data: bytes = bytes(32), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(**changes: object) -> bytes:
    return _raw(json.dumps({"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **changes}}).encode())


# The library checks headers; one case of each of its kinds of errors, and those that once were expensive to detect.
MALFORMED = {
    "empty": b"",
    "header 2^63": _raw(b"{}", length=2**63),
    "header beyond the file": _raw(b"{}", length=5000),
    "not UTF-8": _raw(b'{"\xff": 1}'),
    "deep": _raw(b'{"a":' * 100_000),
    "dtype": _entry(dtype="F33"),
    "shape wraps": _entry(shape=[2**32, 2**32, 8]),
    "offsets backwards": _entry(data_offsets=[32, 0]),
    "offsets beyond": _entry(data_offsets=[32, 64]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(MALFORMED[case])
    with pytest.raises(ModelFileError, match=r"^some\.safetensors: is not a safetensors file or is incomplete: "):
        SafetensorsFile(path)


def _saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {
        "a": torch.randn(5, 8),
        "b": torch.randn(3, 8).to(torch.bfloat16),
        "c": torch.randn(7).to(torch.float16),
        "d": torch.arange(4),
    }
    path = tmp_path / "saved.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors


def test_files_of_the_library_read_the_same(tmp_path: Path) -> None:
    path, tensors = _saved(tmp_path)
    file = SafetensorsFile(path)
    for name, kind in (("a", "f32"), ("b", "bf16"), ("c", "f16")):
        weight = file.tensors[name].read_rows()
        assert weight.format == kind and torch.equal(weight.data, tensors[name])
    part = file.tensors["a"].read_rows(slice(1, 4))
    assert part.shape == (3, 8) and torch.equal(part.data, tensors["a"][1:4])
    with pytest.raises(ModelFileError, match="tensor d has the type I64"):
        file.tensors["d"].read_rows()
    file.close()


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path, _ = _saved(tmp_path)
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(ModelFileError, match=r"^saved\.safetensors: "):
            SafetensorsFile(path)


def test_a_file_that_shrinks_after_opening_gives_an_error(tmp_path: Path) -> None:
    path, _ = _saved(tmp_path)
    file = SafetensorsFile(path)
    os.truncate(path, file.data_start + 4)
    with pytest.raises(ModelFileError, match=r"tensor a: ends at byte .*; did it shrink"):
        file.tensors["a"].read_rows()
    file.close()


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b.safetensors", "..\\x.safetensors", "", 3, "x.bin"])
def test_an_index_cannot_leave_its_folder(tmp_path: Path, name: object) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelFileError, match=r"tensor w is said to be in .*, which is not a safetensors file"):
        read_index(path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", '{"a": 1, "a": 2}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        read_index(path)


def test_shards_are_checked_against_the_index(tmp_path: Path) -> None:
    path, _ = _saved(tmp_path)
    with pytest.raises(ModelFileError, match=r"saved\.safetensors: tensor z is missing, though the index names it"):
        open_checkpoint([path], {"z": path.name})
    with pytest.raises(ModelFileError, match=r"gone\.safetensors: cannot be opened"):
        open_checkpoint([path, tmp_path / "gone.safetensors"], {"a": path.name, "z": "gone.safetensors"})
