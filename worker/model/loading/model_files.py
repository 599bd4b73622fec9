"""Result of opening a model."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Bundle
from worker.model.loading.weights import WeightSource
from worker.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """An opened model: all properties are known, and no weight has been read.

    Attributes:
        spec: Specification of the model.
        weights: Reader of tensors; call `weights.close()` when all are loaded.
        bundle: Text bundle for gateways.
        bundle_hash: Hash of the bundle.
        eos_token_ids: Union of all places in which the model declares them; the same as spec.eos_token_ids.
        default_name: Name for clients if none is configured.
        created: Unix time of the model file.
        model_hash: Equal for equal weights and configuration (sampled).
    """

    spec: DecoderSpec
    weights: WeightSource
    bundle: Bundle
    eos_token_ids: tuple[int, ...]
    default_name: str
    created: int
    model_hash: str
