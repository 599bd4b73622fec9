"""The GGUF reader: good files, and every way in which a file can be wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path

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
    value_pair,
)
from worker.model.loading import default_model_path
from worker.model.loading.gguf_reader import GGUFFile, StringArray

HUGE = 2**63


def _open(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "some.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def _one_tensor(**fields: object) -> Forged:
    values: dict[str, object] = {"name": "weight", "dimensions": (32,), "data": bytes(128)}
    return Forged(tensors=[Tensor(**{**values, **fields})])


def _with_pair(*pairs: bytes) -> Forged:
    return Forged(list(pairs), [Tensor("weight", (32,), bytes(128))])


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other magic": (b"GGML" + bytes(64), "not a GGUF file"),
    "version 1": (Forged(version=1).build(), "version 1"),
    "big endian": (Forged(version=0x03000000).build(), "big endian"),
    "n_tensors": (Forged(num_tensors=HUGE).build(), f"claims {HUGE} tensors"),
    "n_kv": (Forged(num_pairs=HUGE).build(), f"claims {HUGE} metadata keys"),
    "dims wrap 32": (_one_tensor(dimensions=(2**32, 2**32)).build(), "weight has the impossible dimensions"),
    "dims wrap 61": (_one_tensor(dimensions=(2**61,)).build(), "weight would end at byte"),
    "dims wrap 64": (_one_tensor(dimensions=(2**62, 4)).build(), "weight has the impossible dimensions"),
    "dim 0": (_one_tensor(dimensions=(32, 0)).build(), "weight has the impossible dimensions"),
    "dim negative": (_one_tensor(dimensions=(2**64 - 1,)).build(), "weight has the impossible dimensions"),
    "large matrix": (_one_tensor(dimensions=(65536, 65536)).build(), "weight would end at byte"),
    "no dimensions": (_one_tensor(dimensions=()).build(), "weight has 0 dimensions"),
    "5 dimensions": (_one_tensor(dimensions=(2, 1, 1, 1, 1)).build(), "weight has 5 dimensions"),
    "2^31 dimensions": (_one_tensor(num_dimensions=2**31).build(), f"weight has {2**31} dimensions"),
    "offset beyond": (_one_tensor(offset=2**40).build(), "weight would end at byte"),
    "offset huge": (_one_tensor(offset=2**64 - 32).build(), "weight would end at byte"),
    "misaligned": (_one_tensor(offset=8, data=bytes(256)).build(), "weight is at offset 8"),
    "type unknown": (_one_tensor(kind=255).build(), "weight has the type number 255"),
    "type unsupported": (_one_tensor(kind=12).build(), "weight has the type Q4_K"),
    "type withdrawn": (_one_tensor(kind=4).build(), "weight has the type Q4_2"),
    "no whole block": (_one_tensor(kind=Q8_0, dimensions=(33,)).build(), "weight has rows of 33 values"),
    "name empty": (_one_tensor(name="").build(), "name of tensor number 0"),
    "name bytes": (_one_tensor(name=b"\xff\xfe").build(), "not valid UTF-8"),
    "same name": (Forged(tensors=[Tensor("w", (8,), bytes(32)), Tensor("w", (8,), bytes(32))]).build(), "w appears"),
    "overlap": (
        Forged(tensors=[Tensor("a", (16,), bytes(64)), Tensor("b", (16,), bytes(64), offset=32)]).build(),
        "tensors a and b overlap",
    ),
    "same place": (
        Forged(tensors=[Tensor("a", (8,), bytes(32)), Tensor("b", (8,), bytes(32), offset=0)]).build(),
        "overlap",
    ),
    "same key": (_with_pair(value_pair("k", 1), value_pair("k", 2)).build(), "k appears twice"),
    "alignment 0": (_with_pair(value_pair("general.alignment", 0)).build(), "general.alignment is 0"),
    "alignment 3": (_with_pair(value_pair("general.alignment", 3)).build(), "general.alignment is 3"),
    "alignment 2^32": (
        _with_pair(pair("general.alignment", UINT64, struct.pack("<Q", 2**32))).build(),
        "general.alignment is not a 32-bit",
    ),
    "alignment 2^31": (_with_pair(value_pair("general.alignment", 2**31)).build(), "general.alignment is 2147483648"),
    "alignment text": (_with_pair(value_pair("general.alignment", "32")).build(), "general.alignment is not a 32-bit"),
    "bool 7": (_with_pair(pair("flag", BOOL, b"\x07")).build(), "flag is a boolean with the value 7"),
    "bool array": (
        _with_pair(pair("flags", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\1\7")).build(),
        "flags is a bool",
    ),
    "value type": (_with_pair(pair("odd", 255, bytes(8))).build(), "odd has the unknown value type 255"),
    "element type": (_with_pair(pair("odd", ARRAY, struct.pack("<IQ", 255, 1))).build(), "odd has the unknown value"),
    "key bytes": (_with_pair(pair(b"\xc3\x28", UINT32, bytes(4))).build(), "not valid UTF-8"),
    "key empty": (_with_pair(pair("", UINT32, bytes(4))).build(), "has 0 bytes"),
    "key long": (_with_pair(pair("k" * 70_000, UINT32, bytes(4))).build(), "has 70000 bytes"),
    "value bytes": (_with_pair(pair("text", STRING, string(b"\xff"))).build(), "text is not valid UTF-8"),
    "string 2^64-1": (
        _with_pair(pair("text", STRING, struct.pack("<Q", 2**64 - 1))).build(),
        f"text needs {2**64 - 1} bytes",
    ),
    "token 2^31+5": (
        _with_pair(pair("tokens", ARRAY, struct.pack("<IQQ", STRING, 1, 2**31 + 5) + bytes(64))).build(),
        "tokens[0] needs",
    ),
    "array 2^62": (_with_pair(pair("many", ARRAY, struct.pack("<IQ", UINT32, 2**62))).build(), "many needs"),
    "strings 2^62": (_with_pair(pair("many", ARRAY, struct.pack("<IQ", STRING, 2**62))).build(), "many claims"),
    "nested 1000": (
        _with_pair(pair("deep", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000 + struct.pack("<IQ", UINT32, 0))).build(),
        "deep is an array of arrays",
    ),
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
        _open(tmp_path, _with_pair(pair("\x1b[2J" + "k" * 60_000, 255, bytes(8))).build())
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
    whole = tiny_gguf()
    path = tmp_path / "cut.gguf"
    last_end = len(whole)
    path.write_bytes(whole)
    with GGUFFile(path) as file:
        last_end = max(info.offset + info.num_bytes for info in file.tensors.values())
        data_start = min(info.offset for info in file.tensors.values())
    # Every 64 bytes, then each of the tensor table and of the metadata: the file only becomes shorter.
    for length in [last_end - 1, *reversed(range(data_start, last_end, 64)), *reversed(range(data_start))]:
        os.truncate(path, length)
        with pytest.raises(ModelFileError, match=r"^cut\.gguf: "):
            GGUFFile(path)


def overwrite(path: Path, position: int, value: int) -> None:
    """One byte: thousands of whole files would take long to write."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))


def test_single_flipped_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    whole = tiny_gguf()
    path = tmp_path / "flipped.gguf"
    path.write_bytes(whole)
    with GGUFFile(path) as file:
        data_start = min(info.offset for info in file.tensors.values())
    rng = np.random.default_rng(5)
    for position in rng.integers(0, data_start, 1500):
        overwrite(path, int(position), int(rng.integers(0, 256)))
        try:
            GGUFFile(path).close()
        except ModelFileError as error:
            assert "flipped.gguf" in str(error)
        overwrite(path, int(position), whole[position])
    assert path.read_bytes() == whole


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
