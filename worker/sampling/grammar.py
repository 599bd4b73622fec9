"""Grammars compiled by llguidance: compilation in threads, a cache, and the masks of permitted tokens.

Masks are computed on the byte strings of the model's tokenizer. Ids that the tokenizer does not have are never
permitted; end-of-sequence ids are permitted where the text may end.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from shared.errors import InvalidRequestError, PeltonError
from shared.log import get_logger
from worker.requests.constraint import Flags, GrammarState, Words
from worker.sampling.deep_threads import DeepThreads
from worker.stats import Counters

COMPILE_SECONDS = 10.0
"""Time limit of a compilation."""
CACHE_BYTES = 64 << 20
_BASE_BYTES = 1 << 17
_BYTES_PER_CHARACTER = 112
_BYTES_PER_FURTHER_CHARACTER = 24
_MANY_CHARACTERS = 20_000
"""Measured size of a compiled grammar: its tables grow with its source, but more slowly for long word lists."""
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""llguidance's defaults, except for the lexer states: a text creates ever more of them, and each takes 1 to 2 KB."""
_SLOW_SECONDS = 0.05
_MAX_SLOW = 4
"""Number of slow masks after which a text is ended. llguidance does not bound the work of an ambiguous grammar, which
grows with the cube of the text length, and all requests of the step wait for it."""
_NUM_WATCHED = 8
"""Number of steps after a slow one in which masks are timed one by one."""
_MAX_REASON = 300
_NO_TOKEN = "<|pelton: end of text|>"
_MAX_MASK_THREADS = 8
_MANY_MASKS = 4
"""Minimum number of masks to compute in parallel: most take about 10 us, less than waking a thread."""

log = get_logger("worker.sampling")


