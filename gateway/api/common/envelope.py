"""Parts of a response around its choices: the envelope, what it reports about tokens, and the frame of its chunks."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gateway.api.common.logprobs import TokenBytes, TokenNames, prompt_logprobs
from gateway.http.errors import dump_json
from gateway.http.sse import DONE, LARGE_REPORT, data_event, failure
from shared.errors import PeltonError
from shared.messages import TokenLogprobs, WorkerFacts


@dataclass(slots=True)
class Tally:
    """Token counts for `usage`.

    Attributes:
        num_prompt_tokens: Tokens of all prompts, each counted once whatever its number of choices.
        num_completion_tokens: Tokens of all choices.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_reasoning_tokens: Tokens of reasoning; None if reasoning is not separated from the content.
        num_accepted_tokens: Drafted tokens in the completions.
        num_rejected_tokens: Drafted tokens that were rejected; no other count includes them.
    """

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int | None = None
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        details = {
            "accepted_prediction_tokens": self.num_accepted_tokens,
            "rejected_prediction_tokens": self.num_rejected_tokens,
        }
        if self.num_reasoning_tokens is not None:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": details,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Fields that all chunks and the whole response of a request share.

    Attributes:
        identifier: Id of the response.
        created: Unix time in seconds.
        model: The model's name as the client sent it.
        fingerprint: OpenAI's `system_fingerprint`.
        tier: Service tier that was used; None if the request named none.
        metadata: The request's metadata, repeated in whole responses.
        include_usage: True if a stream ends with a usage chunk.
        continuous_usage: True if every chunk of a stream has the usage so far.
    """

    identifier: str
    created: int
    model: str
    fingerprint: str
    tier: str | None = None
    metadata: Mapping[str, str] | None = None
    include_usage: bool = False
    continuous_usage: bool = False

    def chunk(self, kind: str) -> dict[str, Any]:
        """Return the fields of a chunk whose `object` is `kind`."""
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
        """Return a whole response whose `object` is `kind`."""
        metadata = {} if self.metadata is None else {"metadata": self.metadata}
        return {**self.chunk(kind), "choices": choices, "usage": usage, **metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Settings on what a response reports besides its text.

    Attributes:
        token_bytes: Function that returns the bytes of a token id.
        logprobs: Number of alternatives shown for each generated token; None omits log-probabilities.
        prompt_logprobs: Number of alternatives shown for each prompt token, in vLLM's shape; None omits them.
        token_ids: True if the ids of prompt and output are shown.
        as_token_ids: True if log-probabilities name tokens as `token_id:N`.
        prompts: Token ids of each prompt.
        reasoning: True if reasoning is shown.
    """

    token_bytes: TokenBytes
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    as_token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()
    reasoning: bool = True

    @property
    def names(self) -> TokenNames:
        """Names of tokens in log-probabilities."""
        return TokenNames(self.token_bytes, as_token_ids=self.as_token_ids)


async def shaped_prompt_logprobs(
    entries: Sequence[TokenLogprobs], num_shown: int, detail: Detail
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` of a response; a large report is converted in a thread."""
    if len(entries) < LARGE_REPORT:
        return prompt_logprobs(entries, num_shown, detail.token_bytes)
    return await asyncio.to_thread(prompt_logprobs, entries, num_shown, detail.token_bytes)


def fingerprint(facts: WorkerFacts) -> str:
    """Return OpenAI's `system_fingerprint`, a hash of the weights, their format and Pelton's version."""
    return _fingerprint(facts.model_hash, facts.bundle_hash, facts.dtype, facts.device)


@lru_cache(64)
def _fingerprint(*parts: str) -> str:
    text = "\0".join((importlib.metadata.version("pelton"), *parts))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


class ChunkEncoder:
    """Base class of the encoders of chunks.

    A chunk is `head(index)`, the content, and `tail`. JSON around the content is encoded once for each choice, not for
    each token.

    Args:
        envelope: Shared fields of the chunks.
        tally: Counts for the usage.
        kind: `object` of the chunks.
        opening: JSON between a choice's index and the content, such as `"text":`.

    Attributes:
        heads: Heads of the choices that have had a chunk.
    """

    __slots__ = ("_envelope", "_fields", "_opening", "_tail", "_tally", "heads")

    def __init__(self, envelope: Envelope, tally: Tally, *, kind: str, opening: bytes) -> None:
        self._envelope = envelope
        self._fields = envelope.chunk(kind)
        self._tally = tally
        self._opening = opening
        self._tail = (b',"usage":null' if envelope.include_usage else b"") + b"}\n\n"
        self.heads: dict[int, bytes] = {}

    @property
    def tail(self) -> bytes:
        """End of the chunk after the list of choices. It changes if every chunk has the usage."""
        if self._envelope.continuous_usage:
            return b',"usage":' + dump_json(self._tally.usage()) + b"}\n\n"
        return self._tail

    def head(self, index: int) -> bytes:
        """Return the chunk up to the content of choice `index`."""
        head = self.heads.get(index)
        if head is None:
            head = b"data: " + dump_json(self._fields)[:-1] + b',"choices":[{"index":%d,' % index + self._opening
            self.heads[index] = head
        return head

    def end(self) -> bytes:
        """Return the usage chunk, if the request asks for it, and the end marker."""
        if not self._envelope.include_usage:
            return DONE
        return data_event({**self._fields, "choices": [], "usage": self._tally.usage()}) + DONE

    def failed(self, error: PeltonError) -> bytes:
        """Return the error event and the end marker."""
        return failure(error)
