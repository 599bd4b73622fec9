"""Grammars by llguidance: compiled in threads, kept for the next request, and the masks of what they allow.

A mask is computed on the byte strings of the model's own tokenizer. Ids that the model has and its tokenizer lacks are
never allowed; end ids are, where the text may end.
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
"""What takes longer is given up."""
CACHE_BYTES = 64 << 20
_BYTES_EACH = 1 << 17
_BYTES_PER_CHARACTER = 112
_BYTES_PER_FURTHER = 24
_MANY_CHARACTERS = 20_000
"""What a compiled grammar takes, as measured: its tables grow with its source, long lists of words less."""
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The library's own, but for the states of a lexer, of which a text makes more and more: each takes 1 to 2 KB."""
_SLOW_SECONDS = 0.05
_MAX_SLOW = 4
"""A text whose masks take so long so often ends: the library bounds much, but not the work of an ambiguous grammar,
which grows with the cube of the text, and everybody's step waits for it."""
_NUM_WATCHED = 8
"""Steps whose masks are timed one by one after a slow one."""
_MAX_REASON = 300
_NO_TOKEN = "<|pelton: end of text|>"
_MAX_MASK_THREADS = 8
_MANY_MASKS = 4
"""Fewer are not worth waking other threads for: most take some 10 us."""

log = get_logger("worker.sampling")


