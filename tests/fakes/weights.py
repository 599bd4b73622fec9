"""In-memory weights and batches for tests of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from worker.model.forward_batch import ForwardBatch
from worker.model.loading.model_files import WeightSource
from worker.quant.raw_weight import RawWeight
from worker.quant.select import LinearScheme

Scheme = TypeVar("Scheme", bound=LinearScheme)

_HF_NAMES = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}


class MemoryWeights(WeightSource):
    """float32 tensors by canonical name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.detach().float() for name, tensor in tensors.items()}

    @classmethod
    def from_transformers(cls, model: torch.nn.Module) -> MemoryWeights:
        """Return the weights of a Llama-like transformers model."""
        return cls({_canonical(name): tensor for name, tensor in model.state_dict().items()})

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, *, rows: slice | None = None, cols: slice | None = None) -> RawWeight:
        tensor = self.tensors[name]
        if rows is not None:
            tensor = tensor[rows]
        if cols is not None:
            tensor = tensor[:, cols]
        return RawWeight("f32", tuple(tensor.shape), tensor.contiguous())

    def close(self) -> None:
        pass


def load_scheme(scheme: Scheme, raws: Sequence[RawWeight], orders: Sequence[torch.Tensor | None] = ()) -> Scheme:
    """Load the concatenated parts of a layer, each with its rows in the given order, and return the scheme."""
    scheme.create_weights(sum(raw.shape[0] for raw in raws), raws[0].shape[1])
    start = 0
    for i, raw in enumerate(raws):
        scheme.load_rows(start, raw, orders[i] if orders else None)
        start += raw.shape[0]
    scheme.after_load()
    return scheme


def _canonical(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        module, leaf = rest.rsplit(".", 1)
        return f"layers.{layer}.{_HF_NAMES[module]}.{leaf}"
    return {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
    }[name]


def make_batch(
    requests: list[tuple[list[int], int, list[int]]],
    page_size: int,
    logits: str = "all",
) -> ForwardBatch:
    """Return a batch of (token ids to compute, position of the first, pages of the request).

    The logits are those of "all" tokens or of the "last" token of each request.
    """
    input_ids, positions, slots, bounds, lengths = [], [], [], [0], []
    for ids, start, pages in requests:
        for position, token in enumerate(ids, start):
            input_ids.append(token)
            positions.append(position)
            slots.append(pages[position // page_size] * page_size + position % page_size)
        bounds.append(len(input_ids))
        lengths.append(start + len(ids))
    width = max(len(pages) for _, _, pages in requests)
    tables = [pages + [0] * (width - len(pages)) for _, _, pages in requests]
    wanted = list(range(len(input_ids))) if logits == "all" else [end - 1 for end in bounds[1:]]
    return ForwardBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=(torch.tensor(slots, dtype=torch.int64),),
        block_tables=(torch.tensor(tables, dtype=torch.int32),),
        logits_indices=torch.tensor(wanted, dtype=torch.int64),
        max_seqlen_q=max(len(ids) for ids, _, _ in requests),
        max_seqlen_k=max(lengths),
    )


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Return the batch with its tensors on the device."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.to(device)
        elif isinstance(value, tuple):
            changes[field.name] = tuple(one.to(device) if isinstance(one, torch.Tensor) else one for one in value)
    return dataclasses.replace(batch, **changes)
