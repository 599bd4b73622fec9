"""Grammars compiled by llguidance: permitted tokens, costs, errors and caching."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from shared.errors import InvalidRequestError, PeltonError, UnavailableError
from tests.fakes.tokenizers import byte_fallback_json, byte_level_json, characters_json
from worker.sampling import grammar as module
from worker.sampling.grammar import LLGrammars, Matcher
from worker.stats import Counters

ROOT = Path(__file__).parents[4]
PATIENCE = 60.0


def make(tokenizer_json: bytes | None = None, **options) -> LLGrammars:
    defaults: dict = {"vocab_size": 342, "eos_token_ids": (2,), "counters": Counters()}
    return LLGrammars(tokenizer_json or byte_level_json(), **defaults | options)


def opened(grammars: LLGrammars, source: str, patience: float = PATIENCE) -> Matcher:
    pending = grammars.prepare(source)
    deadline = time.monotonic() + patience
    while not pending.poll():
        assert time.monotonic() < deadline, "not compiled in time"
        time.sleep(0.0005)
    return pending.open()


def ids_of(grammars: LLGrammars, state: Matcher, vocab_size: int = 342) -> list[int]:
    masks = np.full((1, -(-vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
    grammars.fill([state], masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


@cache
def tokenizer(source: bytes) -> Tokenizer:
    return Tokenizer.from_str(source.decode())


def schema(number: int) -> str:
    properties = {f"field_{number}": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}}
    return "start: %json " + json.dumps({"type": "object", "properties": properties, "required": ["age"]})


@pytest.mark.parametrize("source", [byte_level_json, byte_fallback_json, characters_json])
def test_a_token_is_allowed_where_its_own_bytes_may_come(source):
    vocabulary = tokenizer(source())
    size = vocabulary.get_vocab_size()
    grammars = make(source(), vocab_size=size)
    state = opened(grammars, "start: /[a-z]+,/")
    found = ids_of(grammars, state, size)
    texts = {token_id: vocabulary.decode([token_id]) for token_id in range(3, size)}
    plain = {
        token_id
        for token_id, text in texts.items()
        if text
        and text.isascii()
        and not vocabulary.id_to_token(token_id).startswith(("\u2581", "<0x"))
        and text.removesuffix(",").isalpha()
        and text.islower()
    }
    assert plain
    assert plain <= set(found)
    # Byte fallback tokens spell letters too.
    rest = {vocabulary.id_to_token(token_id) for token_id in set(found) - plain}
    assert rest <= {f"<0x{ord(letter):02X}>" for letter in "abcdefghijklmnopqrstuvwxyz"}


@pytest.mark.parametrize(
    ("vocab_size", "largest"), [(500, 341), (320, 317), (325, 324)], ids=["larger", "smaller", "odd"]
)
def test_masks_permit_only_ids_of_tokenizer_and_model(vocab_size, largest):
    """The surplus bits of the last word are cleared too."""
    grammars = make(vocab_size=vocab_size)
    found = ids_of(grammars, opened(grammars, r"start: /(.|\n)*/"), vocab_size)
    assert 2 in found
    assert max(found) == largest
    assert len(found) > 200


@pytest.mark.parametrize("eos", [(2,), (0, 2), (2, 900), ()])
def test_all_end_ids_are_permitted_where_the_text_may_end(eos):
    grammars = make(eos_token_ids=eos)
    ends = {token_id for token_id in eos if token_id < 342}
    state = opened(grammars, "start: /a{0,2}/")
    a = tokenizer(byte_level_json()).token_to_id("a")
    assert set(ids_of(grammars, state)) == {a, *ends}
    masks = np.zeros((2, 11), dtype=np.uint32)
    other = opened(grammars, 'start: "aa"')
    assert grammars.fill([state, other], masks).tolist() == [True, False]
    assert (state.consume(a), state.consume(a), state.is_complete) == (True, True, True)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_masks_after_drafts_equal_those_after_the_tokens(num_threads):
    """Some states have drafts and some have none; computing the masks does not change the states."""
    grammars, alone = make(num_threads=num_threads), make()
    rng = random.Random(num_threads)
    sources = [schema(number) for number in range(4)] + ["start: /[a-f]+x/", 'start: "a"']
    states = [opened(grammars, source) for source in sources]
    for counts in ([0, 3, 0, 2, 4, 1], [0] * 6, [2] * 6, [0, 0, 0, 0, 0, 2], [5, 0, 0, 0, 0, 0]):
        ahead, expected, may_end = [], [], []
        for source, count in zip(sources, counts, strict=True):
            twin, tokens = opened(alone, source), []
            for _ in range(count):
                expected.append(np.zeros((1, 11), dtype=np.uint32))
                may_end += alone.fill([twin], expected[-1]).tolist()
                found = [token for token in ids_of(alone, twin) if token != 2]
                if not found:
                    break
                tokens.append(rng.choice(found))
                assert twin.consume(tokens[-1])
            else:
                expected.append(np.zeros((1, 11), dtype=np.uint32))
                may_end += alone.fill([twin], expected[-1]).tolist()
            ahead.append(tokens)
        masks = np.full((sum(1 + len(tokens) for tokens in ahead), 11), 0xFFFFFFFF, dtype=np.uint32)
        assert [state.num_allowed([*tokens, 1]) for state, tokens in zip(states, ahead)] == list(map(len, ahead))
        assert grammars.fill(states, masks, ahead).tolist() == may_end
        assert np.array_equal(masks, np.concatenate(expected))


def test_special_tokens_are_spelled_by_their_ids():
    grammars = make()
    state = opened(grammars, 'start: <[1]> "a"')
    assert ids_of(grammars, state) == [1]
    assert 1 not in ids_of(grammars, opened(grammars, r"start: /(.|\n)*/"))


BAD = {
    "start: /(unclosed/": "regex",
    "start: /(?=a)b/": "regex",
    "start: missing": "missing",
    "start: <[999]>": "999",
    "nonsense": "",
    "{": "",
    "start: root\nroot: root": "",
    'start: %json {"$ref": "#"}': "",
    'start: %json {"type": "wrong"}': "",
    "start: " + "(" * 30_000 + '"a"' + ")" * 30_000: "nested",
}


@pytest.mark.parametrize("source", BAD, ids=range(len(BAD)))
def test_an_invalid_grammar_is_rejected_with_a_reason_for_the_client(source):
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used: .*" + BAD[source]) as caught:
        opened(make(), source)
    assert caught.value.code == "invalid_grammar"
    assert len(caught.value.message) < 400
    assert "backtrace" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tokenizer_without_byte_strings_is_rejected():
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, "added_tokens": []}
    grammars = make(json.dumps(words).encode(), vocab_size=2, eos_token_ids=(1,))
    assert not grammars.warm_up()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="tokenizer does not support grammars"):
            opened(grammars, 'start: "a"')


def deep(count: int) -> list[str]:
    rules = "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(count)), f'r{count}: "a"'])
    terminals = "\n".join(["start: T0", *(f'T{n}: "b" T{n + 1}? "c"' for n in range(count)), f'T{count}: "a"'])
    links = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)}
    references = {"$defs": {**links, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}
    return [rules, terminals, "start: %json " + json.dumps(references)]


def test_chains_of_rules_do_not_overrun_the_stack():
    """Run in a subprocess, because an overflow would end the process."""
    code = (
        "from tests.unit.worker.sampling.test_grammar import *\n"
        "grammars = make()\n"
        "for source in deep(8000):\n"
        "    try:\n"
        "        print(len(ids_of(grammars, opened(grammars, source))) > 0)\n"
        "    except InvalidRequestError:\n"
        "        print(True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert result.stdout.splitlines().count("True") == 3, result.stderr


BOMBS = {
    "nested repetition": "start: /(a+)+/",
    "repetition of repetition": "start: /(x{1,1000}){1,1000}/",
    "long repetition": "start: /.{0,100000}/",
    "large enum": "start: %json " + json.dumps({"enum": [f"value {n} {n * 7919}" for n in range(10_000)]}),
    "recursion": 'start: %json {"type": "object", "properties": {"a": {"$ref": "#"}}}',
    "items": 'start: %json {"type": "array", "items": {"type": "integer"}, "minItems": 1000000000}',
    "ambiguity": 'start: e\ne: e e | "a" | ""',
    "alternatives": "start: " + " | ".join(f'"x{n}"' for n in range(15_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_explodes_is_compiled_or_refused_in_bounded_time_and_others_go_on(name):
    grammars = make(num_threads=2)
    neighbour = opened(grammars, r"start: /(.|\n)*/")
    begin = time.monotonic()
    pending = grammars.prepare(BOMBS[name])
    masks = np.zeros((1, 11), dtype=np.uint32)
    gaps = []
    while not pending.poll():
        assert time.monotonic() - begin < PATIENCE
        before = time.monotonic()
        grammars.fill([neighbour], masks)
        neighbour.consume(70)
        gaps.append(time.monotonic() - before)
    try:
        state = pending.open()
    except InvalidRequestError:
        return
    assert max(gaps, default=0.0) < 2.0
    rng = random.Random(1)
    for _ in range(60):
        before = time.monotonic()
        found = ids_of(grammars, state)
        assert time.monotonic() - before < 5.0
        following = [token_id for token_id in found if token_id != 2]
        if state.error or not following:
            break
        if not state.consume(rng.choice(following)):
            assert state.error
            break


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_grammar_with_increasingly_slow_masks_ends_the_text(num_rows, monkeypatch):
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.01)
    grammars = make(num_threads=2)
    ambiguous = opened(grammars, 'start: e\ne: e e | /[a-z]/ | ""')
    others = [opened(grammars, "start: /[a-z]+/") for _ in range(num_rows - 1)]
    a = tokenizer(byte_level_json()).token_to_id("a")
    masks = np.zeros((num_rows, 11), dtype=np.uint32)
    for _ in range(500):
        may_end = grammars.fill([*others, ambiguous], masks)
        if ambiguous.error:
            break
        for state in (*others, ambiguous):
            assert state.consume(a)
    assert "too ambiguous" in ambiguous.error
    assert not masks[-1].any()
    assert not may_end[-1]
    assert not any(state.error for state in others)
    assert masks[:-1].any(axis=1).all()


@pytest.mark.parametrize(("seconds_each", "is_too_slow"), [(0.02, False), (0.06, True)])
def test_the_time_of_draft_masks_is_measured_per_mask(seconds_each, is_too_slow, monkeypatch):
    """A text that continues without drafts also continues with them."""
    now = 0.0

    class Library:
        def validate_tokens(self, token_ids):
            return self._take(len(token_ids))

        def unsafe_compute_mask_ptr_with_draft_token(self, address, num_bytes, token_ids):
            self._take(1 + len(token_ids))

        def _take(self, count):
            nonlocal now
            now += count * seconds_each
            return count

    monkeypatch.setattr(time, "thread_time", lambda: now)
    matcher = module.Matcher(Library())
    for _ in range(10):
        assert matcher.num_allowed([5] * 7) == 7
        matcher.fill(np.zeros((8, 11), dtype=np.uint32), [5] * 7)
    assert matcher.is_too_slow == is_too_slow


def test_endless_compilations_time_out_and_others_continue(monkeypatch):
    """Compilations that do not end lose their threads; after a few of them, new grammars are rejected for some time."""
    release = threading.Event()
    grammars = make(compile_seconds=1.0)
    compile_for_real = LLMatcher

    def compile_slowly(vocabulary, source, **options):
        if "slow" in source:
            release.wait(PATIENCE)
        return compile_for_real(vocabulary, source, **options)

    monkeypatch.setattr(module, "LLMatcher", compile_slowly)
    try:
        for number in range(4):
            with pytest.raises(InvalidRequestError, match="too complex") as caught:
                opened(grammars, f'start: "slow{number}"')
            assert caught.value.code == "invalid_grammar"
            if number < 3:
                opened(grammars, f'start: "quick{number}"')
        with pytest.raises(UnavailableError):
            grammars.prepare('start: "another"')
        opened(grammars, 'start: "quick0"')  # is in the cache
    finally:
        release.set()


def test_cached_grammars_are_ready_and_their_states_independent():
    counters = Counters()
    grammars = make(counters=counters)
    first = opened(grammars, "start: /[ab]{3}/")
    a = tokenizer(byte_level_json()).token_to_id("a")
    for _ in range(3):
        assert first.consume(a)
    begin = time.thread_time()
    for _ in range(100):
        pending = grammars.prepare("start: /[ab]{3}/")
        assert pending.poll()
        second = pending.open()
    assert (time.thread_time() - begin) / 100 < 0.001
    assert first.is_complete
    assert not second.is_complete
    assert a in ids_of(grammars, second)
    assert (counters.grammar_compilations_total, counters.grammar_cache_hits_total) == (1, 100)
    assert 0 < counters.grammar_compile_seconds_total < PATIENCE


def test_equal_grammars_share_one_compilation():
    counters, told = Counters(), threading.Semaphore(0)
    grammars = make(counters=counters, on_compiled=told.release)
    pending = [grammars.prepare(schema(1)) for _ in range(5)]
    assert told.acquire(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not all(one.poll() for one in pending):
        assert time.monotonic() < deadline
    for one in pending[:2]:
        one.release()
    states = [one.open() for one in pending[2:]]
    assert len({id(state.matcher) for state in states}) == 3
    assert counters.grammar_compilations_total == 1


def test_an_unused_compilation_is_cancelled_or_cached():
    counters = Counters()
    grammars = make(counters=counters)
    for number in range(50):
        grammars.prepare(schema(number)).release()
    opened(grammars, schema(99))
    deadline = time.monotonic() + PATIENCE
    while grammars._compilations and time.monotonic() < deadline:
        grammars.prepare(schema(99)).release()
    assert not grammars._compilations
    assert 1 <= counters.grammar_compilations_total <= 51


def test_the_cache_evicts_the_least_recently_used_grammars():
    counters = Counters()
    grammars = make(counters=counters, cache_bytes=5 * 160_000)
    for number in range(8):
        opened(grammars, schema(number))
        opened(grammars, schema(0))
    assert counters.grammar_compilations_total == 8
    opened(grammars, schema(1))
    assert counters.grammar_compilations_total == 9
    # A grammar larger than the cache is not kept and evicts nothing.
    large = "start: " + " | ".join(f'"x{n}"' for n in range(4000))
    opened(grammars, large)
    opened(grammars, large)
    opened(grammars, schema(0))
    assert counters.grammar_compilations_total == 11


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def test_two_thousand_schemas_leave_memory_bounded():
    grammars = make()
    for number in range(200):
        opened(grammars, schema(number))
    before = resident_megabytes()
    for number in range(200, 2200):
        opened(grammars, schema(number))
    assert resident_megabytes() - before < 100


def test_the_tokenizer_is_created_once_in_idle_time():
    grammars = make()
    assert grammars.warm_up()
    assert not grammars.warm_up()


def test_internal_errors_are_not_shown_to_clients(monkeypatch):
    def fail(*args, **options):
        raise MemoryError("at 0x7f00")

    monkeypatch.setattr(module, "LLMatcher", fail)
    with pytest.raises(PeltonError, match=r"^the grammar cannot be used$"):
        opened(make(), 'start: "a"')
