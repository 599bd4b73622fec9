"""What opening a model gives."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Bundle
from worker.model.loading.weights import WeightSource
from worker.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: everything known, no weight read yet.

    Attributes:
        weights: reads tensors on request; `weights.close()` when all are loaded.
        eos_token_ids: the union of every place in which the model declares them; the same as spec.eos_token_ids.
        default_name: name for clients where none is configured.
        created: Unix time of the model file.
        model_hash: equal for equal weights and configuration (sampled).
    """

    spec: DecoderSpec
    weights: WeightSource
    bundle: Bundle
    eos_token_ids: tuple[int, ...]
    default_name: str
    created: int
    model_hash: str
