"""Grammars on a tiny model at a high temperature: every text matches its grammar."""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from shared.messages import FinishReason, Submit
from tests.fakes.engine_harness import make_submit
from tests.fakes.guessing import MAX_DRAFTS, speculation
from tests.fakes.tiny_server import VOCAB, TinyServer
from tests.fakes.tokenizers import characters_json
from tests.unit.worker.executor.outcomes import KnownGuesses, outcomes_alone, run_staggered
from worker.plan import ScheduledTokens, StepPlan
from worker.requests.constraint import Constraints
from worker.sampling.grammar import LLGrammars
from worker.stats import Counters

EOS = 2
NUM_REQUESTS = 16
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -5, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LARK = """start: sum
sum: product ("+" product){0,3}
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


GRAMMARS = {
    'start: %json {"x-guidance": {"whitespace_flexible": false}, ' + json.dumps(SCHEMA)[1:]: is_json,
    "start: /[a-c]{2,6}x/": lambda text: re.fullmatch("[a-c]{2,6}x", text),
    LARK: lambda text: re.fullmatch(r"(\d{1,3}|\(\d{1,3}\*\d{1,3}\))(\+(\d{1,3}|\(\d{1,3}\*\d{1,3}\))){0,3}", text),
    'start: ("yes" | "no" | "maybe, or so")': lambda text: text in ("yes", "no", "maybe, or so"),
}
WISHES: list[dict[str, object]] = [
    {},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"top_p": 0.9, "top_k": 30},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 0},
    {"min_p": 0.02, "logit_bias": {40: 5.0}},
    {"temperature": 0.0},
    {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"mirostat": 2, "logprobs": 1},
    {"dry_multiplier": 0.8, "top_n_sigma": 2.0, "dynatemp_range": 0.5},
    {"bad_words": ((50, 51), (36,)), "allowed_token_ids": tuple(range(3, 95))},
    {"min_tokens": 4, "presence_penalty": 0.5},
]


MODES = pytest.mark.parametrize(
    ("late", "num_pages"),
    [(False, 120), (True, 30), *(pytest.param(*mode, marks=pytest.mark.slow) for mode in ((False, 30), (True, 120)))],
)


def make_constraints(num_threads: int = 2) -> Constraints:
    grammars = LLGrammars(
        characters_json(),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        counters=Counters(),
        num_threads=num_threads,
    )
    grammars.warm_up()
    return Constraints(grammars, vocab_size=VOCAB, eos_token_ids=(EOS,))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread: tiny matrices do not benefit from more, and busy machines delay synchronization."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(characters_json().decode())


def text_of(token_ids: list[int]) -> str:
    return tokenizer().decode([token_id for token_id in token_ids if token_id != EOS])


def submits(count: int) -> list[Submit]:
    """Return requests, a third of them without a grammar, some with several choices or long prompts."""
    sources = list(GRAMMARS)
    made = []
    for number in range(count):
        prompt = [3 + (5 * number + step) % 90 for step in range(3 + 9 * (number % 4))]
        sampling = {"temperature": 1.5, "seed": number, "max_tokens": 50} | WISHES[number % len(WISHES)]
        grammar = "" if number % 3 == 2 else sources[number % len(sources)]
        if not grammar:
            sampling |= {"ignore_eos": True, "max_tokens": 12}
        made.append(make_submit(f"r{number}", prompt, sampling=sampling, grammar=grammar, num_choices=1 + number % 2))
    return made


@pytest.fixture(scope="module")
def alone():
    return outcomes_alone(submits(NUM_REQUESTS), lambda: make_constraints(num_threads=1))


def test_every_text_follows_its_grammar(alone):
    kinds = set()
    for submit in submits(NUM_REQUESTS):
        for choice in range(submit.num_choices):
            tokens, finish, logprobs, _ = alone[submit.request_id, choice]
            if submit.grammar:
                assert finish.reason is FinishReason.STOP
                assert GRAMMARS[submit.grammar](text_of(tokens)), text_of(tokens)
                kinds.add(submit.grammar)
            if submit.sampling.logprobs is not None:
                assert [entry[0] for entry in logprobs] == tokens
    assert kinds == set(GRAMMARS)


@MODES
@pytest.mark.parametrize("drafts", [False, True], ids=["without drafts", "drafts"])
def test_what_clients_see_is_what_each_would_see_alone(drafts, num_pages, late, alone, monkeypatch):
    server = TinyServer(
        monkeypatch,
        late=late,
        num_pages=num_pages,
        max_num_seqs=6,
        max_num_batched_tokens=32 if drafts else 24,
        constraints=make_constraints(),
        speculation=speculation() if drafts else None,
    )
    if drafts:
        KnownGuesses(server, alone, 0.8, num_pages, after_end=(EOS, *range(3, 3 + MAX_DRAFTS)))
    masked: list[ScheduledTokens] = []
    submit_plan = server.executor.submit

    def watch(plan: StepPlan):
        masked.extend(item for item in plan.scheduled if item.drafts and item.mask >= 0)
        return submit_plan(plan)

    monkeypatch.setattr(server.executor, "submit", watch)
    assert run_staggered(server, submits(NUM_REQUESTS)) == alone
    counters = server.scheduler.counters
    if drafts:
        assert len(masked) > 10
        assert counters.spec_decode_num_accepted_tokens_total > 50
    else:
        assert (counters.num_preemptions_total > 0) == (num_pages == 30)
        assert not late or server.num_captured > 0
