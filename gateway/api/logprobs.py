"""Log-probabilities in the shapes of chat and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from shared.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


def token_string(data: bytes) -> str:
    """A token as text; one that is no whole text of its own (half a code point) as `bytes:\\xf0\\x9f`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """JSON has no infinities: a probability of zero (or a NaN) is the least value instead."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`. Joining the `bytes` of all entries gives the UTF-8 of the text."""
    return [
        {
            **_chat_entry(token_bytes(entry.token_id), LEAST_LOGPROB if entry.logprob is None else entry.logprob),
            "top_logprobs": [
                _chat_entry(token_bytes(token_id), logprob)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def _chat_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_string(data), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """Builds OpenAI's legacy `logprobs` of one choice, piece by piece.

    `text_offset` counts characters of the choice's text; a token that does not complete a code point starts where the
    code point does.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The shape for the next tokens. The first token of a prompt has null for its logprob and its alternatives."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            data = self._token_bytes(entry.token_id)
            token = token_string(data)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
            logprobs.append(None if entry.logprob is None else finite(entry.logprob))
            top.append(None if entry.logprob is None else self._alternatives(entry, token, entry.logprob))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _alternatives(self, entry: TokenLogprobs, token: str, logprob: float) -> dict[str, float]:
        result = {
            token_string(self._token_bytes(token_id)): finite(value)
            for token_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        result.setdefault(token, finite(logprob))
        return result