class Matcher:
    """One text's place in a grammar; a GrammarState."""

    __slots__ = ("_num_slow", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._num_slow = 0

    @property
    def is_complete(self) -> bool:
        """Whether the text follows the grammar, and nothing may come any more."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Why the grammar can no longer be followed, or nothing."""
        if self.is_too_slow:
            return "its masks take too long: it is too ambiguous for a text of this length"
        return _reason(self.matcher) if self.matcher.is_error() else ""

    @property
    def is_too_slow(self) -> bool:
        """Whether it took too long too often."""
        return self._num_slow >= _MAX_SLOW

    def consume(self, token_id: int) -> bool:
        """Takes the text's next token; False where the grammar does not allow it."""
        begin = time.thread_time()
        taken = self.matcher.consume_token(token_id)
        self._took(time.thread_time() - begin)
        return taken

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, one after the other. Takes none."""
        begin = time.thread_time()
        count = int(self.matcher.validate_tokens(list(token_ids)))
        self._took((time.thread_time() - begin) / max(len(token_ids), 1))
        return count

    def fill(self, rows: Words, ahead: Sequence[int] = ()) -> None:
        """Writes the mask of the tokenizer's ids to the first of [1 + len(ahead), words] rows; to the others, those
        after each of the tokens `ahead`, which it allows."""
        begin = time.thread_time()
        if ahead:
            rows[:] = 0  # what comes after the text's end is not written
            fill = self.matcher.unsafe_compute_mask_ptr_with_draft_token  # type: ignore[attr-defined]  # not in its stub
            fill(rows.ctypes.data, rows[0].nbytes, list(ahead))
        else:
            self.matcher.unsafe_compute_mask_ptr(rows.ctypes.data, rows[0].nbytes)
        # By the mask: a text must not end because several of its tokens were looked at together.
        self._took((time.thread_time() - begin) / (1 + len(ahead)))

    def _took(self, seconds: float) -> None:
        self._num_slow += seconds > _SLOW_SECONDS


class _Vocabulary:
    """The tokenizer as llguidance wants it, made when it is first needed: that takes tenths of a second."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._failure: PeltonError | None = None
        self._num_words = -(-vocab_size // 32)
        self._within: Words = np.zeros(self._num_words, dtype=np.uint32)
        self.ends: Words = np.zeros(0, dtype=np.uint32)

    @property
    def is_made(self) -> bool:
        """Whether `tokenizer` returns, or raises, at once."""
        return self._tokenizer is not None or self._failure is not None

    def tokenizer(self) -> LLTokenizer:
        """Raises InvalidRequestError where this model's tokenizer is of a kind that has no byte strings."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._tokenizer is None:
                self._tokenizer = self._make()
            return self._tokenizer

    def _make(self) -> LLTokenizer:
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
            self._failure = InvalidRequestError(f"this model's tokenizer cannot follow grammars: {str(error)[:200]}")
            raise self._failure from None
        self.ends = _bits(ends, tokenizer.vocab_size)
        self._within = _bits(sorted(set(range(self._vocab_size)).difference(absent)), self._vocab_size)
        log.info("grammars_ready", seconds=round(time.monotonic() - begin, 2), num_ids=tokenizer.vocab_size)
        return tokenizer

    def _fit(self, source: str, ends: list[int]) -> tuple[str, list[int], list[int], int]:
        """A tokenizer with other ids than the model's: its source, the ends that it has, ids that stand for no token,
        and the number of ids."""
        known = Tokenizer.from_str(source)
        ids = set(known.get_vocab().values())
        ends = [token_id for token_id in ends if token_id in ids]
        absent: list[int] = []
        if not ends:
            # The library wants one: where nothing ends a text, a token that no model has stands for its end.
            known.add_special_tokens([_NO_TOKEN])
            source, absent = known.to_str(), [known.get_vocab()[_NO_TOKEN]]
        return source, ends or absent, absent, max([self._vocab_size - 1, *ids, *absent]) + 1

    def cut(self, wide: Words, masks: Words) -> Flags:
        """From masks over the tokenizer's ids to those over the model's; whether each text may end."""
        np.bitwise_and(wide[:, : self._num_words], self._within, out=masks)
        may_end: Flags = np.logical_or.reduce(wide & self.ends, axis=1)
        return may_end


class LLGrammars:
    """The grammars of one worker; a constraint.Grammars. Its methods are for the engine's thread.

    Args:
        tokenizer_json: of the model's text bundle.
        vocab_size: ids that the model has.
        eos_token_ids: ids that end a text.
        counters: raised here.
        on_compiled: called from another thread each time one has been compiled.
        num_threads: for the masks of a step.
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
        self._wide: Words = np.zeros((0, 0), dtype=np.uint32)
        self._cache = _Cache(cache_bytes)
        self._compilations: dict[str, _Compilation] = {}

    def warm_up(self) -> bool:
        """In idle time: makes what the first grammar would wait for. False where nothing is left to do."""
        if self._vocabulary.is_made:
            return False
        try:
            self._vocabulary.tokenizer()
        except PeltonError:
            return False  # who asks for a grammar will hear of it
        return True

    def prepare(self, source: str) -> _Waiting:
        """Begins to compile a grammar, or finds it compiled. Raises UnavailableError where threads are stuck."""
        for forsaken in [one for one in self._compilations.values() if one.num_waiting == 0]:
            self.settle(forsaken)
        compiled = self._cache.get(source)
        if compiled is not None:
            self._counters.grammar_cache_hits_total += 1
            return _Waiting(self, source, None, compiled)
        compilation = self._compilations.get(source)
        if compilation is None:
            compilation = _Compilation(source, self._vocabulary.tokenizer)
            compilation.future = self._threads.submit(compilation.run)
            compilation.future.add_done_callback(lambda _: self._on_compiled())
            self._compilations[source] = compilation
        compilation.num_waiting += 1
        return _Waiting(self, source, compilation, None)

    def fill(self, states: Sequence[GrammarState], masks: Words, ahead: Sequence[Sequence[int]] = ()) -> Flags:
        """Writes what each state allows to its row of [n, ceil(vocab / 32)] masks; [n], whether the text may end.

        Args:
            ahead: for each state the tokens, allowed by it, after each of which it has one more row; none: no tokens.
        """
        matchers = [state for state in states if isinstance(state, Matcher)]
        ahead = ahead or [()] * len(matchers)
        starts = list(accumulate((1 + len(tokens) for tokens in ahead), initial=0))
        num_rows, width = starts[-1], len(self._vocabulary.ends)
        if len(self._wide) < num_rows or self._wide.shape[1] != width:
            self._wide = np.zeros((max(num_rows, 2 * len(self._wide)), width), dtype=np.uint32)
        wide = self._wide[:num_rows]
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
        # The library refuses drafts that are none.
        alone = [(matcher.matcher, at) for matcher, at, tokens in zip(matchers, starts, ahead) if not tokens]
        place = wide.ctypes.data, 4 * wide.shape[1], len(wide)
        if drafted:
            wide[:] = 0  # what comes after a text's end is not written
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *place)
        if time.perf_counter() - begin > _SLOW_SECONDS:
            self._num_watched = _NUM_WATCHED

    def settle(self, compilation: _Compilation) -> bool:
        """Whether a compilation is over, well or not; the first time its outcome is kept."""
        if compilation.settled:
            return True
        future = compilation.future
        if future is None or not future.done():
            began = compilation.began
            if future is None or began is None or time.monotonic() - began < self._compile_seconds:
                return False
            self._threads.write_off(future)
            compilation.failure = InvalidRequestError(
                f"the grammar is not compiled after {self._compile_seconds:g} s: it is too complex",
                code="invalid_grammar",
            )
        elif not future.cancelled():
            compilation.take(future)
        compilation.settled = True
        self._forget(compilation)
        self._counters.grammar_compilations_total += 1
        self._counters.grammar_compile_seconds_total += compilation.seconds
        if compilation.compiled is not None:
            self._cache.put(compilation.source, compilation.compiled)
        return True

    def abandon(self, compilation: _Compilation) -> None:
        """One that waited for it has ended."""
        compilation.num_waiting -= 1
        future = compilation.future
        # One that has begun goes on, within its time; `prepare` looks after it.
        if compilation.num_waiting == 0 and not compilation.settled and future is not None and future.cancel():
            self._forget(compilation)

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.close()

    def _forget(self, compilation: _Compilation) -> None:
        if self._compilations.get(compilation.source) is compilation:
            del self._compilations[compilation.source]


class _Compilation:
    """One grammar on its way, for all that wait for it."""

    def __init__(self, source: str, tokenizer: Callable[[], LLTokenizer]) -> None:
        self.source = source
        self.num_waiting = 0
        self.future: Future[LLMatcher] | None = None
        self.began: float | None = None
        self.seconds = 0.0
        self.settled = False
        self.compiled: LLMatcher | None = None
        self.failure: PeltonError | None = None
        self._tokenizer = tokenizer

    def run(self) -> LLMatcher:
        """In a thread. Raises InvalidRequestError."""
        tokenizer = self._tokenizer()
        self.began = begin = time.monotonic()
        try:
            matcher = LLMatcher(tokenizer, self.source, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                # What goes wrong at the first token goes wrong now; and the first masks of its copies are quicker.
                matcher.compute_bitmask()
        except ValueError as error:
            raise InvalidRequestError(f"the grammar cannot be used: {error}", code="invalid_grammar") from None
        finally:
            self.seconds = time.monotonic() - begin
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be used: {_reason(matcher)}", code="invalid_grammar")
        return matcher

    def take(self, future: Future[LLMatcher]) -> None:
        """What `run` returned or raised."""
        error = future.exception()
        if error is None:
            self.compiled = future.result()
        elif isinstance(error, PeltonError):
            self.failure = error
        else:
            log.error("grammar_not_compiled", error=f"{type(error).__name__}: {error}"[:_MAX_REASON])
            self.failure = InvalidRequestError("the grammar cannot be used", code="invalid_grammar")


class _Waiting:
    """A PendingGrammar."""

    def __init__(
        self, grammars: LLGrammars, source: str, compilation: _Compilation | None, compiled: LLMatcher | None
    ) -> None:
        self._grammars = grammars
        self._source = source
        self._compilation = compilation
        self._compiled = compiled

    def poll(self) -> bool:
        """Whether `open` would return, or raise, at once."""
        return self._compilation is None or self._grammars.settle(self._compilation)

    def open(self) -> Matcher:
        """A copy of what was compiled. Raises PeltonError."""
        compiled = self._compiled
        if self._compilation is not None:
            compiled = self._compilation.compiled
            if self._compilation.failure is not None:
                raise self._compilation.failure
        if compiled is None:
            raise RuntimeError("a grammar is opened that is not compiled")
        return Matcher(compiled.deep_copy())

    def release(self) -> None:
        """Nobody waits for it any longer."""
        if self._compilation is not None:
            self._grammars.abandon(self._compilation)


class _Cache:
    """Compiled grammars by source, the least recently used forgotten where they take too many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, LLMatcher] = OrderedDict()

    def get(self, source: str) -> LLMatcher | None:
        compiled = self._entries.get(source)
        if compiled is not None:
            self._entries.move_to_end(source)
        return compiled

    def put(self, source: str, compiled: LLMatcher) -> None:
        if source in self._entries or _cost(source) > self._max_bytes:
            return
        self._entries[source] = compiled
        self._num_bytes += _cost(source)
        while self._num_bytes > self._max_bytes:
            oldest, _ = self._entries.popitem(last=False)
            self._num_bytes -= _cost(oldest)


def _cost(source: str) -> int:
    many = min(len(source), _MANY_CHARACTERS)
    return _BYTES_EACH + _BYTES_PER_CHARACTER * many + _BYTES_PER_FURTHER * (len(source) - many)


def _tokenizer(source: str, num_ids: int, ends: list[int]) -> LLTokenizer:
    """Raises ValueError for a tokenizer that has no byte strings, or other ids."""
    blanks, *strings = LLTokenizer.json_slices()
    # Tokens of a slice are allowed together where all that it matches may come; these halve the cost of plain words.
    slices = [blanks, "[a-z ]{1,10}", "[a-zA-Z ]{1,10}", *strings]
    return LLTokenizer(source, n_vocab=num_ids, eos_token=ends, slices=slices)


def _bits(token_ids: Sequence[int], num_ids: int) -> Words:
    flags = np.zeros(-(-num_ids // 32) * 32, dtype=np.uint8)
    flags[np.asarray(token_ids, dtype=np.int64)] = 1
    words: np.ndarray[Any, np.dtype[np.uint32]] = np.packbits(flags, bitorder="little").view("<u4")
    return words


def _reason(matcher: LLMatcher) -> str:
    """Of an error, the sentences; not the excerpts, the backtrace and the parser's state that follow."""
    text = matcher.get_error()
    for mark in ("\n<backtrace>", "\n<non-verbose/>", "\n<state>"):
        text = text.partition(mark)[0]
    if text.startswith("panic"):
        return "it is too large or too complex"
    return " ".join(text.split())[:_MAX_REASON]
