"""Options of a generating request: its fields, checked as far as no model is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.api.common.fields import (
    MAX_INT32,
    ChatFields,
    CompletionFields,
    RequestFields,
    SamplingFields,
    check_choice,
    check_length,
    check_range,
    invalid,
    unsupported,
)
from gateway.api.common.sampling import beam_params, sampling_values
from gateway.flow.beam_state import BeamParams
from gateway.flow.salt import Salts
from gateway.http.auth import Identity
from gateway.text.stop_regex import check_stop_regexes
from shared.messages import MAX_CHOICES, WorkerFacts
from shared.sampling_params import MAX_LOGPROBS

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
_LENGTHS = {"cache_salt": 256, "safety_identifier": 128, "prompt_cache_key": 64}
"""Maximum number of characters of each text field. Empty texts are refused."""
_RANGES = {
    "best_of": (1, MAX_CHOICES),
    "logprobs": (0, MAX_LOGPROBS),
    "max_completion_tokens": (1, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
    "n": (1, MAX_CHOICES),
    "priority": (-(2**31), MAX_INT32),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "top_k": (-1, MAX_INT32),
    "top_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, MAX_INT32),
}
"""Smallest and largest value of integer fields whose range does not depend on the kind of request."""
TIER_PRIORITIES = {"auto": 0, "default": 0, "flex": 1000, "priority": -1000, "fast": -1000}
"""Scheduling priority of each service tier; lower runs first."""
_TIERS_IN_RESPONSES = {"auto": "default", "fast": "priority"}
"""Service tiers that OpenAI names differently in responses than in requests."""
_MAX_TRUNCATED = 131_072
"""Length up to which a prompt is tokenized to be truncated, if eight contexts are not longer."""
RETENTIONS = ("in_memory", "in-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Checked options of a request, the same for each of its prompts.

    Attributes:
        fields: The fields as the client sent them.
        tenant: Name of the client.
        n: Number of choices in the response.
        best_of: Number of choices that are generated; the response has the n best of them.
        stop: Stop strings.
        stop_regex: Regular expressions that stop generation.
        salt: Salt of the prefix cache.
        sampling: Arguments of SamplingParams that need no model.
        max_tokens: Limit on generated tokens as the client sent it; 0 scores the prompt without generating.
        clamps: True if a limit that exceeds the context is reduced to what fits, instead of refused.
        shown_logprobs: Number of alternatives in the response; None omits log-probabilities.
        beams: Parameters of beam search; None samples tokens.
        include_usage: True if the stream ends with a usage chunk.
        continuous_usage: True if every chunk has the usage so far.
        resumable: True if the stream survives its connection.
        priority: Scheduling priority; lower runs first.
        tier: Service tier as the response names it; None if the request names none.
    """

    fields: SamplingFields
    tenant: str
    n: int
    best_of: int
    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    salt: bytes
    sampling: dict[str, Any]
    max_tokens: int | None
    clamps: bool
    shown_logprobs: int | None
    beams: BeamParams | None
    include_usage: bool
    continuous_usage: bool
    resumable: bool
    priority: int
    tier: str | None

    @property
    def scores_only(self) -> bool:
        """True if the completion is discarded: a worker always generates at least one token."""
        return self.max_tokens == 0


def chat_options(
    fields: ChatFields, identity: Identity, salts: Salts, clamped_max_tokens: int | None = None
) -> RequestOptions:
    """Check the fields of a chat request.

    Args:
        fields: The parsed body. If both max_tokens and max_completion_tokens are given, the smaller one holds.
        identity: The client.
        salts: Source of the prefix cache's salt.
        clamped_max_tokens: Limit that is reduced to what fits the context and may be 0; replaces the fields' limits.
    """
    check_request_fields(fields)
    if fields.max_tokens is not None:
        check_range("max_tokens", fields.max_tokens, 1, MAX_INT32)
    limits = [limit for limit in (fields.max_tokens, fields.max_completion_tokens) if limit is not None]
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "requires logprobs to be true.")
    if fields.add_special_tokens:
        raise invalid("add_special_tokens", "must not be true for chat: the chat template adds the special tokens.")
    clamps = clamped_max_tokens is not None
    return _options(
        fields,
        identity,
        salts,
        best_of=None,
        max_tokens=clamped_max_tokens if clamps else min(limits, default=None),
        clamps=clamps,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
    )


def completion_options(
    fields: CompletionFields, suffix: str | None, identity: Identity, salts: Salts
) -> RequestOptions:
    """Check the fields of a completion request. max_tokens may be 0 if the response shows something of the prompt.

    Args:
        fields: The parsed body.
        suffix: Text after the completion; None if the model continues the prompt.
        identity: The client.
        salts: Source of the prefix cache's salt.
    """
    check_request_fields(fields)
    if fields.max_tokens is not None:
        shows_prompt = fields.echo or fields.prompt_logprobs is not None
        check_range("max_tokens", fields.max_tokens, 0 if shows_prompt else 1, MAX_INT32)
        if fields.max_tokens == 0:
            for name, given in (
                ("min_tokens", bool(fields.min_tokens)),
                ("best_of", fields.best_of not in (None, 1)),
                ("suffix", suffix is not None),
                ("use_beam_search", bool(fields.use_beam_search)),
            ):
                if given:
                    raise invalid(name, "cannot be combined with max_tokens = 0.")
    if fields.best_of is not None:
        if fields.best_of < (fields.n or 1):
            raise invalid("best_of", f"must be at least n = {fields.n}, got {fields.best_of}.")
        if fields.best_of > (fields.n or 1) and fields.stream:
            raise invalid("best_of", "must equal n if stream is true: the best choices are known only at the end.")
    if suffix is not None and fields.echo:
        raise invalid("echo", "cannot be combined with suffix.")
    if suffix is not None and fields.truncate_prompt_tokens is not None:
        raise invalid(
            "truncate_prompt_tokens",
            "cannot be combined with suffix: truncation would remove the fill-in-the-middle tokens.",
        )
    echoed = fields.logprobs if fields.echo else None
    return _options(
        fields,
        identity,
        salts,
        best_of=fields.best_of,
        max_tokens=fields.max_tokens,
        clamps=False,
        logprobs=fields.logprobs,
        prompt_logprobs=max((value for value in (echoed, fields.prompt_logprobs) if value is not None), default=None),
    )


