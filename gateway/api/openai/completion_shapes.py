"""Events of /v1/completions as a whole response or as chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.common.envelope import ChunkEncoder, Detail, Envelope, Tally, shaped_prompt_logprobs
from gateway.api.common.logprobs import CompletionLogprobs
from gateway.flow.events import TextDelta
from gateway.http.errors import dump_json
from gateway.http.sse import in_thread_if_large
from shared.messages import TokenLogprobs

_PLAIN = b',"logprobs":null,"finish_reason":null}]'


@dataclass(frozen=True, slots=True)
class Shown:
    """Part of a choice that one event adds.

    Attributes:
        text: Text of the choice.
        logprobs: Log-probabilities in OpenAI's shape; None if the request does not ask for them.
        token_ids: Generated token ids; None if the request does not ask for them.
        prompt_token_ids: Token ids of the prompt, with the first event of a choice; None if not asked for.
    """

    text: str
    logprobs: dict[str, list[Any]] | None
    token_ids: list[int] | None
    prompt_token_ids: Sequence[int] | None


class Choices:
    """Content of each choice: its prompt if echo is on, then its text, with log-probabilities and token ids.

    Args:
        echoes: Text of each prompt; None without echo.
        detail: Settings on what the response reports besides text.
    """

    def __init__(self, echoes: Sequence[str] | None, detail: Detail) -> None:
        self._echoes = echoes
        self._detail = detail
        self._logprobs: dict[int, CompletionLogprobs] = {}
        # One bit per choice that has been shown.
        self._started = 0
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    @property
    def only_text(self) -> bool:
        """True if nothing but text is shown of generated tokens."""
        return self._detail.logprobs is None and not self._detail.token_ids

    def show(self, index: int, prompt_index: int, delta: TextDelta) -> Shown:
        """Return the part that an event adds to its choice."""
        detail = self._detail
        text, num_shown = delta.text, detail.logprobs
        entries = list(delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = delta.prompt_logprobs
        prompt_token_ids = None
        if not self._started >> index & 1:
            self._started |= 1 << index
            if detail.token_ids:
                prompt_token_ids = detail.prompts[prompt_index]
            if self._echoes is not None:
                text = self._echoes[prompt_index] + text
                entries = [*self._prompt_logprobs.get(prompt_index, ()), *entries]
        logprobs = None
        if num_shown is not None:
            builder = self._logprobs.get(index)
            if builder is None:
                builder = CompletionLogprobs(detail.names, self._num_hidden(prompt_index))
                self._logprobs[index] = builder
            logprobs = builder.add(entries, num_shown)
        return Shown(text, logprobs, delta.token_ids if detail.token_ids else None, prompt_token_ids)

    def _num_hidden(self, prompt_index: int) -> int:
        """Return the number of characters before the prompt's text, such as those of a beginning-of-text token."""
        if self._echoes is None:
            return 0
        detail, text = self._detail, self._echoes[prompt_index]
        whole = b"".join([detail.token_bytes(token_id) for token_id in detail.prompts[prompt_index]])
        return max(len(whole.decode("utf-8", "replace")) - len(text), 0)

    async def prompt_fields(self, prompt_index: int) -> dict[str, Any]:
        """Return the fields of a whole response's choices about their prompt."""
        wanted = self._detail.prompt_logprobs
        if wanted is None:
            return {}
        entries = self._prompt_logprobs.get(prompt_index, ())
        return {"prompt_logprobs": await shaped_prompt_logprobs(entries, wanted, self._detail)}


class CompletionChunks(ChunkEncoder):
    """Encoder of events as streamed `text_completion`s.

    Args:
        envelope: Shared fields of the chunks.
        tally: Counts for the usage.
        choices: Content of the choices.
    """

    __slots__ = ("_choices", "_only_text")

    def __init__(self, envelope: Envelope, tally: Tally, choices: Choices) -> None:
        super().__init__(envelope, tally, kind="text_completion", opening=b'"text":')
        self._choices = choices
        self._only_text = choices.only_text

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """Return the chunk of one event; empty if it has nothing to show yet."""
        text = delta.text
        if self._only_text and delta.finish_reason is None and (head := self.heads.get(index)):
            # Most tokens of most streams; the first chunk of a choice shows what the prompt adds.
            return b"".join((head, dump_json(text), _PLAIN, self.tail)) if text else b""
        shown = self._choices.show(index, prompt_index, delta)
        text, logprobs = shown.text, shown.logprobs
        has_ids = bool(shown.token_ids) or shown.prompt_token_ids is not None
        if not text and delta.finish_reason is None and not has_ids and not (logprobs and logprobs["tokens"]):
            return b""
        head = self.head(index)
        if logprobs is None and delta.finish_reason is None and not has_ids:
            return head + dump_json(text) + _PLAIN + self.tail
        rest = {"logprobs": logprobs, "finish_reason": delta.finish_reason, **_id_fields(shown)}
        if delta.finish_reason is not None:
            rest["stop_reason"] = delta.stop_reason
        # The other fields follow the text, so the opening brace is cut off.
        return head + dump_json(text) + b"," + dump_json(rest)[1:] + b"]" + self.tail


async def whole_completion_response(
    envelope: Envelope,
    num_choices: int,
    events: AsyncIterator[tuple[int, int, TextDelta]],
    tally: Tally,
    choices: Choices,
) -> dict[str, Any]:
    """Collect all events into a `text_completion`."""
    shown: list[list[Shown]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    stops: list[int | str | None] = [None] * num_choices
    prompts = [0] * num_choices
    async for index, prompt_index, delta in events:
        shown[index].append(await in_thread_if_large(choices.show, index, prompt_index, delta))
        if delta.finish_reason is not None:
            reasons[index], stops[index] = delta.finish_reason, delta.stop_reason
        prompts[index] = prompt_index
    prompt_fields = {prompt: await choices.prompt_fields(prompt) for prompt in set(prompts)}
    entries = [
        {
            "index": index,
            "text": "".join([piece.text for piece in shown[index]]),
            "logprobs": _joined_logprobs(shown[index]),
            "finish_reason": reasons[index],
            "stop_reason": stops[index],
            **_joined_ids(shown[index]),
            **prompt_fields[prompts[index]],
        }
        for index in range(num_choices)
    ]
    return envelope.whole("text_completion", entries, tally.usage())


def _id_fields(shown: Shown) -> dict[str, Any]:
    fields: dict[str, Any] = {} if shown.token_ids is None else {"token_ids": shown.token_ids}
    return fields if shown.prompt_token_ids is None else {**fields, "prompt_token_ids": shown.prompt_token_ids}


def _joined_ids(pieces: Sequence[Shown]) -> dict[str, Any]:
    if not pieces or pieces[0].token_ids is None:
        return {}
    ids = [token_id for piece in pieces for token_id in piece.token_ids or ()]
    return {"token_ids": ids, "prompt_token_ids": pieces[0].prompt_token_ids}


def _joined_logprobs(pieces: Sequence[Shown]) -> dict[str, list[Any]] | None:
    parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if not parts:
        return None
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
