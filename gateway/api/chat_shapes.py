"""/v1/chat/completions: events to a whole response, or to chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from gateway.api.chunk_frame import ChunkFrame
from gateway.api.fan_in import Tally
from gateway.api.logprobs import TokenBytes, chat_logprobs
from gateway.flow.events import TextDelta
from gateway.responses import dump_json
from shared.messages import TokenLogprobs


class ChatChunks:
    """Encodes events as `chat.completion.chunk`s.

    All around the delta is encoded once for each choice: a token costs one string encoding and two concatenations.

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
        self._frame = ChunkFrame(
            response_id,
            created,
            model,
            tally,
            kind="chat.completion.chunk",
            opening=b'"delta":{',
            include_usage=include_usage,
        )
        self._token_bytes = token_bytes
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._frame.tail

    def encode(self, index: int, prompt_index: int, delta: TextDelta) -> bytes:
        """The chunks of one event; empty where it has nothing to show yet."""
        begun = self._frame.has_begun(index)
        head = self._frame.head(index)
        chunks = b"" if begun else head + b'"role":"assistant","content":""' + self._text_tail
        if self._token_bytes is not None and delta.logprobs:
            content = dump_json({"content": chat_logprobs(delta.logprobs, self._token_bytes), "refusal": None})
            chunks += (
                head
                + b'"content":'
                + dump_json(delta.text)
                + b'},"logprobs":'
                + content
                + b',"finish_reason":null}]'
                + self._frame.tail
            )
        elif delta.text:
            chunks += head + b'"content":' + dump_json(delta.text) + self._text_tail
        if delta.finish_reason is not None:
            reason = dump_json(delta.finish_reason)
            chunks += head + b'},"logprobs":null,"finish_reason":' + reason + b"}]" + self._frame.tail
        return chunks

    def end(self) -> bytes:
        """The usage chunk, where asked for, and the end marker."""
        return self._frame.end()


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
