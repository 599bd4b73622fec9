"""Process for the trial compilation of clients' grammars: `python -m gateway.text.grammars.process`.

A grammar within all limits of llguidance can still take minutes (`multipleOf: 123456789`), gigabytes, or the whole
stack, which ends the process (a chain of a thousand `$ref`s). A grammar is therefore compiled here first, under limits
that the kernel enforces, and only then in a worker, whose limits are higher.

Messages on standard input and output: four bytes of length in little-endian order, and a Job or a Verdict as
MessagePack.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import struct
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_MEMORY = 640 << 20
"""Bytes of address space."""
MAX_CPU_SECONDS = 1.5
"""Processor time of one grammar. SIGPROF ends a process that takes longer."""
STACK_SIZE = 1 << 21
"""Bytes of stack. A worker's threads have four times as much, so a grammar that passes here cannot overflow them."""
NUM_STEPS = 128
"""Bytes of text that are tried, to find grammars that fail only after some text."""
WALK_SECONDS = 0.25
"""Processor time for these steps."""
MAX_TOKENIZERS = 4
_ALLOWED = re.compile(rb"[^\0]")
HEADER = struct.Struct("<I")
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits of a worker."""


class Job(msgspec.Struct, array_like=True, frozen=True):
    """A grammar to try.

    Attributes:
        grammar: The grammar.
        vocab_size: Size of the model's vocabulary; token ids in the grammar are below it.
        special_ids: Id by text of each special token.
    """

    source: str
    vocab_size: int = 0
    special_ids: dict[str, int] = {}


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """llguidance's own message about a grammar; None if the grammar is good."""

    error: str | None


class ByteVocabulary:
    """Vocabulary of all bytes and a model's special tokens.

    It suffices for trying a grammar and is much smaller than the model's own vocabulary.
    """

    bos_token_id = None

    def __init__(self, vocab_size: int, special_ids: dict[str, int]) -> None:
        taken = set(special_ids.values())
        size = max(vocab_size, 257 + len(taken), max(taken, default=0) + 1)
        self.tokens = [b""] * size
        for text, token_id in special_ids.items():
            self.tokens[token_id] = text.encode("utf-8", "replace")
        free = [token_id for token_id in range(min(size, 257 + len(taken))) if token_id not in taken][:257]
        for value, token_id in enumerate(free[:256]):
            self.tokens[token_id] = bytes([value])
        self._id_of = free
        self.eos_token_id = free[256]
        self.tokens[self.eos_token_id] = b"<end of text>"
        self.special_token_ids = [self.eos_token_id, *taken]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the ids of the bytes of a text."""
        return [self._id_of[value] for value in (text.encode() if isinstance(text, str) else text)]


def _judge(job: Job) -> Verdict:
    """Compile a grammar and generate a short text that it allows."""
    try:
        return Verdict(_fault(job))
    except Exception as error:  # noqa: BLE001 - whatever it is, the grammar cannot be used
        return Verdict(str(error) or type(error).__name__)


def _fault(job: Job) -> str | None:
    tokenizer = _tokenizer(job.vocab_size, tuple(job.special_ids.items()))
    matcher = LLMatcher(tokenizer, job.source, log_level=0, limits=_LIMITS)
    chooser = random.Random(0)
    began = time.process_time()
    for step in range(NUM_STEPS):
        if matcher.is_error():
            return matcher.get_error() or "it cannot be used"
        if matcher.is_stopped() and step:
            return None
        allowed = [found.start() for found in _ALLOWED.finditer(matcher.compute_logit_bias())]
        if matcher.is_error() or not allowed:
            return matcher.get_error() or "no text satisfies it"
        longer = [token_id for token_id in allowed if token_id != tokenizer.eos_token]
        if not longer:
            return None
        # Also if the mask took all the time: forced text, which llguidance then generates, may fail.
        matcher.consume_token(chooser.choice(longer))
        if time.process_time() - began > WALK_SECONDS:
            break
    return (matcher.get_error() or "it cannot be used") if matcher.is_error() else None


@lru_cache(MAX_TOKENIZERS)
def _tokenizer(vocab_size: int, special_ids: tuple[tuple[str, int], ...]) -> LLTokenizer:
    vocabulary = ByteVocabulary(vocab_size, dict(special_ids))
    return LLTokenizer(TokenizerWrapper(vocabulary), slices=LLTokenizer.json_slices())


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    while len(header := source.read(HEADER.size)) == HEADER.size:
        body = source.read(HEADER.unpack(header)[0])
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        answer = msgspec.msgpack.encode(_judge(decoder.decode(body)))
        sink.write(HEADER.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    """Answer jobs until standard input ends. Everything else on the machine has precedence."""
    os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_SIZE)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
