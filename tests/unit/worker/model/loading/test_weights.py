"""Values and slices of every weight format, against the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.unit.worker.model.loading.forge import Tensor, tiny_gguf, tiny_tensors
from worker.model.loading import ModelFiles, open_model
from worker.quant.gguf_formats import FORMATS, PLAIN_DTYPES, WeightFormat, dequantize, row_bytes

QUANTIZED: list[WeightFormat] = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]


def _values(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((rows, columns), dtype=np.float32)


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_bytes_decode_as_with_the_gguf_package(name: WeightFormat) -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (40, 3, FORMATS[name].block_bytes), dtype=np.uint8)
    # Scales and minimums that are finite: exponents of float16 below the top.
    blocks[..., 1] &= 0x3B
    if name in ("q4_1", "q5_1"):
        blocks[..., 3] &= 0x3B
    packed = blocks.reshape(40, -1)
    assert packed.shape[1] == row_bytes(name, 96)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[name.upper()])
    assert torch.equal(dequantize(name, torch.from_numpy(packed), torch.float32), torch.from_numpy(expected))


def test_rows_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="33"):
        row_bytes("q4_1", 33)


def _model_with_up(tmp_path: Path, name: WeightFormat) -> tuple[ModelFiles, torch.Tensor]:
    """A tiny model whose up projection [96, 64] is in the format, and its values."""
    values = _values(96, 64)
    kind = gguf.GGMLQuantizationType[name.upper()]
    packed = gguf.quantize(values, kind)
    tensors = [one for one in tiny_tensors() if one.name != "blk.0.ffn_up.weight"]
    tensors.append(Tensor("blk.0.ffn_up.weight", (64, 96), packed.tobytes(), kind=int(kind)))
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(tiny_gguf(tensors=tensors))
    expected = values if name == "f32" else gguf.dequantize(packed, kind)
    return open_model(str(path), tmp_path / "cache"), torch.from_numpy(np.ascontiguousarray(expected))


@pytest.mark.parametrize("name", list(FORMATS))
def test_slices_are_slices_of_the_whole(tmp_path: Path, name: WeightFormat) -> None:
    files, expected = _model_with_up(tmp_path, name)
    source, up = files.weights, "layers.0.up.weight"
    whole = source.get(up)
    assert whole.format == name and whole.shape == source.shape(up) == (96, 64)
    assert whole.data.dtype == PLAIN_DTYPES.get(name, torch.uint8)
    assert torch.equal(whole.dequantize(torch.float32), expected)
    cases = [(slice(0, 48), None), (slice(48, 96), slice(32, 64)), (None, slice(0, 32)), (slice(3, 4), slice(5, 40))]
    for rows, cols in cases:
        part = source.get(up, rows=rows, cols=cols)
        wanted = expected[rows or slice(None)][:, cols or slice(None)]
        assert part.shape == tuple(wanted.shape)
        assert part.data.is_contiguous()
        assert torch.equal(part.dequantize(torch.float32), wanted)
    at_blocks = source.get(up, cols=slice(32, 64))
    assert at_blocks.format == name
    inside = source.get(up, cols=slice(5, 40))
    assert inside.format == (name if name in PLAIN_DTYPES else "f32")
    vector = source.get("norm.weight", rows=slice(8, 16))
    assert torch.equal(vector.data, source.get("norm.weight").data[8:16])
    with pytest.raises(ValueError, match="step"):
        source.get(up, rows=slice(0, 8, 2))
    with pytest.raises(KeyError):
        source.get("layers.9.up.weight")


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    files, expected = _model_with_up(tmp_path, "f32")
    weight = files.weights.get("layers.0.up.weight")
    files.weights.close()
    (tmp_path / "f32.gguf").write_bytes(b"")
    assert torch.equal(weight.data, expected)
