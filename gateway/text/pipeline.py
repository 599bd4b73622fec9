"""Conversion between the text and the token ids of one model, with slow parts off the event loop."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from gateway.text.chat_template import FILLED_IN, ChatTemplate
from gateway.text.detokenizer import Detokenizer, TokenBytes
from gateway.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequestError
from shared.messages import Bundle

LARGE_TEXT = 262_144
"""Number of characters above which texts get a thread of their own, so that they delay only each other."""

_MAX_CONTAINING = 16
_END_LENGTH = 256

_T = TypeVar("_T")


class EncodedChat(NamedTuple):
    """Rendered and tokenized conversation.

    Attributes:
        ids: Token ids of the prompt.
        end: Last characters of the rendered text.
    """

    ids: list[int]
    end: str


class TextThreads:
    """Threads that tokenize and render, shared by all models of a process.

    The `tokenizers` library releases the interpreter lock while it works. A thread cannot be interrupted: a cancelled
    caller no longer waits, and work that has not started is dropped.
    """

    def __init__(self, num_threads: int = 2) -> None:
        # With the library's own pool, one long text would delay all others. Here each thread does its own work.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-text")

    async def run(self, size: int, function: Callable[[], _T]) -> _T:
        """Return the result of `function`; `size` is the number of characters of its text."""
        executor = self._large if size > LARGE_TEXT else self._small
        return await asyncio.get_running_loop().run_in_executor(executor, function)

    def close(self) -> None:
        """Drop work that has not started, without waiting for the rest."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)


class TextPipeline:
    """Tokenizer, chat template and detokenizer of one bundle.

    Construct it in a thread, because that takes about 0.2 s.

    Attributes:
        template: Source of the chat template; None if there is no usable one.
        template_variables: Variables that a request may set for the chat template: it reads them and the renderer does
            not set them.
        takes_documents: True if the chat template reads `documents`.
        added_ids: Id by text of each added token.
        special_ids: Ids that `skip_special_tokens` hides.

    Raises:
        ConfigurationError: The tokenizer cannot be used. An unusable template only makes the chat methods fail.
    """

    def __init__(self, bundle: Bundle, threads: TextThreads) -> None:
        self.bundle_hash = bundle.bundle_hash
        self._threads = threads
        self._tokenizer = TextTokenizer(bundle)
        self._token_bytes: TokenBytes = self._tokenizer.token_bytes
        self._containing: OrderedDict[tuple[str, ...], tuple[int, ...]] = OrderedDict()
        self._template: ChatTemplate | None = None
        self._template_error = "the model has no chat template; use /v1/completions"
        if bundle.chat_template is not None:
            try:
                self._template = ChatTemplate(bundle.chat_template, bundle.special_tokens)
            except InvalidRequestError as error:
                self._template_error = error.message
        template = self._template
        self.template = None if template is None else template.source
        self.template_variables: frozenset[str] = frozenset() if template is None else template.variables
        self.takes_documents = template is not None and "documents" in template.reads
        self.added_ids: Mapping[str, int] = self._tokenizer.added_ids
        self.special_ids = self._token_bytes.special_ids

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Tokenize a plain prompt in a thread. Text of special tokens becomes special tokens.

        Args:
            text: The prompt.
            add_special_tokens: Prepend the beginning-of-text id if the model expects one and the text has none.
            max_tokens: Refuse, before tokenizing, text that certainly has more tokens.
            param: Name of the field for error messages.

        Raises:
            ContextLengthError: The text has more than max_tokens tokens.
        """
        self._tokenizer.check_size(text, max_tokens, param)
        return await self._threads.run(
            len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        max_tokens: int | None = None,
    ) -> EncodedChat:
        """Render a conversation with the model's chat template and tokenize it.

        Text of special tokens in messages is ordinary text.

        Args:
            messages: The conversation.
            tools: Tools for templates that support them.
            add_generation_prompt: End the prompt where the assistant's message begins.
            template_kwargs: Variables for the template.
            documents: Documents for templates that support them.
            continue_final: End the prompt inside the last message, whose content is a string.
            max_tokens: Refuse, before tokenizing, text that certainly has more tokens.

        Raises:
            InvalidRequestError: The template refuses the conversation; the message is the template's.
            ContextLengthError: The prompt has more than max_tokens tokens.
        """
        template = self._usable_template(template_kwargs)

        def work() -> EncodedChat:
            guard = self._tokenizer.guard
            guarded, tag = guard(messages), ""
            if continue_final:
                tag = f"continue-{secrets.token_hex(16)}"
                guarded[-1]["content"] += tag
            text = template.render(
                guarded, guard(tools), add_generation_prompt, guard(template_kwargs or {}), guard(documents)
            )
            if continue_final:
                text = _cut_at(text, tag)
            self._tokenizer.check_size(text, max_tokens, "messages")
            return EncodedChat(self._tokenizer.encode_guarded(text), text[-_END_LENGTH:])

        return await self._threads.run(text_size(messages) + text_size(tools) + text_size(documents), work)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a whole sequence. Ill-formed bytes become U+FFFD, and ids outside the vocabulary have no text."""
        return self._token_bytes.join(token_ids, skip_special_tokens).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token as it continues a text."""
        return self._token_bytes[token_id]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the vocabulary."""
        return self._tokenizer.token_id(text)

    async def tokens_containing(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ids, in order, of all tokens whose bytes contain one of the texts. Recent results are cached."""
        known = self._containing.get(texts)
        if known is None:
            known = await self._threads.run(0, lambda: _ids_containing(self._token_bytes.table, texts))
            self._containing[texts] = known
            while len(self._containing) > _MAX_CONTAINING:
                self._containing.popitem(last=False)
        else:
            self._containing.move_to_end(texts)
        return known

    def detokenizer(self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Return a new detokenizer for one choice.

        It continues a prompt, so it strips no leading space. See Detokenizer.
        """
        return Detokenizer(self._token_bytes, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)

    def _usable_template(self, template_kwargs: Mapping[str, Any] | None) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError(self._template_error, param="messages")
        for name in FILLED_IN.intersection(template_kwargs or {}):
            raise InvalidRequestError(f"chat_template_kwargs must not set {name}", param="chat_template_kwargs")
        return self._template


def _cut_at(text: str, tag: str) -> str:
    """Return the text before the tag that follows the message to be continued."""
    before, found, _ = text.rpartition(tag)
    if not found:
        message = "the model's chat template does not end with the last message, so the message cannot be continued"
        raise InvalidRequestError(message, param="continue_final_message")
    return before


def _ids_containing(table: Sequence[bytes], texts: Sequence[str]) -> tuple[int, ...]:
    pattern = re.compile(b"|".join([re.escape(text.encode("utf-8", "replace")) for text in texts]))
    return tuple(token_id for token_id, data in enumerate(table) if texts and pattern.search(data))


def text_size(value: Any) -> int:
    """Count the characters in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    if isinstance(value, Sequence):
        return sum(map(text_size, value))
    return 0
