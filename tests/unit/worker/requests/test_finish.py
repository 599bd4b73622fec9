"""Conditions under which a choice ends by itself."""

from __future__ import annotations

import pytest

from shared.messages import Finish, FinishReason
from tests.fakes.engine_harness import make_submit
from worker.kv.manager import SequencePages
from worker.requests.request import Request, finish_after

EOS = 2
LENGTH = Finish(FinishReason.LENGTH)


def stopped(token_id: int) -> Finish:
    return Finish(FinishReason.STOP, stop_token_id=token_id)


def end(generated: list[int], *, emitted: int = 0, max_model_len: int = 64, **sampling) -> Finish | None:
    """Return how a request with a prompt of 3 tokens ends.

    The first `emitted` of the generated tokens came with the Submit.
    """
    prompt = [5, 6, 7]
    sampling = {"max_tokens": 10, **sampling}
    submit = make_submit("a", prompt + generated[:emitted], num_prompt_tokens=3, sampling=sampling)
    ends, pages = frozenset({EOS}), SequencePages(b"", 1)
    request = Request(submit, 0, owner=b"", arrival=0, eos_token_ids=ends, max_model_len=max_model_len, pages=pages)
    request.token_ids += generated[emitted:]
    return finish_after(request)


@pytest.mark.parametrize(
    ("generated", "sampling", "expected"),
    {
        "goes on": ([9], {}, None),
        "end of text": ([9, EOS], {}, stopped(EOS)),
        "end of text ignored": ([9, EOS], {"ignore_eos": True}, None),
        "own stop token": ([9, 8], {"stop_token_ids": (8,)}, stopped(8)),
        "end-of-text id is a stop token": ([EOS], {"stop_token_ids": (EOS,), "ignore_eos": True}, stopped(EOS)),
        "only the last token counts": ([8, 9], {"stop_token_ids": (8,)}, None),
        "within min_tokens": ([9, 9, EOS], {"min_tokens": 3}, None),
        "after min_tokens": ([9, 9, 9, EOS], {"min_tokens": 3}, stopped(EOS)),
        "length": ([9] * 10, {}, LENGTH),
        "one token before the length": ([9] * 9, {}, None),
        "stop token and length": ([9] * 9 + [EOS], {}, stopped(EOS)),
        "length within min_tokens": ([9] * 9 + [EOS], {"min_tokens": 10}, LENGTH),
        "context length": ([9] * 5, {"max_model_len": 8}, LENGTH),
        "resumed: tokens emitted before count": ([9] * 10, {"emitted": 6}, LENGTH),
        "resumed: min_tokens too": ([9, 9, 9, EOS], {"emitted": 2, "min_tokens": 3}, stopped(EOS)),
        "resumed: still within min_tokens": ([9, 9, EOS], {"emitted": 2, "min_tokens": 3}, None),
    }.values(),
)
def test_choice_end_conditions(generated, sampling, expected):
    assert end(generated, **sampling) == expected
