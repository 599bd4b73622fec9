"""GPTQ and AWQ checkpoints, packed here value by value, against the values they were made of."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import ModelFileError
from tests.unit.worker.model.loading.checkpoints import edited, opened, write_quantized
from worker.model.loading import ModelFiles

DOWN = "mlp.down_proj"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def pack(values: np.ndarray, bits: int, places: list[int]) -> np.ndarray:
    """[n, m] codes -> [n, m * bits / 32] int32; value j of a word lies at places[j], lowest first."""
    words = values.reshape(values.shape[0], -1, 32 // bits).astype(np.uint64)
    shifts = bits * np.array(places, dtype=np.uint64)
    return np.bitwise_or.reduce(words << shifts, axis=2).astype(np.uint32).view(np.int32)


class Made:
    """A quantized layer: random codes, zeros and scales, and what they are worth."""

    def __init__(self, out: int, num_in: int, bits: int, group: int, seed: int, shuffled: bool = False) -> None:
        rng = np.random.default_rng(seed)
        groups = num_in // group
        self.codes = rng.integers(0, 1 << bits, (out, num_in))
        self.zeros = rng.integers(1, 1 << bits, (out, groups))
        self.scales = rng.uniform(0.002, 0.02, (out, groups)).astype(np.float16)
        in_order = np.arange(num_in) // group
        self.group_of = of = rng.permutation(in_order) if shuffled else in_order
        self.values = torch.from_numpy((self.codes - self.zeros[:, of]) * self.scales[:, of].astype(np.float32)).float()

    def gptq(self, bits: int, offset: int) -> dict[str, np.ndarray]:
        in_order = list(range(32 // bits))
        return {
            "qweight": pack(self.codes, bits, in_order).T,
            "qzeros": pack((self.zeros - offset).T, bits, in_order),
            "scales": self.scales.T,
            "g_idx": self.group_of.astype(np.int32),
        }

    def awq(self) -> dict[str, np.ndarray]:
        places = [0, 4, 1, 5, 2, 6, 3, 7]
        codes, zeros = (pack(values.T, 4, places) for values in (self.codes, self.zeros))
        return {"qweight": codes, "qzeros": zeros, "scales": self.scales.T}


def write(
    folder: Path, config: dict[str, Any], leaves: Any, bits: int = 4, group: int = 32, shuffled: bool = False
) -> dict[str, torch.Tensor]:
    """Write a tiny model whose linear layers are quantized, and return the values of each by module name."""
    seeds = itertools.count()

    def quantize(module: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        out, num_in = values.shape
        made = Made(out, num_in, bits, num_in if group < 0 else group, next(seeds), shuffled)
        arrays = leaves(made)
        return {leaf: torch.from_numpy(np.ascontiguousarray(arrays[leaf])) for leaf in arrays}, made.values

    return write_quantized(folder, config, quantize)


def check_slices(files: ModelFiles, values: dict[str, torch.Tensor], kept: bool = True) -> None:
    """Whole weights and slices of them: along groups in their own format, within a group as values."""
    down = values[f"model.layers.1.{DOWN}"]
    name = "layers.1.down.weight"
    for rows, cols in ((None, None), (slice(8, 40), None), (slice(32, 64), slice(64, 128)), (None, slice(0, 32))):
        part = files.weights.get(name, rows=rows, cols=cols)
        wanted = down[rows or slice(None)][:, cols or slice(None)]
        assert part.shape == tuple(wanted.shape) and part.data.is_contiguous()
        assert part.plain == (cols is not None and not kept)
        torch.testing.assert_close(part.dequantize(torch.float32), wanted, rtol=0, atol=1e-6)
    within = files.weights.get(name, cols=slice(16, 48))
    assert within.format == "f32"
    torch.testing.assert_close(within.dequantize(torch.float32), down[:, 16:48], rtol=0, atol=1e-6)
    q = files.weights.get("layers.0.q.weight")
    torch.testing.assert_close(
        q.dequantize(torch.float32), values["model.layers.0.self_attn.q_proj"], rtol=0, atol=1e-6
    )
    order = torch.randperm(q.shape[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(q.take_rows(order).dequantize(torch.float32), q.dequantize(torch.float32)[order])
    assert not q.zero_rows(3).dequantize(torch.float32).any()


@pytest.mark.parametrize(
    ("bits", "version", "shuffled"),
    [(4, None, False), (8, "gptq", True), (4, "gptq_v2", True), (8, "gptq_v2", False)],
)
def test_gptq(tmp_path: Path, bits: int, version: str | None, shuffled: bool) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": shuffled}
    if version:
        config["checkpoint_format"] = version
    offset = 0 if version == "gptq_v2" else 1
    values = write(tmp_path / "m", config, lambda made: made.gptq(bits, offset), bits, 32, shuffled)
    files = opened(tmp_path / "m")
    assert files.weights.get("layers.0.up.weight").format == ("u4" if bits == 4 else "u8")
    check_slices(files, values, kept=not shuffled)


def test_gptq_with_one_group_and_without_g_idx(tmp_path: Path) -> None:
    def leaves(made: Made) -> dict[str, np.ndarray]:
        return {leaf: array for leaf, array in made.gptq(4, 1).items() if leaf != "g_idx"}

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    values = write(tmp_path / "m", config, leaves, group=-1)
    up = opened(tmp_path / "m").weights.get("layers.1.up.weight")
    assert up.extra["scale"].cols == 64
    torch.testing.assert_close(up.dequantize(torch.float32), values["model.layers.1.mlp.up_proj"], rtol=0, atol=1e-6)


def test_awq(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}
    values = write(tmp_path / "m", config, lambda made: made.awq())
    files = opened(tmp_path / "m")
    assert files.weights.get("layers.0.up.weight").format == "u4"
    check_slices(files, values)


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "m", GPTQ, lambda made: {**made.gptq(4, 1), "bias": np.zeros(made.codes.shape[0], np.float16)})
    assert "layers.0.q.bias" not in opened(tmp_path / "m").weights


def test_modules_that_were_left_out_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "m", GPTQ, lambda made: made.gptq(4, 1))
    with edited(tmp_path / "m") as tensors:
        prefix = "model.layers.0.self_attn.o_proj"
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{prefix}.{leaf}")
        tensors[f"{prefix}.weight"] = torch.ones(64, 64)
    assert opened(tmp_path / "m").weights.get("layers.0.o.weight").format == "f32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "quantization_config.bits is 3; supported are 4, 8"),
        ({"bits": "4"}, "quantization_config.bits is '4'"),
        ({"group_size": 0}, "quantization_config.group_size is 0"),
        ({"group_size": None}, "quantization_config.group_size is missing"),
        ({"group_size": 48}, "inputs are not a whole number of groups of 48"),
        ({"group_size": 64}, "qzeros has the shape"),
        ({"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits is 8"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version is 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point is false"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "m", {**GPTQ, **changes}, lambda made: made.gptq(4, 1))
    with pytest.raises(ModelFileError, match=re.escape(message)):
        opened(tmp_path / "m")


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("qzeros", None, "q_proj.qzeros is missing"),
        ("scales", torch.ones(2, 64, dtype=torch.int32), "q_proj.scales has the type I32"),
        ("scales", torch.full((2, 64), float("nan")).half(), "q_proj.scales holds nan; finite scales are needed"),
        ("scales", torch.full((2, 64), float("-inf")).half(), "q_proj.scales holds -inf; finite scales are needed"),
        ("qweight", torch.ones(9, 64, dtype=torch.int32), "inputs are not a whole number of groups of 32"),
        ("qweight", torch.ones(8, dtype=torch.int32), "not a packed matrix"),
        ("g_idx", torch.ones(9, dtype=torch.int32), "g_idx has the shape (9,)"),
        ("g_idx", torch.ones(64, dtype=torch.int32), "g_idx does not name groups of 32 inputs each"),
        ("bias", torch.ones(64), "q_proj.bias is not known"),
        ("weight", torch.ones(64, 64), "q_proj.weight is present both quantized and unquantized"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, leaf: str, value: torch.Tensor | None, message: str) -> None:
    write(tmp_path / "m", GPTQ, lambda made: made.gptq(4, 1))
    with edited(tmp_path / "m") as tensors:
        name = f"model.layers.0.self_attn.q_proj.{leaf}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    with pytest.raises(ModelFileError, match=re.escape(message)):
        opened(tmp_path / "m").weights.get("layers.0.q.weight")
