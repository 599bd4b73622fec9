"""The GGUF reader: good files, and every way in which a file can be wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shared.errors import ModelFileError
from tests.unit.worker.model.loading.forge import (
    ARRAY,
    BOOL,
    F32,
    Q8_0,
    STRING,
    UINT32,
    UINT64,
    Forged,
    Tensor,
    f32_tensor,
    pair,
    string,
    tiny_gguf,
    tiny_tensors,
    value_pair,
)
from worker.model.loading import default_model_path
from worker.model.loading.gguf_reader import GGUFFile, StringArray

HUGE = 2**63


def _open(tmp_path: Path, content: bytes | bytearray) -> GGUFFile:
    path = tmp_path / "some.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def _tensor(**fields: object) -> bytes:
    values: dict[str, object] = {"name": "weight", "dimensions": (32,), "data": bytes(128)}
    return Forged(tensors=[Tensor(**{**values, **fields})]).build()


def _two(first: str, second: str, offset: int | None = None) -> bytes:
    return Forged(tensors=[Tensor(first, (16,), bytes(64)), Tensor(second, (16,), bytes(64), offset=offset)]).build()


def _pair(*arguments: Any) -> bytes:
    return Forged([pair(*arguments)], [Tensor("weight", (32,), bytes(128))]).build()


def _array(kind: int, count: int, *values: int) -> bytes:
    return struct.pack(f"<IQ{len(values)}Q", kind, count, *values)


def _alignment(value: object) -> bytes:
    return Forged([value_pair("general.alignment", value)]).build()


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other magic": (b"GGML" + bytes(64), "not a GGUF file"),
    "version 1": (Forged(version=1).build(), "version 1"),
    "big endian": (Forged(version=0x03000000).build(), "big endian"),
    "n_tensors": (Forged(num_tensors=HUGE).build(), f"claims {HUGE} tensors"),
    "n_kv": (Forged(num_pairs=HUGE).build(), f"claims {HUGE} metadata keys"),
    "dims wrap 32": (_tensor(dimensions=(2**32, 2**32)), "weight has the impossible dimensions"),
    "dims wrap 61": (_tensor(dimensions=(2**61,)), "weight would end at byte"),
    "dim 0": (_tensor(dimensions=(32, 0)), "weight has the impossible dimensions"),
    "dim negative": (_tensor(dimensions=(2**64 - 1,)), "weight has the impossible dimensions"),
    "no dimensions": (_tensor(dimensions=()), "weight has 0 dimensions"),
    "5 dimensions": (_tensor(dimensions=(2, 1, 1, 1, 1)), "weight has 5 dimensions"),
    "2^31 dimensions": (_tensor(num_dimensions=2**31), f"weight has {2**31} dimensions"),
    "offset huge": (_tensor(offset=2**64 - 32), "weight would end at byte"),
    "misaligned": (_tensor(offset=8, data=bytes(256)), "weight is at offset 8"),
    "type unknown": (_tensor(kind=255), "weight has the type number 255"),
    "type unsupported": (_tensor(kind=12), "weight has the type Q4_K"),
    "type withdrawn": (_tensor(kind=4), "weight has the type Q4_2"),
    "no whole block": (_tensor(kind=Q8_0, dimensions=(33,)), "weight has rows of 33 values"),
    "name empty": (_tensor(name=""), "name of tensor number 0"),
    "name bytes": (_tensor(name=b"\xff\xfe"), "not valid UTF-8"),
    "same name": (_two("w", "w"), "w appears"),
    "overlap": (_two("a", "b", offset=32), "tensors a and b overlap"),
    "same place": (_two("a", "b", offset=0), "overlap"),
    "same key": (Forged([value_pair("k", 1), value_pair("k", 2)]).build(), "k appears twice"),
    "alignment 0": (_alignment(0), "general.alignment is 0"),
    "alignment 3": (_alignment(3), "general.alignment is 3"),
    "alignment 2^31": (_alignment(2**31), "general.alignment is 2147483648"),
    "alignment 2^32": (_pair("general.alignment", UINT64, struct.pack("<Q", 2**32)), "alignment is not a 32-bit"),
    "alignment text": (_alignment("32"), "general.alignment is not a 32-bit"),
    "bool 7": (_pair("flag", BOOL, b"\x07"), "flag is a boolean with the value 7"),
    "bool array": (_pair("flags", ARRAY, _array(BOOL, 2) + b"\1\7"), "flags is a bool"),
    "value type": (_pair("odd", 255, bytes(8)), "odd has the unknown value type 255"),
    "element type": (_pair("odd", ARRAY, _array(255, 1)), "odd has the unknown value"),
    "key bytes": (_pair(b"\xc3\x28", UINT32, bytes(4)), "not valid UTF-8"),
    "key empty": (_pair("", UINT32, bytes(4)), "has 0 bytes"),
    "key long": (_pair("k" * 70_000, UINT32, bytes(4)), "has 70000 bytes"),
    "value bytes": (_pair("text", STRING, string(b"\xff")), "text is not valid UTF-8"),
    "string 2^64-1": (_pair("text", STRING, struct.pack("<Q", 2**64 - 1)), f"text needs {2**64 - 1} bytes"),
    "token 2^31+5": (_pair("tokens", ARRAY, _array(STRING, 1, 2**31 + 5, *[0] * 8)), "tokens[0] needs"),
    "array 2^62": (_pair("many", ARRAY, _array(UINT32, 2**62)), "many needs"),
    "strings 2^62": (_pair("many", ARRAY, _array(STRING, 2**62)), "many claims"),
    "nested 1000": (_pair("deep", ARRAY, _array(ARRAY, 1) * 1000 + _array(UINT32, 0)), "deep is an array of arrays"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_named_with_the_fault(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    with pytest.raises(ModelFileError) as caught:
        _open(tmp_path, content)
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.gguf: ")


def test_names_from_files_are_fit_for_a_terminal(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        _open(tmp_path, _pair("\x1b[2J" + "k" * 60_000, 255, bytes(8)))
    assert "\x1b" not in str(caught.value) and "\\x1b[2Jkkk" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_well_formed_file_opens(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    pairs = [value_pair("general.alignment", 64), value_pair("text", "ü"), value_pair("list", ["a", "", "ccc"])]
    pairs += [value_pair("flag", True), value_pair("numbers", [1, 2, 3]), value_pair("real", 0.5)]
    for version in (2, 3):
        with _open(tmp_path, Forged(pairs, [f32_tensor("w", values)], version=version, alignment=64).build()) as file:
            assert file.metadata["text"] == "ü"
            assert file.metadata["flag"] is True
            assert file.metadata["real"] == 0.5
            listed, numbers = file.metadata["list"], file.metadata["numbers"]
            assert isinstance(listed, StringArray) and listed.to_list() == list(listed) == ["a", "", "ccc"]
            assert isinstance(numbers, np.ndarray) and numbers.tolist() == [1, 2, 3]
            info = file.tensors["w"]
            assert info.shape == (3, 4) and info.offset % 64 == 0
            assert np.array_equal(file.read(info).view(np.float32).reshape(3, 4), values)
            assert np.array_equal(file.read(info, 16, 16).view(np.float32), values[1])


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf())
    with GGUFFile(path) as file:
        last_end = max(info.offset + info.num_bytes for info in file.tensors.values())
        data_start = min(info.offset for info in file.tensors.values())
    # The ends of two tensors, then every third byte of the tensor table and the metadata: the file becomes shorter.
    for length in [last_end - 1, data_start + 64, *reversed(range(0, data_start, 3))]:
        os.truncate(path, length)
        with pytest.raises(ModelFileError, match=r"^cut\.gguf: "):
            GGUFFile(path)


def test_single_flipped_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    whole = bytearray(tiny_gguf(tensors=tiny_tensors()[1::9]))  # the two norms
    rng = np.random.default_rng(5)
    for position in rng.integers(0, len(whole), 1500):
        before, whole[position] = whole[position], rng.integers(0, 256)
        try:
            _open(tmp_path, whole).close()
        except ModelFileError as error:
            assert "some.gguf" in str(error)
        whole[position] = before


def test_a_file_that_shrinks_after_opening_gives_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny_gguf())
    with GGUFFile(path) as file:
        info = file.tensors["blk.0.ffn_up.weight"]
        os.truncate(path, info.offset + 100)
        with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight: ends at byte"):
            file.read(info)


def test_nothing_is_mapped_while_a_file_is_open() -> None:
    path = default_model_path()
    with GGUFFile(path) as file:
        file.read(file.tensors["token_embd.weight"])
        assert path.name not in Path("/proc/self/maps").read_text()


def test_strings_longer_than_one_read_ahead_are_found(tmp_path: Path) -> None:
    long = ["x" * 3_000_000, "y", "z" * 5_000_000, "end"]
    with _open(tmp_path, Forged([value_pair("list", long), value_pair("after", 7)]).build()) as file:
        listed = file.metadata["list"]
        assert isinstance(listed, StringArray) and listed.to_list() == long
        assert file.metadata["after"] == 7


def test_invalid_utf8_in_an_array_names_the_entry(tmp_path: Path) -> None:
    raw = struct.pack("<IQ", STRING, 2) + string("fine") + string(b"\xff")
    with _open(tmp_path, Forged([pair("list", ARRAY, raw)]).build()) as file:
        listed = file.metadata["list"]
        assert isinstance(listed, StringArray) and listed[0] == "fine"
        with pytest.raises(ModelFileError, match=r"list\[1\] is not valid UTF-8"):
            listed[1]
        with pytest.raises(ModelFileError, match="list"):
            listed.to_list()


def test_other_than_regular_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match=r"pipe\.gguf: is not a regular file"):
        GGUFFile(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match=r"none\.gguf: cannot be opened"):
        GGUFFile(tmp_path / "none.gguf")


def test_the_default_model_reads_as_with_the_gguf_package() -> None:
    reference = gguf.GGUFReader(default_model_path())
    with GGUFFile(default_model_path()) as file:
        assert set(file.tensors) == {tensor.name for tensor in reference.tensors}
        for tensor in reference.tensors:
            info = file.tensors[tensor.name]
            assert info.offset == tensor.data_offset and info.num_bytes == tensor.n_bytes
            assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, StringArray)
        assert tokens.to_list() == reference.fields["tokenizer.ggml.tokens"].contents()


def test_type_names_and_sizes_are_those_of_the_gguf_package() -> None:
    from worker.quant.gguf_formats import FORMATS, GGML_TYPE_NAMES, SUPPORTED_TYPES

    for kind in gguf.GGMLQuantizationType:
        if kind.value in GGML_TYPE_NAMES:
            assert GGML_TYPE_NAMES[kind.value] == kind.name
    assert set(SUPPORTED_TYPES.values()) == set(FORMATS)
    for number, name in SUPPORTED_TYPES.items():
        info = FORMATS[name]
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (info.block, info.block_bytes)
    assert SUPPORTED_TYPES[F32] == "f32"
