"""POST /v1/completions: the route, the best of several choices, and prompts that are filled in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gateway.api.common.fan_in import FanIn, open_events
from gateway.api.common.fields import CompletionFields, invalid, parse_fields, unsupported
from gateway.api.common.grammar import request_grammar
from gateway.api.common.options import RequestOptions, completion_options, max_text_tokens
from gateway.api.common.prepare import find_model
from gateway.api.common.prepared import PreparedRequest, build_request
from gateway.api.common.prompts import (
    DEFAULT_MAX_TOKENS,
    MAX_TOTAL_CHOICES,
    Prompt,
    SizedPrompt,
    check_token_ids,
    encode_prompt,
    fit_prompt,
    split_prompts,
)
from gateway.api.common.resumable import stream
from gateway.api.openai.completion_shapes import Choices, CompletionChunks, whole_completion_response
from gateway.flow.events import TextDelta
from gateway.flow.outbox import merged
from gateway.http.app_keys import IDENTITY, SERVICES
from gateway.http.body import read_json
from gateway.http.errors import json_response
from gateway.text.pipeline import TextPipeline
from shared.errors import InvalidRequestError

_ANCHOR = "\u263a"
"""Character in front of a text that continues another: some tokenizers add a space at the start of a text."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or streamed; choice index = prompt index * n + choice."""
    fields = parse_fields(await read_json(request), CompletionFields)
    prepared = await prepare_completion(request, fields)
    envelope, options = prepared.envelope, prepared.options
    choices = Choices(await _echoes(fields, prepared) if fields.echo else None, prepared.detail)
    if fields.stream:
        return await stream(request, prepared, lambda tally: CompletionChunks(envelope, tally, choices))
    async with open_events(request, prepared) as events:
        shown: AsyncIterator[tuple[int, int, TextDelta]] = events
        if options.best_of > options.n and options.beams is None:
            shown = best_choices(events, options.best_of, options.n)
        num_choices = len(prepared.prompts) * options.n
        return json_response(await whole_completion_response(envelope, num_choices, shown, events.tally, choices))


async def prepare_completion(request: web.Request, fields: CompletionFields) -> PreparedRequest:
    """Run the pipeline of gateway.api.common.prepare for plain prompts.

    Raises:
        InvalidRequestError: A field is invalid; the error names it.
        ContextLengthError: A prompt exceeds the context.
        ModelNotFoundError: No model has the name.
    """
    entry = find_model(request, fields.model)
    # An empty suffix is no suffix for models that cannot fill in the middle.
    suffix = None if fields.suffix == "" and _fill_in_marks(entry.pipeline) is None else fields.suffix
    options = completion_options(fields, suffix, request[IDENTITY], request.app[SERVICES].salts)
    texts = split_prompts(fields.prompt)
    _check_num_choices(len(texts), options)
    grammar = await request_grammar(fields, None, entry, request.app[SERVICES].grammars, is_chat=False)
    special, max_tokens = fields.add_special_tokens is not False, max_text_tokens(fields, entry.facts)
    prompts: list[SizedPrompt] = []
    stop_token_ids: tuple[int, ...] = ()
    for index, text in enumerate(texts):
        param = f"prompt[{index}]" if len(texts) > 1 else "prompt"
        if suffix is None:
            ids = await encode_prompt(text, entry, param, add_special_tokens=special, max_tokens=max_tokens)
        else:
            if not isinstance(text, str):
                check_token_ids(text, entry.facts, param)
            filled = await fill_in_middle(
                text, suffix, entry.pipeline, add_special_tokens=special, max_tokens=max_tokens, param=param
            )
            ids, stop_token_ids = filled.token_ids, filled.end_ids
        if not ids:
            raise invalid(param, "has no tokens.")
        prompts.append(fit_prompt(ids, options, DEFAULT_MAX_TOKENS, entry, param))
    return await build_request(
        request, options, entry, prompts, "cmpl-", grammar=grammar, stop_token_ids=stop_token_ids
    )


def _check_num_choices(num_prompts: int, options: RequestOptions) -> None:
    if (total := num_prompts * options.best_of) > MAX_TOTAL_CHOICES:
        param = "n" if options.best_of == options.n else "best_of"
        message = (
            f"{num_prompts} prompts with {param} = {options.best_of} are {total} choices; "
            f"at most {MAX_TOTAL_CHOICES} are allowed."
        )
        raise InvalidRequestError(message, param=param)


