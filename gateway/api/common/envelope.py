"""What surrounds the choices of a response, and what a response tells of its tokens."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gateway.api.common.logprobs import TokenBytes, TokenNames, prompt_logprobs
from gateway.http.sse import LARGE_REPORT
from shared.messages import TokenLogprobs, WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all chunks and the whole response of a request have in common.

    Attributes:
        created: Unix time in seconds.
        fingerprint: of model and server; equal where the same request can give the same answer.
        tier: the service tier used, where the request named one.
        metadata: the request's; echoed in whole responses.
    """

    identifier: str
    created: int
    model: str
    fingerprint: str
    tier: str | None = None
    metadata: Mapping[str, str] | None = None

    def chunk(self, kind: str) -> dict[str, Any]:
        """The fields of a chunk whose `object` is `kind`."""
        tier = {} if self.tier is None else {"service_tier": self.tier}
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **tier,
        }

    def whole(self, kind: str, choices: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        """A whole response."""
        metadata = {} if self.metadata is None else {"metadata": self.metadata}
        return {**self.chunk(kind), "choices": choices, "usage": usage, **metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """What a response tells of its tokens, beside their text.

    Attributes:
        logprobs: how many alternatives are shown for each generated token; None: no log-probabilities.
        prompt_logprobs: the same for each prompt token, in vLLM's shape.
        token_ids: whether ids of prompt and output are shown.
        as_token_ids: whether log-probabilities name tokens as `token_id:N`.
        prompts: the ids of each prompt.
    """

    token_bytes: TokenBytes
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    as_token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()

    @property
    def names(self) -> TokenNames:
        """How log-probabilities name tokens."""
        return TokenNames(self.token_bytes, as_token_ids=self.as_token_ids)


async def shaped_prompt_logprobs(
    entries: Sequence[TokenLogprobs], wanted: int, detail: Detail
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a response, in a thread where there are many."""
    if len(entries) < LARGE_REPORT:
        return prompt_logprobs(entries, wanted, detail.token_bytes)
    return await asyncio.to_thread(prompt_logprobs, entries, wanted, detail.token_bytes)


def fingerprint(facts: WorkerFacts) -> str:
    """OpenAI's `system_fingerprint`: stable while weights, their format and Pelton's version are."""
    return _fingerprint(facts.model_hash, facts.bundle_hash, facts.dtype, facts.device)


@lru_cache(64)
def _fingerprint(*parts: str) -> str:
    text = "\0".join((importlib.metadata.version("pelton"), *parts))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
