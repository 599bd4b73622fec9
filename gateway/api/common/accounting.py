"""OpenAI's fields that say who asks and at what urgency, not what is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.api.common.fields import RequestFields
from gateway.api.common.ranges import check_range
from shared.errors import InvalidRequestError

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_LENGTHS = {"safety_identifier": 128, "prompt_cache_key": 64}
TIER_PRIORITIES = {"auto": 0, "default": 0, "flex": 1000, "priority": -1000, "fast": -1000}
"""Service tier -> scheduling priority; lower runs first."""
_SHOWN_TIERS = {"auto": "default", "fast": "priority"}
"""How the response calls a tier, where OpenAI has another word for it than in the request."""
RETENTIONS = ("in_memory", "in-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Attributes:
    priority: of scheduling; lower runs first.
    tier: the service tier used, where the request named one.
    metadata: to be echoed.
    affinity: requests with the same one rather go to the same worker.
    """

    priority: int = 0
    tier: str | None = None
    metadata: Mapping[str, str] | None = None
    affinity: str = ""


def accounting(fields: RequestFields) -> Accounting:
    """Checks the fields as OpenAI documents them. Raises InvalidRequestError naming the one at fault."""
    priority = check_range("priority", fields.priority or 0, -(2**31), 2**31 - 1)
    tier = fields.service_tier
    if tier is not None:
        if tier not in TIER_PRIORITIES:
            message = f"service_tier must be one of {', '.join(TIER_PRIORITIES)}."
            raise InvalidRequestError(message, param="service_tier")
        if fields.priority is not None:
            raise InvalidRequestError("service_tier and priority say the same: send one.", param="service_tier")
        priority = TIER_PRIORITIES[tier]
        tier = _SHOWN_TIERS.get(tier, tier)
    if fields.store:
        raise InvalidRequestError(
            "store must be false: nothing is stored here.", param="store", code="unsupported_parameter"
        )
    _check_metadata(fields.metadata)
    for name, longest in MAX_LENGTHS.items():
        value = getattr(fields, name)
        if value is not None and not 1 <= len(value) <= longest:
            raise InvalidRequestError(f"{name} must have 1 to {longest} characters.", param=name)
    if fields.prompt_cache_retention not in (None, *RETENTIONS):
        raise InvalidRequestError(
            "prompt_cache_retention must be in_memory: nothing is kept longer.",
            param="prompt_cache_retention",
            code="unsupported_parameter",
        )
    return Accounting(
        priority=priority, tier=tier, metadata=fields.metadata or None, affinity=fields.prompt_cache_key or ""
    )


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_PAIRS:
        message = f"metadata has {len(metadata)} pairs; at most {MAX_METADATA_PAIRS} are allowed."
        raise InvalidRequestError(message, param="metadata")
    for key, value in metadata.items():
        if not 1 <= len(key) <= MAX_METADATA_KEY:
            message = f"The keys of metadata must have 1 to {MAX_METADATA_KEY} characters."
            raise InvalidRequestError(message, param="metadata")
        if len(value) > MAX_METADATA_VALUE:
            message = f"The values of metadata must have at most {MAX_METADATA_VALUE} characters."
            raise InvalidRequestError(message, param="metadata")
