"""Log-probabilities in the shapes of chat and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from shared.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


class TokenNames:
    """How log-probabilities name tokens: by their text, or as `token_id:N`."""

    def __init__(self, token_bytes: TokenBytes, *, as_token_ids: bool = False) -> None:
        self.token_bytes = token_bytes
        self._as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}" if self._as_token_ids else token_string(self.token_bytes(token_id))


def token_string(data: bytes) -> str:
    """A token as text; one that is no whole text of its own (half a code point) as `bytes:\\xf0\\x9f`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """JSON has no infinities: a probability of zero (or a NaN) is the least value instead."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`. Joining the `bytes` of all entries gives the UTF-8 of the text."""
    return [
        {
            **_chat_entry(entry.token_id, LEAST_LOGPROB if entry.logprob is None else entry.logprob, names),
            "top_logprobs": [
                _chat_entry(token_id, logprob, names)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": list(names.token_bytes(token_id)),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], wanted: int, token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token the likeliest ones and itself, by id; null for the first.

    Takes a second for half a million of them: call it in a thread where entries are LARGE_REPORT.
    """
    strings: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        text = strings.get(token_id)
        if text is None:
            text = strings[token_id] = token_string(token_bytes(token_id))
        return text

    return [None if entry.logprob is None else _prompt_entry(entry, wanted, text_of) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, wanted: int, text_of: Callable[[int], str]) -> dict[str, Any]:
    ranked = [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    ]
    shown = {token_id: (logprob, rank) for token_id, logprob, rank in ranked[:wanted]}
    shown.setdefault(entry.token_id, (entry.logprob or 0.0, entry.rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(token_id)}
        for token_id, (logprob, rank) in shown.items()
    }


class CompletionLogprobs:
    """Builds OpenAI's legacy `logprobs` of one choice, piece by piece.

    `text_offset` counts characters of the choice's text; a token that does not complete a code point starts where the
    code point does.

    Args:
        num_unseen: characters of the first tokens that the text does not show, such as those of a beginning-of-text
            token that the prompt was given; these tokens are where the text begins.
    """

    def __init__(self, names: TokenNames, num_unseen: int = 0) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = -num_unseen

    def add(self, entries: Sequence[TokenLogprobs], wanted: int) -> dict[str, list[Any]]:
        """The shape for the next tokens, with `wanted` alternatives.

        The first token of a prompt has null for its logprob and its alternatives.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token = self._names.name(entry.token_id)
            tokens.append(token)
            offsets.append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(self._names.token_bytes(entry.token_id)))
            logprobs.append(None if entry.logprob is None else finite(entry.logprob))
            top.append(None if entry.logprob is None else self._alternatives(entry, wanted, token, entry.logprob))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _alternatives(self, entry: TokenLogprobs, wanted: int, token: str, logprob: float) -> dict[str, float]:
        ranked = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:wanted]
        result = {self._names.name(token_id): finite(value) for token_id, value in ranked}
        result.setdefault(token, finite(logprob))
        return result
