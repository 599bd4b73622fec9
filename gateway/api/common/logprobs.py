"""Log-probabilities in the shapes of chat, of completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in log-probabilities: their text, or `token_id:N`.

    Attributes:
        token_bytes: Function that returns the bytes of a token id.
        as_token_ids: True for `token_id:N`.
    """

    token_bytes: TokenBytes
    as_token_ids: bool = False

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self.as_token_ids else token_string(self.token_bytes(token_id))


def token_string(data: bytes) -> str:
    r"""Return a token as text, or as `bytes:\xf0\x9f` if its bytes are not valid UTF-8 by themselves."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """Return the log-probability, or LEAST_LOGPROB for -inf and NaN, which JSON cannot express."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> list[dict[str, Any]]:
    """Return OpenAI's `logprobs.content`. The joined `bytes` of all entries are the UTF-8 of the text."""
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
    entries: Sequence[TokenLogprobs], num_shown: int, token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token the likeliest ones and itself, by id; None for the first.

    Half a million of them take a second: call it in a thread if there are LARGE_REPORT entries or more.
    """

    @cache
    def text_of(token_id: int) -> str:
        return token_string(token_bytes(token_id))

    return [None if entry.logprob is None else _prompt_entry(entry, num_shown, text_of) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, num_shown: int, text_of: Callable[[int], str]) -> dict[str, Any]:
    top = zip(entry.top_ids[:num_shown], entry.top_logprobs[:num_shown], strict=True)
    shown = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(top, 1)}
    shown.setdefault(entry.token_id, (entry.logprob or 0.0, entry.rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(token_id)}
        for token_id, (logprob, rank) in shown.items()
    }


class CompletionLogprobs:
    """Incremental builder of the `logprobs` of one choice in OpenAI's completions.

    `text_offset` counts characters of the choice's text. A token that does not complete a code point has the offset of
    the code point.

    Args:
        names: Names of tokens.
        num_hidden: Number of characters of the first tokens that the text does not show, such as those of a
            beginning-of-text token; these tokens have offset 0.
    """

    def __init__(self, names: TokenNames, num_hidden: int = 0) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = -num_hidden

    def add(self, entries: Sequence[TokenLogprobs], num_shown: int) -> dict[str, list[Any]]:
        """Return the fields for the next tokens, with `num_shown` alternatives.

        The first token of a prompt has None as its log-probability and its alternatives.
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
            top.append(None if entry.logprob is None else self._alternatives(entry, num_shown, token, entry.logprob))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _alternatives(self, entry: TokenLogprobs, num_shown: int, token: str, logprob: float) -> dict[str, float]:
        top = zip(entry.top_ids[:num_shown], entry.top_logprobs[:num_shown], strict=True)
        result = {self._names.name(token_id): finite(value) for token_id, value in top}
        result.setdefault(token, finite(logprob))
        return result
