"""Last stage of the pipeline of a generating request: the prepared request, built once and only read afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aiohttp import web

from gateway.api.common.envelope import Detail, Envelope, fingerprint
from gateway.api.common.fields import ChatFields, CompletionFields, PredictionField, SamplingFields, invalid
from gateway.api.common.messages import BREAKPOINT, check_breakpoint
from gateway.api.common.options import RequestOptions
from gateway.api.common.prompts import SizedPrompt, check_token_ids, context_limit
from gateway.api.common.sampling import word_values
from gateway.cluster.registry import ModelEntry
from gateway.flow.events import GenerationRequest
from gateway.http.app_keys import SERVICES
from gateway.stores.ids import new_id
from gateway.text.message_parser import MessageFormat
from shared.errors import ContextLengthError, InvalidRequestError
from shared.messages import WorkerFacts
from shared.sampling_params import SamplingParams, ThinkingBudget

MAX_PROMPT_LOGPROBS = 1_048_576
"""Limit on log-probabilities of prompt tokens in a response: 20 alternatives for some 50,000 tokens."""
_OFF = "off"
"""WorkerFacts.speculative_method of a server without speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Checked request with everything that is needed to run it and to answer it.

    Attributes:
        options: Options of the request.
        entry: The model.
        envelope: Fields around the choices of the response.
        detail: Settings on what the response reports about tokens.
        prompts: Prompts, each with its budget.
        generations: One request to a worker for each prompt.
    """

    options: RequestOptions
    entry: ModelEntry
    envelope: Envelope
    detail: Detail
    prompts: Sequence[SizedPrompt]
    generations: Sequence[GenerationRequest]


async def build_request(
    request: web.Request,
    options: RequestOptions,
    entry: ModelEntry,
    prompts: Sequence[SizedPrompt],
    id_prefix: str,
    *,
    grammar: str = "",
    message_format: MessageFormat | None = None,
    thinking: ThinkingBudget | None = None,
    stop_token_ids: Sequence[int] = (),
) -> PreparedRequest:
    """Run the last stage: build the requests to workers and check their sampling parameters.

    Args:
        request: The HTTP request.
        options: Options of the request.
        entry: The model.
        prompts: Prompts with their budgets.
        id_prefix: Prefix of the response's id.
        grammar: Grammar of every choice; empty allows any output.
        message_format: Parsers of reasoning and tool calls; None if the output is plain text.
        thinking: Bound on reasoning.
        stop_token_ids: Token ids that stop generation, in addition to those of the request.
    """
    fields = options.fields
    _check_report_size(options, prompts)
    sampling = await _sampling_of_prompts(options, entry, prompts, thinking, stop_token_ids)
    speculative, prediction = may_draft(fields), await prediction_ids(fields, entry)
    detail = _detail(options, entry, prompts)
    envelope = _envelope(options, entry, id_prefix, request.app[SERVICES].gateway_index)
    generations = [
        GenerationRequest(
            request_id=f"{envelope.identifier}-{index}",
            model=fields.model,
            prompt_token_ids=prompt.token_ids,
            sampling=params,
            n=options.best_of if options.beams is None else options.n,
            stop=options.stop,
            stop_regex=options.stop_regex,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            skip_special_tokens=fields.skip_special_tokens is not False,
            salt=options.salt,
            tenant=options.tenant,
            priority=options.priority,
            affinity=fields.prompt_cache_key or "",
            grammar=grammar,
            format=message_format,
            speculative=speculative,
            prediction=prediction,
        )
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    return PreparedRequest(
        options=options, entry=entry, envelope=envelope, detail=detail, prompts=prompts, generations=generations
    )


async def _sampling_of_prompts(
    options: RequestOptions,
    entry: ModelEntry,
    prompts: Sequence[SizedPrompt],
    thinking: ThinkingBudget | None,
    stop_token_ids: Sequence[int],
) -> list[SamplingParams]:
    fields = options.fields
    values: dict[str, Any] = {"thinking": thinking}
    if fields.bad_words or fields.dry_multiplier:
        values |= await word_values(fields, entry.pipeline)
    if stop_token_ids:
        values["stop_token_ids"] = tuple(dict.fromkeys((*(fields.stop_token_ids or ()), *stop_token_ids)))
    sampling: list[SamplingParams] = []
    for prompt in prompts:
        if sampling:
            await asyncio.sleep(0)  # hundreds of prompts with long lists of ids must not block the event loop
        sampling.append(sampling_params(options, prompt.max_tokens, entry.facts.vocab_size, values))
    return sampling


def _detail(options: RequestOptions, entry: ModelEntry, prompts: Sequence[SizedPrompt]) -> Detail:
    fields = options.fields
    return Detail(
        token_bytes=entry.pipeline.token_bytes,
        logprobs=options.shown_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        token_ids=bool(fields.return_token_ids),
        as_token_ids=bool(fields.return_tokens_as_token_ids),
        prompts=[prompt.token_ids for prompt in prompts],
        reasoning=not isinstance(fields, ChatFields) or fields.include_reasoning is not False,
    )


def _envelope(options: RequestOptions, entry: ModelEntry, id_prefix: str, gateway_index: int) -> Envelope:
    return Envelope(
        identifier=new_id(id_prefix, gateway_index),
        created=int(time.time()),
        model=options.fields.model,
        fingerprint=fingerprint(entry.facts),
        tier=options.tier,
        metadata=options.fields.metadata or None,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
    )


def sampling_params(
    options: RequestOptions, max_tokens: int, vocab_size: int, values: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the sampling parameters of one prompt.

    Args:
        options: Options of the request.
        max_tokens: Budget of the prompt.
        vocab_size: Size of the model's vocabulary.
        values: Arguments of SamplingParams that depend on the model; they replace those of `options.sampling`.

    Raises:
        InvalidRequestError: A parameter is out of its range.
    """
    params = SamplingParams(**{**options.sampling, **values, "max_tokens": max(max_tokens, 1)})
    params.validate(vocab_size)
    return params


