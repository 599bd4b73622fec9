"""/v1/chat/completions: events to a whole response, or to chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from gateway.api.fan_in import Tally
from gateway.api.logprobs import TokenBytes, chat_logprobs
from gateway.api.sse import DONE, data_event
from gateway.flow.events import TextDelta
from gateway.responses import dump_json
from shared.messages import TokenLogprobs


class ChatChunks:
    """Encodes events as `chat.completion.chunk`s.

    A chunk is the same JSON but for its delta, so all around it is encoded once for each choice: a token costs one
    string encoding and two concatenations.

    Args:
        token_bytes: where logprobs were asked for, else None.
    """

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        tally: Tally,
        *,
        include_usage: bool,
        token_bytes: TokenBytes | None,
    ) -> None:
        self._common = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._tally = tally
        self._include_usage = include_usage
        self._token_bytes = token_bytes
        self._heads: dict[int, bytes] = {}
        self._tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """The chunks of one event; empty where it has nothing to show yet."""
        head = self._heads.get(index)
        chunks = b""
        if head is None:
            head = self._heads[index] = self._head(index)
            chunks = head + b'"role":"assistant","content":""' + self._text_tail
        if self._token_bytes is not None and delta.logprobs:
            content = dump_json({"content": chat_logprobs(delta.logprobs, self._token_bytes), "refusal": None})
            chunks += (
                head
                + b'"content":'
                + dump_json(delta.text)
                + b'},"logprobs":'
                + content
                + b',"finish_reason":null}]'
                + self._tail
            )
        elif delta.text:
            chunks += head + b'"content":' + dump_json(delta.text) + self._text_tail
        if delta.finish_reason is not None:
            reason = dump_json(delta.finish_reason)
            chunks += head + b'},"logprobs":null,"finish_reason":' + reason + b"}]" + self._tail
        return chunks

    def end(self) -> bytes:
        """The usage chunk, where asked for, and the end marker."""
        if not self._include_usage:
            return DONE
        return data_event({**self._common, "choices": [], "usage": self._tally.usage()}) + DONE

    def _head(self, index: int) -> bytes:
        return b"data: " + dump_json(self._common)[:-1] + b',"choices":[{"index":%d,"delta":{' % index


async def whole_chat_response(
    response_id: str,
    created: int,
    model: str,
    num_choices: int,
    events: AsyncIterator[tuple[int, int, TextDelta]],
    tally: Tally,
    token_bytes: TokenBytes | None,
) -> dict[str, Any]:
    """Collects all events into a `chat.completion`."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    async for index, _, delta in events:
        texts[index].append(delta.text)
        if delta.logprobs:
            logprobs[index].extend(delta.logprobs)
        reasons[index] = delta.finish_reason or reasons[index]
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                "logprobs": _choice_logprobs(logprobs[index], token_bytes),
                "finish_reason": reasons[index],
            }
            for index in range(num_choices)
        ],
        "usage": tally.usage(),
    }


def _choice_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes | None) -> dict[str, Any] | None:
    return None if token_bytes is None else {"content": chat_logprobs(entries, token_bytes), "refusal": None}
