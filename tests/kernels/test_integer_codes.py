"""Instructions that unpack integer weights, which the interpreter cannot run, emulated here for every code."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kernels.common.triton import integer_codes

FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        byte = both >> np.uint64(8 * (selector >> (4 * i) & 7)) & np.uint64(0xFF)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def halves(words: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy()).view(FLOATS[kind]).float()


def packed(values: torch.Tensor, kind: str) -> np.ndarray:
    return values.to(FLOATS[kind]).view(torch.int32).numpy().view(np.uint32).copy()


def run_ptx(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run straight-line PTX on 32-bit registers, each an array over all inputs."""
    registers = dict(inputs)
    size = next(iter(inputs.values())).shape

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand in registers else np.full(size, int(operand, 0), dtype=np.uint32)

    for line in re.sub(r"[{}]", "", text).split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(" ", 1)
        target, *operands = (one.strip() for one in rest.split(","))
        if name == "mov.b32":
            registers[target] = value(operands[0])
        elif name == "shr.b32":
            registers[target] = value(operands[0]) >> np.uint32(int(operands[1]))
        elif name == "prmt.b32":
            registers[target] = prmt(value(operands[0]), value(operands[1]), int(operands[2], 16))
        elif name == "lop3.b32":
            x, y, z = (value(one) for one in operands[:3])
            registers[target] = lop3(x, y, z, int(operands[3], 16))
        elif name == "sub.f16x2":
            first, second = (halves(value(one), "f16") for one in operands)
            registers[target] = packed(first - second, "f16")
        elif name == "fma.rn.bf16x2":
            first, second, third = (halves(value(one), "bf16") for one in operands)
            registers[target] = packed(first * second + third, "bf16")
        else:
            pytest.fail(f"{name} is not emulated")
    return registers


@pytest.mark.parametrize(("kind", "bias"), [("bf16", 128), ("f16", 1024)])
def test_nibbles_are_unpacked_to_biased_floats(kind: str, bias: int) -> None:
    texts = (integer_codes.PAIRS_BF16 if kind == "bf16" else integer_codes.PAIRS_FP16).value
    words = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    for slot, text in enumerate(texts):
        out = halves(run_ptx(text, {"$1": words})["$0"], kind).view(-1, 2)
        codes = torch.from_numpy(words.view(np.uint16).astype(np.int64)).view(-1, 2) >> (4 * slot) & 15
        assert torch.equal(out, bias + codes.float())


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_bytes_are_unpacked_to_floats(kind: str) -> None:
    text = (integer_codes.BYTES_BF16 if kind == "bf16" else integer_codes.BYTES_FP16).value
    codes = torch.arange(1024).view(-1, 4) % 256
    codes[128:] = codes[128:].flip(1)
    words = codes.to(torch.uint8).numpy().view(np.uint32).reshape(-1)
    registers = run_ptx(text, {"$2": words})
    out = torch.cat([halves(registers[name], kind).view(-1, 2) for name in ("$0", "$1")], dim=1)
    assert torch.equal(out, codes.float() - 128)
