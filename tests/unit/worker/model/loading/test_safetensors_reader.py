"""The safetensors reader: files of the library, and every way in which a header can be wrong."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import ModelFileError
from worker.model.loading.checkpoint import open_checkpoint, read_index
from worker.model.loading.safetensors_reader import SafetensorsFile

GOOD: dict[str, Any] = {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}


def _raw(header: bytes, data: bytes = bytes(32), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(**changes: object) -> bytes:
    return _raw(json.dumps({"w": {**GOOD["w"], **changes}}).encode())


def _two(first: list[int], second: list[int], data: bytes = bytes(64)) -> bytes:
    entries = {
        name: {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}
        for name, offsets in (("a", first), ("b", second))
    }
    return _raw(json.dumps(entries).encode(), data)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "header 2^63": (_raw(b"{}", length=2**63), f"claims a header of {2**63} bytes"),
    "header over the limit": (_raw(b"{}", length=100_000_001), "claims a header of 100000001 bytes"),
    "header beyond the file": (_raw(b"{}", length=5000), "truncated: its header of 5000 bytes"),
    "header empty": (_raw(b""), "does not begin with {"),
    "other start": (_raw(b" " + json.dumps(GOOD).encode()), "does not begin with {"),
    "no JSON": (_raw(b"{'w': 1}"), "is not valid JSON"),
    "not UTF-8": (_raw(b'{"\xff": 1}'), "is not valid JSON"),
    "deep": (_raw(b'{"a":' * 100_000), "is not valid JSON"),
    "same name": (_raw(b'{"w":' + json.dumps(GOOD["w"]).encode() + b',"w":1}'), "'w' appears twice"),
    "no object": (_raw(b'{"w": [1]}'), "tensor w is described by [1]"),
    "dtype": (_entry(dtype="F33"), "tensor w has the unknown type 'F33'"),
    "dtype kind": (_entry(dtype=["F32"]), "tensor w has the unknown type"),
    "no dtype": (_entry(dtype=None), "tensor w has the unknown type None"),
    "shape negative": (_entry(shape=[-2, -4]), "tensor w has the impossible shape"),
    "shape text": (_entry(shape="24"), "tensor w has the impossible shape"),
    "shape bool": (_entry(shape=[True, 8]), "tensor w has the impossible shape"),
    "shape huge": (_entry(shape=[2**63, 2]), "tensor w has the impossible shape"),
    "shape wraps": (_entry(shape=[2**32, 2**32, 8]), "tensor w has 32 bytes"),
    "shape long": (_entry(shape=[1] * 9), "tensor w has the impossible shape"),
    "shape product": (_entry(shape=[2, 5]), "tensor w has 32 bytes, which are not F32 of shape [2, 5]"),
    "offsets three": (_entry(data_offsets=[0, 16, 32]), "tensor w has the impossible data_offsets"),
    "offsets backwards": (_entry(data_offsets=[32, 0]), "tensor w has the impossible data_offsets"),
    "offsets negative": (_entry(data_offsets=[-32, 0]), "tensor w has the impossible data_offsets"),
    "offsets float": (_entry(data_offsets=[0, 32.0]), "tensor w has the impossible data_offsets"),
    "offsets beyond": (_entry(data_offsets=[32, 64]), "truncated: tensor w would end at byte"),
    "overlap": (_two([0, 40], [32, 64]), "tensors a and b overlap"),
    "hole": (_two([0, 24], [32, 64]), "hole of 8 bytes before tensor b"),
    "rest": (_two([0, 24], [24, 48]), "16 bytes follow"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_named_with_the_fault(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "some.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value) and str(caught.value).startswith("some.safetensors: ")


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
        weight = file.read_rows(file.tensors[name], None)
        assert weight.format == kind and torch.equal(weight.data, tensors[name])
    part = file.read_rows(file.tensors["a"], slice(1, 4))
    assert part.shape == (3, 8) and torch.equal(part.data, tensors["a"][1:4])
    with pytest.raises(ModelFileError, match="tensor d has the type I64"):
        file.read_rows(file.tensors["d"], None)
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
    with pytest.raises(ModelFileError, match="tensor a: the file shrank from"):
        file.read_rows(file.tensors["a"], None)
    file.close()


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "..",
        "",
        3,
        "x.bin",
        "x\0.safetensors",
    ],
)
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
