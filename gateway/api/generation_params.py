"""Fields of a request to SamplingParams and GenerationRequest."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gateway.api.params import ChatFields, CompletionFields, SamplingFields
from gateway.auth import Identity
from gateway.flow.events import GenerationRequest
from gateway.flow.salt import Salts
from shared.errors import InvalidRequestError
from shared.messages import MAX_CHOICES
from shared.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CACHE_SALT = 256
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What is the same for each prompt of a request.

    Attributes:
        grammar: what every choice must spell; gateway.api.output_grammar makes it when the model is known, and the
            route puts it here with dataclasses.replace.
    """

    fields: SamplingFields
    identity: Identity
    n: int
    stop: tuple[str, ...]
    salt: bytes
    logit_bias: dict[int, float]
    wanted_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_usage: bool
    seed: int
    grammar: str = ""

    def generation_request(
        self, request_id: str, prompt_token_ids: list[int], max_tokens: int, vocab_size: int
    ) -> GenerationRequest:
        """One prompt's request; raises InvalidRequestError where a sampling parameter is out of its range."""
        fields = self.fields
        return GenerationRequest(
            request_id=request_id,
            model=fields.model,
            prompt_token_ids=prompt_token_ids,
            sampling=self._sampling(max_tokens, vocab_size),
            n=self.n,
            stop=self.stop,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            salt=self.salt,
            tenant=self.identity.tenant,
            priority=fields.priority or 0,
            grammar=self.grammar,
        )

    def _sampling(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        fields = self.fields
        sampling = SamplingParams(
            temperature=_or(fields.temperature, 1.0),
            top_k=0 if fields.top_k in (None, -1) else fields.top_k,
            top_p=_or(fields.top_p, 1.0),
            min_p=_or(fields.min_p, 0.0),
            repetition_penalty=_or(fields.repetition_penalty, 1.0),
            presence_penalty=_or(fields.presence_penalty, 0.0),
            frequency_penalty=_or(fields.frequency_penalty, 0.0),
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        sampling.validate(vocab_size)
        return sampling


def common_of_chat(fields: ChatFields, identity: Identity, salts: Salts) -> Common:
    """Checks what needs no model. Of max_tokens and max_completion_tokens, where both are given, the smaller holds."""
    given = [
        _in_range(name, value, 1, _MAX_INT32)
        for name, value in (("max_tokens", fields.max_tokens), ("max_completion_tokens", fields.max_completion_tokens))
        if value is not None
    ]
    if fields.top_logprobs is not None:
        _in_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
        if not fields.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _common(
        fields, identity, salts, wanted_tokens=min(given, default=None), logprobs=logprobs, prompt_logprobs=None
    )


def common_of_completion(fields: CompletionFields, identity: Identity, salts: Salts) -> Common:
    """Checks what needs no model."""
    if fields.max_tokens is not None:
        _in_range("max_tokens", fields.max_tokens, 1, _MAX_INT32)
    if fields.logprobs is not None:
        _in_range("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        raise InvalidRequestError(
            "best_of is supported only where it equals n.", param="best_of", code="unsupported_parameter"
        )
    prompt_logprobs = fields.logprobs if fields.echo else None
    return _common(
        fields,
        identity,
        salts,
        wanted_tokens=fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _common(
    fields: SamplingFields,
    identity: Identity,
    salts: Salts,
    *,
    wanted_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Common:
    n = 1 if fields.n is None else _in_range("n", fields.n, 1, MAX_CHOICES)
    if fields.top_k is not None:
        _in_range("top_k", fields.top_k, -1, _MAX_INT32)
    if fields.min_tokens is not None:
        _in_range("min_tokens", fields.min_tokens, 0, _MAX_INT32)
    if fields.priority is not None:
        _in_range("priority", fields.priority, -(2**31), _MAX_INT32)
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= MAX_CACHE_SALT:
        raise InvalidRequestError(f"cache_salt must have 1 to {MAX_CACHE_SALT} characters.", param="cache_salt")
    logit_bias = _logit_bias(fields.logit_bias)
    return Common(
        fields=fields,
        identity=identity,
        n=n,
        stop=_stop(fields.stop),
        salt=salts.derive(identity.key_hash, fields.cache_salt),
        logit_bias=logit_bias,
        wanted_tokens=wanted_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_usage=_include_usage(fields),
        seed=random.getrandbits(63) if fields.seed is None else fields.seed,
    )


def _include_usage(fields: SamplingFields) -> bool:
    options = fields.stream_options
    if options is None:
        return False
    if not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
    if options.continuous_usage_stats:
        param = "stream_options.continuous_usage_stats"
        raise InvalidRequestError(f"{param} is not supported yet.", param=param, code="unsupported_parameter")
    return bool(options.include_usage)


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop"
        )
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(f"Each stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop")
    return strings


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        # Only ASCII digits: int() would also take "+1", "1_0", " 1" and other scripts' digits.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError("The keys of logit_bias must be token ids in decimal digits.", param="logit_bias")
        result[int(key)] = bias
    return result


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        shown = str(value) if abs(value) < 2**63 else "a number beyond 64 bits"
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {shown}.", param=name)
    return value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
