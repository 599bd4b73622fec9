"""The fields `speculative` and `prediction`; gateway.api.common.speculation says what they mean."""

from __future__ import annotations

from typing import Any

import msgspec


class SpeculativeField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`{"enabled": false}`: nothing is drafted for the request."""

    enabled: bool


class PredictedPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`{"type": "text", "text": ...}`."""

    type: str
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class PredictionField(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's predicted output: `{"type": "content", "content": ...}`."""

    type: str
    content: str | list[PredictedPart]