async def _echoes(fields: CompletionFields, prepared: PreparedRequest) -> list[str]:
    """Return the text of each prompt as the model reads it."""
    return [
        text
        if isinstance(text, str) and fields.truncate_prompt_tokens is None
        else await asyncio.to_thread(prepared.entry.pipeline.decode, prompt.token_ids, False)
        for text, prompt in zip(split_prompts(fields.prompt), prepared.prompts, strict=True)
    ]


async def best_choices(events: FanIn, best_of: int, n: int) -> AsyncIterator[tuple[int, int, TextDelta]]:
    """Yield for each prompt the n choices with the highest mean log-probability, best first, as one event each.

    The usage counts all `best_of` choices, as OpenAI's does.
    """
    deltas: dict[int, list[TextDelta]] = {}
    async for index, _, delta in events:
        deltas.setdefault(index, []).append(delta)
    for prompt_index in range(len(deltas) // best_of):
        indices = range(prompt_index * best_of, (prompt_index + 1) * best_of)
        report = next((one.prompt_logprobs for index in indices for one in deltas[index] if one.prompt_logprobs), None)
        for rank, index in enumerate(sorted(indices, key=events.mean_logprob, reverse=True)[:n]):
            delta = msgspec.structs.replace(
                merged(deltas[index]), choice=rank, prompt_logprobs=None if rank else report
            )
            yield prompt_index * n + rank, prompt_index, delta


@dataclass(frozen=True, slots=True)
class _FillInMarks:
    """Tokens that a family of models was trained with to fill in the middle (Bavarian et al. 2022, arXiv:2207.14255).

    Attributes:
        prefix: Mark before the prefix.
        suffix: Mark before the suffix.
        middle: Mark before the completion; None if the suffix comes first.
        ends: Further tokens that end the completion, if the model has them.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark is not None)


_FAMILIES = (
    # Qwen's coders, CodeGemma, Granite 4
    _FillInMarks(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>",
        "<|file_separator|>", "<|repo_name|>"),
    ),
    # StarCoder, Granite, SantaCoder
    _FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    _FillInMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder, whose "hole" is the mark before the suffix
    _FillInMarks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # CodeLlama
    _FillInMarks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    # Codestral
    _FillInMarks("[PREFIX]", "[SUFFIX]", None),
)  # fmt: skip


def _fill_in_marks(pipeline: TextPipeline) -> _FillInMarks | None:
    """Return the marks of the model's family, which its vocabulary identifies; None if it has none."""
    return next((one for one in _FAMILIES if all(pipeline.token_id(mark) is not None for mark in one.marks)), None)


@dataclass(frozen=True, slots=True)
class FilledPrompt:
    """Prompt to fill in the middle.

    Attributes:
        token_ids: Token ids of the whole prompt.
        end_ids: Tokens that end the completion.
    """

    token_ids: list[int]
    end_ids: tuple[int, ...]


async def fill_in_middle(
    prompt: Prompt,
    suffix: str,
    pipeline: TextPipeline,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    param: str = "prompt",
) -> FilledPrompt:
    """Return the prompt for the text between `prompt` and `suffix`.

    Args:
        prompt: Text or token ids before the completion.
        suffix: Text after the completion.
        pipeline: The model's tokenizer.
        add_special_tokens: True to start with the model's beginning-of-text token.
        max_tokens: Limit on the length of each text.
        param: The field that holds the prompt.

    Raises:
        InvalidRequestError: The model was not trained to fill in the middle.
    """
    family = _fill_in_marks(pipeline)
    if family is None:
        raise unsupported(
            "suffix", "is not supported by this model: its vocabulary has no fill-in-the-middle tokens. Leave it out."
        )
    before = prompt
    if isinstance(before, str):
        before = await pipeline.encode(before, False, max_tokens=max_tokens, param=param)
    # The anchor keeps the tokenizer from adding a space to the suffix; it is cut off again.
    anchor = await pipeline.encode(_ANCHOR, False)
    after = await pipeline.encode(_ANCHOR + suffix, False, max_tokens=max_tokens, param="suffix")
    if after[: len(anchor)] == anchor:
        after = after[len(anchor) :]
    else:
        after = await pipeline.encode(suffix, False, max_tokens=max_tokens, param="suffix")
    marks = {mark: pipeline.token_id(mark) or 0 for mark in family.marks}
    opening = await pipeline.encode("", True) if add_special_tokens else []
    if family.middle is None:
        ids = [*opening, marks[family.suffix], *after, marks[family.prefix], *before]
    else:
        ids = [*opening, marks[family.prefix], *before, marks[family.suffix], *after, marks[family.middle]]
    ends = [token_id for text in family.ends if (token_id := pipeline.token_id(text)) is not None]
    return FilledPrompt(ids, (*ends, *marks.values()))
