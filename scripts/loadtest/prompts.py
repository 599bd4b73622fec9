"""Synthetic prompts of a given number of tokens.

Prompts consist of words that are one token each for the server's tokenizer. These words are found by calls of the
server's /tokenize endpoint. Without that endpoint, every word is assumed to be one token, which is accurate for
vocabularies of 30,000 and more; the report shows the actual number from the server's usage.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from scripts.loadtest.records import Endpoint, LoadRequest, Segment

_COMMON_WORDS = (
    "the of and to in is that for was on are with as be at this have from or had by but what some we can out other "
    "were all there when up use your how said an each she which do their time if will way about many then them write "
    "would like so these her long make thing see him two has look more day could go come did number sound no most "
    "people my over know water than call first who may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give our under name very through just "
    "form great think say help low line before turn cause same mean move right boy old too does tell set three want "
    "air well also play small end put home read hand large add even land here must big high such follow act why ask "
    "men change went light kind off need house picture try us again animal point mother world near build self earth "
    "father head stand own page should country found answer school grow study still learn plant cover food sun four "
    "thought let keep eye never last door between city tree cross since hard start might story saw far sea draw left "
    "late run while press close night real life few stop open seem together next white children begin got walk "
    "example ease paper often always music those both mark book letter until mile river car feet care second group "
    "carry took rain eat room friend began idea fish mountain north once base hear horse cut sure watch color face "
    "wood main enough plain girl usual young ready above ever red list though feel talk bird soon body dog family "
    "direct pose leave song measure state product black short class wind question happen complete ship area half "
    "rock order fire south problem piece told knew pass farm top whole king size heard best hour better true during "
    "hundred remember step early hold west ground interest reach fast five sing listen six table travel less morning"
)
CANDIDATES = tuple(_COMMON_WORDS.split())

CountTokens = Callable[[str], Awaitable[int]]


class TokenizeError(Exception):
    """Failure to count tokens with the server's /tokenize."""


def words_text(words: Sequence[str], seed: int, segments: Sequence[Segment]) -> str:
    """Return random words for the segments, seeded by (seed, segment key), each with a space before it."""
    parts: list[str] = []
    for segment in segments:
        parts += random.Random(f"{seed}/{segment.key}").choices(words, k=segment.num_tokens)
    return " " + " ".join(parts)


def shorten(segments: Sequence[Segment], num_tokens: int) -> list[Segment]:
    """Remove tokens at the end, so that shared prefixes remain; at least one token is kept."""
    remaining = max(1, sum(segment.num_tokens for segment in segments) - num_tokens)
    result = []
    for segment in segments:
        if remaining > 0:
            result.append(Segment(segment.key, min(segment.num_tokens, remaining)))
            remaining -= result[-1].num_tokens
    return result


def prompt_of(request: LoadRequest, words: Sequence[str], seed: int, overhead: int) -> str | list[int]:
    """Return the text or the token ids of a request's prompt."""
    if request.token_ids is not None:
        return request.token_ids
    if request.text is not None:
        return request.text
    return words_text(words, seed, shorten(request.segments, overhead))


async def single_token_words(count: CountTokens, candidates: Sequence[str] = CANDIDATES) -> list[str]:
    """Return the candidates that are one token each with a space before them.

    `count` returns the number of tokens of a text. Groups of words are tested together and halved if they have too many
    tokens, so that a typical vocabulary needs about a dozen calls.
    """
    probe = " the the the"
    overhead = 2 * await count(probe) - await count(probe + probe)

    async def singles(group: Sequence[str]) -> list[str]:
        if await count(" " + " ".join(group)) - overhead == len(group):
            return list(group)
        if len(group) == 1:
            return []
        middle = len(group) // 2
        return await singles(group[:middle]) + await singles(group[middle:])

    found: list[str] = []
    for start in range(0, len(candidates), 64):
        found += await singles(candidates[start : start + 64])
    return found


class Tokenizer:
    """Client of the server's /tokenize, with the fields of vLLM and Pelton or those of llama.cpp."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url.removesuffix("/v1")
        self._model = model

    async def count(self, text: str) -> int:
        """Return the number of tokens of a text, including tokens that the tokenizer adds."""
        answer = await self._post("/tokenize", {"model": self._model, "prompt": text})
        return _count_of(answer) if "count" in answer else await self._count_content(text)

    async def count_chat(self, text: str) -> int:
        """Return the number of tokens of a user message in the chat template."""
        messages = [{"role": "user", "content": text}]
        answer = await self._post("/tokenize", {"model": self._model, "messages": messages})
        if "count" in answer:
            return _count_of(answer)
        prompt = (await self._post("/apply-template", {"messages": messages})).get("prompt")
        if not isinstance(prompt, str):
            raise TokenizeError(
                "/tokenize does not support messages, and the response of /apply-template has no `prompt`"
            )
        return await self._count_content(prompt)

    async def _count_content(self, text: str) -> int:
        # The server of llama.cpp returns no tokens and no error for fields that it does not know.
        tokens = (await self._post("/tokenize", {"content": text, "add_special": True})).get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise TokenizeError("the response of /tokenize has neither `count` nor `tokens`")
        return len(tokens)

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        try:
            async with self._session.post(self._url + path, json=body) as response:
                if response.status != 200:
                    raise TokenizeError(f"{path} returned status {response.status}")
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TokenizeError(f"{path} failed: {error}") from None
        if not isinstance(answer, dict):
            raise TokenizeError(f"{path} did not return a JSON object")
        return answer


def _count_of(answer: dict[str, object]) -> int:
    count = answer["count"]
    if not isinstance(count, int):
        raise TokenizeError("/tokenize returned a `count` that is not an integer")
    return count


async def calibrate(tokenizer: Tokenizer, endpoint: Endpoint) -> tuple[list[str], int]:
    """Return words of one token each and the number of tokens that the endpoint adds to a prompt.

    Raises:
        TokenizeError: The server has no /tokenize, or too few words are single tokens.
    """
    words = await single_token_words(tokenizer.count)
    if len(words) < 32:
        raise TokenizeError(f"only {len(words)} of {len(CANDIDATES)} words are single tokens")
    text = " " + " ".join(words[:32])
    total = await (tokenizer.count_chat(text) if endpoint == "chat" else tokenizer.count(text))
    return words, max(0, total - 32)
