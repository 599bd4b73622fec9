"""Writes GGUF files byte by byte, so that tests can also write wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def value_pair(key: str, value: object) -> bytes:
    """A metadata pair whose type follows from the value."""
    if isinstance(value, bool):
        return pair(key, BOOL, bytes([value]))
    if isinstance(value, int):
        return pair(key, UINT32, struct.pack("<I", value))
    if isinstance(value, float):
        return pair(key, FLOAT32, struct.pack("<f", value))
    if isinstance(value, str):
        return pair(key, STRING, string(value))
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return pair(key, ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(string(one) for one in value))
    kind, code = (FLOAT32, "f") if isinstance(value[0], float) else (INT32, "i")
    return pair(key, ARRAY, struct.pack(f"<IQ{len(value)}{code}", kind, len(value), *value))


@dataclass
class Tensor:
    """One tensor; `dimensions` are in the file's order, fastest first."""

    name: str | bytes
    dimensions: Sequence[int]
    data: bytes = b""
    kind: int = F32
    offset: int | None = None
    num_dimensions: int | None = None


@dataclass
class Forged:
    """A GGUF file in parts; counts and offsets that are not given are the right ones."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    num_pairs: int | None = None
    num_tensors: int | None = None

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        out = b"GGUF" + struct.pack("<IQQ", self.version, num_tensors, num_pairs) + b"".join(self.pairs)
        body = b""
        for tensor in self.tensors:
            count = len(tensor.dimensions) if tensor.num_dimensions is None else tensor.num_dimensions
            offset = len(body) if tensor.offset is None else tensor.offset
            out += string(tensor.name) + struct.pack("<I", count)
            out += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
            out += struct.pack("<IQ", tensor.kind, offset)
            body += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return out + b"\0" * (-len(out) % self.alignment) + body


def f32_tensor(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, tuple(reversed(array.shape)), array.astype("<f4").tobytes())


BYTE_TOKENS = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))] + [
    chr(256 + i) for i in range(68)
]
TINY_METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "<|im_end|>", "<extra>", *BYTE_TOKENS, "he"],
    "tokenizer.ggml.token_type": [3, 3, 4, *([1] * (len(BYTE_TOKENS) + 1))],
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}
TINY_VOCAB = len(BYTE_TOKENS) + 4


def tiny_tensors(seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (TINY_VOCAB, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
        "output_norm.weight": (64,),
    }
    return [f32_tensor(name, rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()]


def tiny_gguf(changes: dict[str, object] | None = None, tensors: list[Tensor] | None = None, version: int = 3) -> bytes:
    """A Llama of one layer; `changes` to the metadata: None removes a key."""
    metadata = {**TINY_METADATA, **(changes or {})}
    pairs = [value_pair(key, value) for key, value in metadata.items() if value is not None]
    return Forged(pairs, tiny_tensors() if tensors is None else tensors, version=version).build()