def _check_report_size(options: RequestOptions, prompts: Sequence[SizedPrompt]) -> None:
    """Bound the response: completions repeat the report on a prompt for each choice, which could be gigabytes."""
    fields, shown = options.fields, options.fields.prompt_logprobs
    num_repeats = 1
    per_token = 0 if shown is None else shown + 1
    if isinstance(fields, CompletionFields):
        num_repeats = options.n
        if fields.echo and fields.logprobs is not None:
            per_token += fields.logprobs + 1
    num_values = sum(len(prompt.token_ids) for prompt in prompts) * per_token * num_repeats
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"The response would have {num_values} log-probabilities of prompt tokens; at most {MAX_PROMPT_LOGPROBS} "
            "are allowed. Ask for fewer alternatives, choices or prompts.",
            param="logprobs" if shown is None else "prompt_logprobs",
        )


def may_draft(fields: SamplingFields) -> bool:
    """Return True if the request allows drafts."""
    return fields.speculative is None or fields.speculative.enabled


async def prediction_ids(fields: SamplingFields, entry: ModelEntry) -> list[int]:
    """Check the fields and return the token ids of the predicted output, without a beginning-of-text token.

    Raises:
        InvalidRequestError: A field asks for drafts where there are none, or the prediction exceeds the context.
    """
    if fields.speculative is not None and fields.speculative.enabled:
        _check_effect(fields, entry.facts, "speculative", "cannot be enabled")
    prediction = fields.prediction if isinstance(fields, ChatFields) else None
    if prediction is None:
        return []
    _check_shape(prediction)
    if not may_draft(fields):
        raise invalid("prediction", "cannot be combined with speculative.enabled = false. Send one of them.")
    _check_effect(fields, entry.facts, "prediction", "cannot be used")
    limit = context_limit(entry.facts)
    content = prediction.content
    text = content if isinstance(content, str) else "".join([part.text for part in content])
    too_long = InvalidRequestError(
        f"prediction has more than {limit} tokens, the limit on prompt and output together. Shorten it.",
        param="prediction",
    )
    try:
        ids = await entry.pipeline.encode(text, False, max_tokens=limit, param="prediction")
    except ContextLengthError:
        # Its message is about the prompt, and clients that recognize the error would shorten that.
        raise too_long from None
    if len(ids) > limit:
        raise too_long
    check_token_ids(ids, entry.facts, "prediction")
    return ids


def _check_shape(prediction: PredictionField) -> None:
    if prediction.type != "content":
        raise invalid("prediction.type", 'must be "content".')
    if isinstance(prediction.content, str):
        return
    if not prediction.content:
        raise invalid("prediction.content", "must be a string or a non-empty list of text parts.")
    for index, part in enumerate(prediction.content):
        place = f"prediction.content[{index}]"
        if part.type != "text":
            raise invalid(f"{place}.type", 'must be "text"; other parts are not supported.')
        check_breakpoint({BREAKPOINT: part.prompt_cache_breakpoint}, place)


def _check_effect(fields: SamplingFields, facts: WorkerFacts, name: str, problem: str) -> None:
    if facts.speculative_method == _OFF:
        raise invalid(
            name,
            f"{problem}: this server does not use speculative decoding (--speculative-method is off).",
            "unsupported_parameter",
        )
    if fields.mirostat in (1, 2):
        raise invalid(name, f"{problem} with mirostat, which excludes speculative decoding.")