def _options(
    fields: SamplingFields,
    identity: Identity,
    salts: Salts,
    *,
    best_of: int | None,
    max_tokens: int | None,
    clamps: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> RequestOptions:
    n = 1 if fields.n is None else fields.n
    best_of = n if best_of is None else best_of
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "cannot be streamed.")
    if fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "must be true: text is exactly what the tokens decode to.")
    include_usage, continuous_usage = _usage_options(fields)
    priority, tier = accounting(fields)
    stop = _stop(fields.stop)
    return RequestOptions(
        fields=fields,
        tenant=identity.tenant,
        n=n,
        best_of=best_of,
        stop=stop,
        stop_regex=() if fields.stop_regex is None else check_stop_regexes(fields.stop_regex, stop),
        sampling={
            **sampling_values(fields),
            # The best of several choices are found by their log-probabilities.
            "logprobs": 0 if logprobs is None and best_of > n else logprobs,
            "prompt_logprobs": prompt_logprobs,
        },
        beams=beam_params(fields, n, best_of),
        max_tokens=max_tokens,
        clamps=clamps,
        shown_logprobs=logprobs,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        resumable=bool(fields.stream_options and fields.stream_options.resumable),
        priority=priority,
        tier=tier,
        salt=salts.derive(identity.key_hash, fields.cache_salt),
    )


def check_request_fields(fields: RequestFields) -> None:
    """Check lengths, ranges and the truncation fields, except for limits that depend on the model.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
    """
    for name, (low, high) in _RANGES.items():
        number = getattr(fields, name, None)
        if number is not None and not isinstance(number, bool):  # `logprobs` of chat is a bool
            check_range(name, number, low, high)
    for name, longest in _LENGTHS.items():
        if (text := getattr(fields, name)) is not None:
            check_length(name, text, longest)
    if fields.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 to keep what fits.")
    if fields.truncation_side not in (None, "left", "right"):
        raise invalid("truncation_side", 'must be "left" or "right".')
    if fields.truncation_side is not None and fields.truncate_prompt_tokens is None:
        raise invalid("truncation_side", "requires truncate_prompt_tokens.")


def max_text_tokens(fields: RequestFields, facts: WorkerFacts) -> int:
    """Return the number of tokens above which a text is refused before it is tokenized and truncated."""
    if fields.truncate_prompt_tokens is None:
        return facts.max_model_len
    return max(8 * facts.max_model_len, _MAX_TRUNCATED)


def accounting(fields: RequestFields) -> tuple[int, str | None]:
    """Check the accounting fields as OpenAI documents them.

    Returns:
        The scheduling priority, and the service tier as the response names it; None if the request names none.
    """
    priority, tier = fields.priority or 0, fields.service_tier
    if tier is not None:
        check_choice("service_tier", tier, TIER_PRIORITIES)
        if fields.priority is not None:
            raise invalid(
                "service_tier", "cannot be combined with priority: it sets the priority itself. Send one of them."
            )
        priority = TIER_PRIORITIES[tier]
        tier = _TIERS_IN_RESPONSES.get(tier, tier)
    if fields.store:
        raise unsupported("store", "must be false: only /v1/responses stores its results.")
    if len(fields.metadata or ()) > MAX_METADATA_PAIRS:
        raise invalid("metadata", f"has {len(fields.metadata or ())} pairs; at most {MAX_METADATA_PAIRS} are allowed.")
    for key, value in (fields.metadata or {}).items():
        if not 1 <= len(key) <= MAX_METADATA_KEY:
            raise invalid("metadata", f"must have keys of 1 to {MAX_METADATA_KEY} characters.")
        if len(value) > MAX_METADATA_VALUE:
            raise invalid("metadata", f"must have values of at most {MAX_METADATA_VALUE} characters.")
    if fields.prompt_cache_retention not in (None, *RETENTIONS):
        raise unsupported("prompt_cache_retention", "must be in_memory: the prefix cache is in memory only.")
    return priority, tier


def _usage_options(fields: SamplingFields) -> tuple[bool, bool]:
    """Return (include_usage, continuous_usage)."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise invalid("stream_options", "requires stream to be true.")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "must be false: chunks are not padded.")
    continuous = bool(options.continuous_usage_stats)
    return continuous if options.include_usage is None else options.include_usage, continuous


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.")
    if not all(1 <= len(string) <= MAX_STOP_LENGTH for string in strings):
        raise invalid("stop", f"must have strings of 1 to {MAX_STOP_LENGTH} characters.")
    return strings