class Matcher:
    """Position of one text in a grammar; implements GrammarState."""

    __slots__ = ("_num_slow", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._num_slow = 0

    @property
    def is_complete(self) -> bool:
        """True if the text matches the grammar and cannot be continued."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Reason why the grammar cannot be followed any more; empty if it can."""
        if self.is_too_slow:
            return "computing its masks takes too long, because it is too ambiguous for a text of this length"
        return _reason(self.matcher) if self.matcher.is_error() else ""

    @property
    def is_too_slow(self) -> bool:
        """True if too many masks were slow."""
        return self._num_slow >= _MAX_SLOW

    def consume(self, token_id: int) -> bool:
        """Append a token to the text. Return False if the grammar does not permit it."""
        begin = time.thread_time()
        accepted = self.matcher.consume_token(token_id)
        self._record_time(time.thread_time() - begin)
        return accepted

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, in order, may follow. The text does not change."""
        begin = time.thread_time()
        count = int(self.matcher.validate_tokens(list(token_ids)))
        self._record_time((time.thread_time() - begin) / max(len(token_ids), 1))
        return count

    def fill(self, rows: Words, ahead: Sequence[int] = ()) -> None:
        """Write the masks of the tokenizer's ids.

        Args:
            rows: [1 + len(ahead), words]; the first row receives the mask of the next token, the others the masks after
                each of the tokens `ahead`.
            ahead: Draft tokens that the grammar permits.
        """
        begin = time.thread_time()
        if ahead:
            rows[:] = 0  # masks after the end of the text are not written
            fill = self.matcher.unsafe_compute_mask_ptr_with_draft_token  # type: ignore[attr-defined]  # not in its stub
            fill(rows.ctypes.data, rows[0].nbytes, list(ahead))
        else:
            self.matcher.unsafe_compute_mask_ptr(rows.ctypes.data, rows[0].nbytes)
        # Per mask, so that texts with drafts are not ended earlier.
        self._record_time((time.thread_time() - begin) / (1 + len(ahead)))

    def _record_time(self, seconds: float) -> None:
        self._num_slow += seconds > _SLOW_SECONDS


class _Vocabulary:
    """The tokenizer in llguidance's format, created on first use because that takes tenths of a second."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self.created: Future[LLTokenizer] = Future()
        self._num_words = -(-vocab_size // 32)
        self._within: Words = np.zeros(self._num_words, dtype=np.uint32)
        self.ends: Words = np.zeros(0, dtype=np.uint32)

    def tokenizer(self) -> LLTokenizer:
        """Return the tokenizer. Raise InvalidRequestError if tokens of this kind of tokenizer have no byte strings."""
        with self._lock:
            if not self.created.done():
                try:
                    self.created.set_result(self._create())
                except PeltonError as error:
                    self.created.set_exception(error)
        return self.created.result()

    def _create(self) -> LLTokenizer:
        begin = time.monotonic()
        source, ends = self._tokenizer_json.decode(), [i for i in self._eos_token_ids if i < self._vocab_size]
        absent: list[int] = []
        try:
            try:
                tokenizer = _tokenizer(source, self._vocab_size, ends)
            except ValueError:
                source, ends, absent, num_ids = self._fit(source, ends)
                tokenizer = _tokenizer(source, num_ids, ends)
        except ValueError as error:
            log.warning("tokenizer_without_grammars", reason=str(error)[:200])
            raise InvalidRequestError(f"this model's tokenizer does not support grammars: {str(error)[:200]}") from None
        self.ends = _bits(ends, tokenizer.vocab_size)
        self._within = _bits(sorted(set(range(self._vocab_size)).difference(absent)), self._vocab_size)
        log.info("grammars_ready", seconds=round(time.monotonic() - begin, 2), num_ids=tokenizer.vocab_size)
        return tokenizer

    def _fit(self, source: str, ends: list[int]) -> tuple[str, list[int], list[int], int]:
        """Adapt a tokenizer whose ids differ from the model's.

        Return its source, its end ids, ids that are not tokens, and the number of ids.
        """
        known = Tokenizer.from_str(source)
        ids = set(known.get_vocab().values())
        ends = [token_id for token_id in ends if token_id in ids]
        absent: list[int] = []
        if not ends:
            # llguidance requires an end token; add one that no model produces.
            known.add_special_tokens([_NO_TOKEN])
            source, absent = known.to_str(), [known.get_vocab()[_NO_TOKEN]]
        return source, ends or absent, absent, max([self._vocab_size - 1, *ids, *absent]) + 1

    def cut(self, wide: Words, masks: Words) -> Flags:
        """Convert masks over the tokenizer's ids to the model's ids. Return whether each text may end."""
        np.bitwise_and(wide[:, : self._num_words], self._within, out=masks)
        may_end: Flags = np.logical_or.reduce(wide & self.ends, axis=1)
        return may_end


class LLGrammars:
    """Grammars of one worker; implements constraint.Grammars. The methods must be called from the engine's thread.

    Args:
        tokenizer_json: Tokenizer of the model's text bundle.
        vocab_size: Number of ids of the model.
        eos_token_ids: Ids that end a text.
        counters: Counters to increment.
        on_compiled: Called from another thread after each compilation.
        num_threads: Number of threads that compute the masks of a step.
        cache_bytes: Maximum size of the cache.
        compile_seconds: Time limit of a compilation.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        counters: Counters,
        on_compiled: Callable[[], None] = lambda: None,
        num_threads: int = 1,
        cache_bytes: int = CACHE_BYTES,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._vocabulary = _Vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        self._counters = counters
        self._on_compiled = on_compiled
        self._compile_seconds = compile_seconds
        self._threads = DeepThreads("compile-grammar")
        self._num_mask_threads = min(num_threads, _MAX_MASK_THREADS)
        self._executor: LLExecutor | None = None
        self._num_watched = 0
        self._cache = _Cache(cache_bytes)
        self._compilations: dict[str, _Compilation] = {}

    def warm_up(self) -> bool:
        """Create the tokenizer while the worker is idle. Return False if nothing is left to do."""
        if self._vocabulary.created.done():
            return False
        try:
            self._vocabulary.tokenizer()
        except PeltonError:
            return False  # requests with a grammar report it
        return True

    def prepare(self, source: str) -> _Compilation:
        """Start to compile a grammar, or find it in the cache. Raise UnavailableError if too many threads are stuck."""
        for unused in [item for item in self._compilations.values() if item.num_waiters == 0]:
            self.finish(unused)
        cached = self._cache.get(source)
        if cached is not None:
            self._counters.grammar_cache_hits_total += 1
            return cached
        compilation = self._compilations.get(source)
        if compilation is None:
            compilation = _Compilation(source, self._vocabulary.tokenizer, self)
            compilation.future = self._threads.submit(compilation.run)
            compilation.future.add_done_callback(lambda _: self._on_compiled())
            self._compilations[source] = compilation
        compilation.num_waiters += 1
        return compilation

    def fill(self, states: Sequence[GrammarState], masks: Words, ahead: Sequence[Sequence[int]] = ()) -> Flags:
        """Write the mask of each state. Return [n] flags: whether the text may end.

        Args:
            states: States of the texts.
            masks: [n, ceil(vocab / 32)] output, with one row per state and per token ahead.
            ahead: For each state, permitted draft tokens; one more mask is written after each. Empty if there are none.
        """
        matchers = [state for state in states if isinstance(state, Matcher)]
        ahead = ahead or [()] * len(matchers)
        starts = list(accumulate((1 + len(tokens) for tokens in ahead), initial=0))
        num_rows = starts[-1]
        wide: Words = np.empty((num_rows, len(self._vocabulary.ends)), dtype=np.uint32)
        if num_rows < _MANY_MASKS or self._num_mask_threads == 1 or self._num_watched > 0:
            self._num_watched = max(0, self._num_watched - 1)
            for matcher, tokens, at in zip(matchers, ahead, starts):
                matcher.fill(wide[at : at + 1 + len(tokens)], tokens)
        else:
            self._fill_in_parallel(matchers, ahead, starts, wide)
        may_end = self._vocabulary.cut(wide, masks)
        for index, matcher in enumerate(matchers):
            if matcher.is_too_slow:
                rows = slice(starts[index], starts[index + 1])
                masks[rows], may_end[rows] = 0, False
        return may_end

    def _fill_in_parallel(
        self, matchers: list[Matcher], ahead: Sequence[Sequence[int]], starts: list[int], wide: Words
    ) -> None:
        self._executor = self._executor or LLExecutor(num_threads=self._num_mask_threads)
        begin = time.perf_counter()
        drafted = [
            (matcher.matcher, at, list(tokens)) for matcher, at, tokens in zip(matchers, starts, ahead) if tokens
        ]
        # llguidance rejects empty drafts.
        without_drafts = [(matcher.matcher, at) for matcher, at, tokens in zip(matchers, starts, ahead) if not tokens]
        output = wide.ctypes.data, 4 * wide.shape[1], len(wide)
        if drafted:
            wide[:] = 0  # what comes after a text's end is not written
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *output)
        if without_drafts:
            self._executor.unsafe_compute_mask_ptr(without_drafts, *output)
        if time.perf_counter() - begin > _SLOW_SECONDS:
            self._num_watched = _NUM_WATCHED

    def finish(self, compilation: _Compilation) -> bool:
        """Return True if a compilation has ended, and record its outcome the first time."""
        if compilation.finished:
            return True
        future = compilation.future
        if not future.done():
            started = compilation.started
            if started is None or time.monotonic() - started < self._compile_seconds:
                return False
            self._threads.abandon(future)
            compilation.future = future = Future()
            future.set_exception(
                InvalidRequestError(
                    f"compiling the grammar takes more than {self._compile_seconds:g} s: it is too complex; "
                    "simplify it",
                    code="invalid_grammar",
                )
            )
        compilation.finished = True
        self.forget(compilation)
        self._counters.grammar_compilations_total += 1
        self._counters.grammar_compile_seconds_total += compilation.seconds
        if future.exception() is None:
            self._cache.put(compilation)
        return True

    def forget(self, compilation: _Compilation) -> None:
        """Remove a compilation from those that requests can share. Compiled grammars may still be in the cache."""
        if self._compilations.get(compilation.source) is compilation:
            del self._compilations[compilation.source]


class _Compilation:
    """Compilation of one grammar, shared by all requests that wait for it; implements constraint.PendingGrammar."""

    def __init__(self, source: str, tokenizer: Callable[[], LLTokenizer], grammars: LLGrammars) -> None:
        self.source = source
        self.num_waiters = 0
        self.future: Future[LLMatcher] = Future()
        self.started: float | None = None
        self.seconds = 0.0
        self.finished = False
        self._tokenizer = tokenizer
        self._grammars = grammars

    def poll(self) -> bool:
        """Return True if `open` would return or raise immediately."""
        return self._grammars.finish(self)

    def open(self) -> Matcher:
        """Return a copy of the compiled grammar. Raise PeltonError if it could not be compiled."""
        return Matcher(self.future.result(timeout=0).deep_copy())

    def release(self) -> None:
        """Remove one waiting request, and cancel the compilation if it was the last and compilation has not started."""
        self.num_waiters -= 1
        # A running compilation continues within its time limit; `prepare` records its outcome.
        if self.num_waiters == 0 and not self.finished and self.future.cancel():
            self._grammars.forget(self)

    def run(self) -> LLMatcher:
        """Compile, in a thread. Raise InvalidRequestError if the grammar cannot be used."""
        try:
            tokenizer = self._tokenizer()
            self.started = time.monotonic()
            matcher = LLMatcher(tokenizer, self.source, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                # Detects errors at the first token now, and makes the first masks of the copies faster.
                matcher.compute_bitmask()
        except PeltonError:
            raise
        except ValueError as error:
            raise InvalidRequestError(f"the grammar cannot be used: {error}", code="invalid_grammar") from None
        except BaseException as error:  # noqa: BLE001 - llguidance's panics too
            log.error("grammar_not_compiled", error=f"{type(error).__name__}: {error}"[:_MAX_REASON])
            raise InvalidRequestError("the grammar cannot be used", code="invalid_grammar") from None
        finally:
            if self.started is not None:
                self.seconds = time.monotonic() - self.started
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be used: {_reason(matcher)}", code="invalid_grammar")
        return matcher


class _Cache:
    """LRU cache of compiled grammars by source, bounded by their estimated size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, _Compilation] = OrderedDict()

    def get(self, source: str) -> _Compilation | None:
        if source in self._entries:
            self._entries.move_to_end(source)
        return self._entries.get(source)

    def put(self, compilation: _Compilation) -> None:
        source = compilation.source
        if source in self._entries or _cost(source) > self._max_bytes:
            return
        self._entries[source] = compilation
        self._num_bytes += _cost(source)
        while self._num_bytes > self._max_bytes:
            oldest, _ = self._entries.popitem(last=False)
            self._num_bytes -= _cost(oldest)


def _cost(source: str) -> int:
    many = min(len(source), _MANY_CHARACTERS)
    return _BASE_BYTES + _BYTES_PER_CHARACTER * many + _BYTES_PER_FURTHER_CHARACTER * (len(source) - many)


def _tokenizer(source: str, num_ids: int, ends: list[int]) -> LLTokenizer:
    """Create a tokenizer. Raise ValueError if its tokens have no byte strings or its ids do not fit."""
    blanks, *strings = LLTokenizer.json_slices()
    # Tokens of a slice are permitted together if everything it matches is; these slices halve the cost of plain words.
    slices = [blanks, "[a-z ]{1,10}", "[a-zA-Z ]{1,10}", *strings]
    return LLTokenizer(source, n_vocab=num_ids, eos_token=ends, slices=slices)


def _bits(token_ids: Sequence[int], num_ids: int) -> Words:
    flags = np.zeros(-(-num_ids // 32) * 32, dtype=np.uint8)
    flags[np.asarray(token_ids, dtype=np.int64)] = 1
    words: np.ndarray[Any, np.dtype[np.uint32]] = np.packbits(flags, bitorder="little").view("<u4")
    return words


def _reason(matcher: LLMatcher) -> str:
    """Return the message of an error without the excerpts, backtrace and parser state that follow it."""
    text = matcher.get_error()
    for mark in ("\n<backtrace>", "\n<non-verbose/>", "\n<state>"):
        text = text.partition(mark)[0]
    if text.startswith("panic"):
        return "it is too large or too complex; simplify it"
    return " ".join(text.split())[:_MAX_REASON]
