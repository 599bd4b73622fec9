"""Fields of a request to SamplingParams and GenerationRequest."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from gateway.api.common.accounting import Accounting, accounting
from gateway.api.common.beam_params import beam_params
from gateway.api.common.fields import ChatFields, CompletionFields, RequestFields, SamplingFields
from gateway.api.common.ranges import MAX_INT32, check_range
from gateway.api.common.sampling_fields import NO_WORDS, WordIds, sampling_values
from gateway.api.common.speculation import may_draft
from gateway.flow.beam_state import BeamParams
from gateway.flow.events import GenerationRequest
from gateway.flow.salt import Salts
from gateway.http.auth import Identity
from gateway.text.message_parser import MessageFormat
from gateway.text.stop_regex import check_stop_regexes
from shared.errors import InvalidRequestError
from shared.messages import MAX_CHOICES
from shared.sampling_params import MAX_LOGPROBS, SamplingParams, ThinkingBudget

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CACHE_SALT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What is the same for each prompt of a request.

    Attributes:
        n: choices of the response.
        best_of: choices that are generated, of which the response shows the n best.
        sampling: arguments for SamplingParams that need no model.
        wanted_tokens: max_tokens as the client sent it; 0: the prompt is scored and nothing is shown of a completion.
        logprobs, prompt_logprobs: what the worker is asked for.
        shown_logprobs, shown_prompt_logprobs: what the response shows, of prompts in `prompt_logprobs`.
        beams: of beam search; None: tokens are sampled.
        include_usage: whether a stream ends with its usage; continuous_usage: whether each chunk has it so far.
        resumable: whether a stream survives its connection.
        words: what sampling needs of the vocabulary; gateway.api.common.submission fills it in.
        prediction: token ids of what the client expects the output to be; likewise.
        grammar: what every choice must spell; gateway.api.common.output_grammar makes it when the model is known, and
        the
            route puts it here with dataclasses.replace, as it does with `format` and `thinking`.
        format: how the model's text is taken apart.
        thinking: bounds the reasoning.
    """

    fields: SamplingFields
    identity: Identity
    n: int
    best_of: int
    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    salt: bytes
    logit_bias: dict[int, float]
    sampling: dict[str, Any]
    wanted_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    shown_logprobs: int | None
    shown_prompt_logprobs: int | None
    beams: BeamParams | None
    include_usage: bool
    continuous_usage: bool
    resumable: bool
    seed: int
    accounting: Accounting
    words: WordIds = NO_WORDS
    prediction: list[int] = field(default_factory=list)
    grammar: str = ""
    format: MessageFormat | None = None
    thinking: ThinkingBudget | None = None

    @property
    def scores_only(self) -> bool:
        """Whether the completion is thrown away: the worker knows no request without one."""
        return self.wanted_tokens == 0

    def generation_request(
        self, request_id: str, prompt_token_ids: list[int], max_tokens: int, vocab_size: int
    ) -> GenerationRequest:
        """One prompt's request; raises InvalidRequestError where a sampling parameter is out of its range."""
        fields = self.fields
        return GenerationRequest(
            request_id=request_id,
            model=fields.model,
            prompt_token_ids=prompt_token_ids,
            sampling=self._sampling(max(max_tokens, 1), vocab_size),
            n=self.best_of if self.beams is None else self.n,
            stop=self.stop,
            stop_regex=self.stop_regex,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            salt=self.salt,
            tenant=self.identity.tenant,
            priority=self.accounting.priority,
            affinity=self.accounting.affinity,
            grammar=self.grammar,
            format=self.format,
            speculative=may_draft(fields),
            prediction=self.prediction,
        )

    def _sampling(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        sampling = SamplingParams(
            **self.sampling,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            bad_words=self.words.bad_words,
            dry_breakers=self.words.dry_breakers,
            thinking=self.thinking,
        )
        sampling.validate(vocab_size)
        return sampling


def common_of_chat(fields: ChatFields, identity: Identity, salts: Salts) -> Common:
    """Checks what needs no model. Of max_tokens and max_completion_tokens, where both are given, the smaller holds."""
    given = [
        check_range(name, value, 1, MAX_INT32)
        for name, value in (("max_tokens", fields.max_tokens), ("max_completion_tokens", fields.max_completion_tokens))
        if value is not None
    ]
    if fields.top_logprobs is not None:
        check_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
        if not fields.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if fields.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens goes with completions; a chat template adds its own.", param="add_special_tokens"
        )
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    n = _num_choices(fields)
    return _common(
        fields,
        identity,
        salts,
        n=n,
        best_of=n,
        wanted_tokens=min(given, default=None),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )


def common_of_completion(fields: CompletionFields, identity: Identity, salts: Salts) -> Common:
    """Checks what needs no model. max_tokens may be 0 where the response shows something of the prompt."""
    if fields.max_tokens is not None:
        shows_prompt = fields.echo or fields.prompt_logprobs is not None
        check_range("max_tokens", fields.max_tokens, 0 if shows_prompt else 1, MAX_INT32)
        if fields.max_tokens == 0:
            _check_nothing_is_asked_of_the_completion(fields)
    if fields.logprobs is not None:
        check_range("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    n = _num_choices(fields)
    best_of = n if fields.best_of is None else check_range("best_of", fields.best_of, 1, MAX_CHOICES)
    if best_of < n:
        raise InvalidRequestError(f"best_of must be at least n = {n}, got {best_of}.", param="best_of")
    if best_of > n and fields.stream:
        raise InvalidRequestError(
            "best_of cannot be streamed: which choices are best is known at the end.", param="best_of"
        )
    if fields.suffix is not None and fields.echo:
        raise InvalidRequestError("echo cannot be combined with suffix.", param="echo")
    if fields.suffix is not None and fields.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise InvalidRequestError(f"{name} cannot be combined with suffix: it would cut the marks off.", param=name)
    echoed = fields.logprobs if fields.echo else None
    return _common(
        fields,
        identity,
        salts,
        n=n,
        best_of=best_of,
        wanted_tokens=fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=_larger(echoed, fields.prompt_logprobs),
    )


def _common(
    fields: SamplingFields,
    identity: Identity,
    salts: Salts,
    *,
    n: int,
    best_of: int,
    wanted_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Common:
    check_request_fields(fields)
    _check_text_fields(fields)
    include_usage, continuous_usage = _usage_options(fields)
    logit_bias = _logit_bias(fields.logit_bias)
    stop = _stop(fields.stop)
    return Common(
        fields=fields,
        identity=identity,
        n=n,
        best_of=best_of,
        stop=stop,
        stop_regex=check_stop_regexes(fields.stop_regex, stop),
        salt=salts.derive(identity.key_hash, fields.cache_salt),
        logit_bias=logit_bias,
        sampling=sampling_values(fields),
        wanted_tokens=wanted_tokens,
        # The best of several choices are found by their log-probabilities.
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=prompt_logprobs,
        shown_logprobs=logprobs,
        shown_prompt_logprobs=fields.prompt_logprobs,
        beams=beam_params(fields, n, best_of),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        resumable=bool(fields.stream_options and fields.stream_options.resumable),
        seed=random.getrandbits(63) if fields.seed is None else fields.seed,
        accounting=accounting(fields),
    )


def _check_nothing_is_asked_of_the_completion(fields: CompletionFields) -> None:
    for name, given in (
        ("min_tokens", bool(fields.min_tokens)),
        ("best_of", fields.best_of not in (None, 1)),
        ("suffix", fields.suffix is not None),
        ("use_beam_search", bool(fields.use_beam_search)),
    ):
        if given:
            raise InvalidRequestError(f"{name} cannot be combined with max_tokens = 0.", param=name)


def _num_choices(fields: SamplingFields) -> int:
    return 1 if fields.n is None else check_range("n", fields.n, 1, MAX_CHOICES)


def _check_text_fields(fields: SamplingFields) -> None:
    """What is shown of a prompt, and of special tokens."""
    if fields.prompt_logprobs is not None:
        check_range("prompt_logprobs", fields.prompt_logprobs, 0, MAX_LOGPROBS)
        if fields.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    if fields.spaces_between_special_tokens is False:
        raise InvalidRequestError(
            "spaces_between_special_tokens cannot be false: text is what its tokens spell.",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )


def check_request_fields(fields: RequestFields) -> None:
    """What is said of caching and of a prompt, but for its length, which the model decides.

    Raises InvalidRequestError naming the field at fault.
    """
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= MAX_CACHE_SALT:
        raise InvalidRequestError(f"cache_salt must have 1 to {MAX_CACHE_SALT} characters.", param="cache_salt")
    if fields.truncate_prompt_tokens is not None:
        check_range("truncate_prompt_tokens", fields.truncate_prompt_tokens, -1, MAX_INT32)
        if fields.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1, for what fits, or at least 1.", param="truncate_prompt_tokens"
            )
    if fields.truncation_side not in (None, "left", "right"):
        raise InvalidRequestError("truncation_side must be left or right.", param="truncation_side")
    if fields.truncation_side is not None and fields.truncate_prompt_tokens is None:
        raise InvalidRequestError("truncation_side goes with truncate_prompt_tokens.", param="truncation_side")


def _usage_options(fields: SamplingFields) -> tuple[bool, bool]:
    """Whether a stream ends with a chunk of its usage, and whether every chunk has what it is so far."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequestError(
            "stream_options.include_obfuscation must be false: chunks are not padded.",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    continuous = bool(options.continuous_usage_stats)
    return continuous if options.include_usage is None else options.include_usage, continuous


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


def _larger(first: int | None, second: int | None) -> int | None:
    given = [value for value in (first, second) if value is not None]
    return max(given, default=None)
