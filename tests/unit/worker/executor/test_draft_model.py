"""Steps of the draft model: proposals, state, and independence of the target."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fakes.tiny_server import MAX_MODEL_LEN, VOCAB, tiny_spec, tiny_weights
from tests.fakes.weights import make_batch
from tests.unit.worker.executor.pair import PAGE, Pair, continued, copies_of, greedy, load, own_pages, poisoned
from tests.unit.worker.executor.pair import use_references as use_references_in
from worker.kv.storage import KVStorage
from worker.plan import BlockTableUpdate, DraftedRow, NewRow, ScheduledTokens, StepPlan

PROMPTS = ([5, 9, 77, 20, 13], [1, 4, 3, 8, 8, 8, 90, 30, 41, 7, 12], [60, 61], [9, 8, 7, 6, 5, 4, 9, 8, 7])
SAMPLING = (
    greedy(),
    greedy(temperature=0.9, top_p=0.9, top_k=30),
    greedy(temperature=0.0, logprobs=2, logit_bias={7: 2.0, 9: -100.0}),
    greedy(temperature=1.1, dry_multiplier=2.0, bad_words=((9,), (4, 5)), min_p=0.02),
)


@pytest.fixture(autouse=True)
def use_references(monkeypatch):
    use_references_in(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models():
    """Return models by the seed of their weights."""
    with pytest.MonkeyPatch.context() as patch:
        use_references_in(patch)
        return [load(tiny_weights(tiny_spec(), seed)) for seed in range(2)]


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request):
    return request.param


def test_a_draft_equal_to_the_target_proposes_the_targets_tokens(models, late):
    pair = Pair(models[0], models[0], late=late)
    known = [[*prompt, pair.enter(row, prompt, SAMPLING[row])] for row, prompt in enumerate(PROMPTS)]
    expected = [continued(models[0], known[row], 9, SAMPLING[row]) for row in range(4)]
    assert len(set(map(tuple, expected))) == 4
    drafted = pair.draft(*((row, 0, len(known[row]), 5) for row in range(4)))
    for row in range(4):
        assert drafted[row].token_ids == expected[row][:5]
        # The drafts in the rows are overwritten and do not affect later tokens.
        assert pair.decode(row, len(known[row]), 3) == expected[row][:3]
        known[row] += expected[row][:3]
    # The draft model has processed all tokens except the new ones: 3 of its 5 drafts, 2 of which it has read.
    for _ in range(3):
        drafted = pair.draft(*((row, len(known[row]) - 1, 1, 6) for row in range(4)))
        assert [drafted[row].token_ids for row in range(4)] == [expected[row][3:] for row in range(4)]
    if late:
        assert pair.num_captured == 1


def test_penalties_count_earlier_proposals(models, late):
    pair = Pair(models[0], models[0], late=late)
    sampling = (
        greedy(presence_penalty=2.0),
        greedy(repetition_penalty=1.8),
        greedy(),
        greedy(temperature=0.9, frequency_penalty=2.0),
    )
    known = [[*prompt, pair.enter(row, prompt, sampling[row])] for row, prompt in enumerate(PROMPTS)]
    drafted = pair.draft(*((row, 0, len(known[row]), 7 - row) for row in range(4)))
    expected = [continued(models[0], known[row], 7 - row, sampling[row]) for row in range(4)]
    assert [drafted[row].token_ids for row in range(4)] == expected


def test_capturing_passes_in_idle_time_changes_no_draft(models):
    pair = Pair(models[0], models[1], late=True)
    while pair.runner.capture_next():
        pass
    assert pair.num_captured == 4  # 1, 2, 4 and 5 rows
    known = [[*prompt, pair.enter(row, prompt, SAMPLING[row])] for row, prompt in enumerate(PROMPTS)]
    # The number of rows decreases: passes of 4, 3 and 1 rows, two of them padded.
    drafted = pair.draft(*((row, 0, len(known[row]), count) for row, count in enumerate((2, 5, 1, 3))))
    for row, count in enumerate((2, 5, 1, 3)):
        assert drafted[row].token_ids == continued(models[1], known[row], count, SAMPLING[row])


@pytest.mark.parametrize("windows", [False, True])
def test_another_draft_proposes_its_own_tokens(models, late, windows):
    """This includes a target with a window, whose first group provides the pages."""
    spec = tiny_spec(windows=windows)
    pair = Pair(load(tiny_weights(spec), spec), models[1], late=late)
    known = [[*prompt, pair.enter(row, prompt, SAMPLING[row])] for row, prompt in enumerate(PROMPTS)]
    drafted = pair.draft(*((row, 0, len(known[row]), 4) for row in range(4)))
    for row in range(4):
        assert drafted[row].token_ids == continued(models[1], known[row], 4, SAMPLING[row])


def test_rows_at_different_stages_in_one_step(models, late):
    pair = Pair(models[0], models[1], late=late)
    known = [[*prompt, pair.enter(row, prompt, SAMPLING[row])] for row, prompt in enumerate(PROMPTS)]
    drafted = pair.draft((1, 0, 5, 0), (0, 0, 6, 4), (2, 0, 3, 1))
    assert drafted[0].token_ids == continued(models[1], known[0], 4, SAMPLING[0])
    assert drafted[2].token_ids == continued(models[1], known[2], 1, SAMPLING[2])
    assert not pair.draft((1, 5, 3, 0), (3, 0, 9, 0))
    # Row 1 was read in chunks, row 3 except for its last token; row 0 has no new tokens but proposes again.
    drafted = pair.draft((0, 5, 1, 2), (3, 9, 1, 3), (1, 8, 4, 5))
    assert drafted[0].token_ids == continued(models[1], known[0], 2, SAMPLING[0])
    assert drafted[3].token_ids == continued(models[1], known[3], 3, SAMPLING[3])
    assert drafted[1].token_ids == continued(models[1], known[1], 5, SAMPLING[1])


def test_a_draft_uses_its_part_of_cached_pages(models, late):
    pair = Pair(models[0], models[1], late=late)
    first = PROMPTS[1]
    pair.enter(0, first)
    pair.draft((0, 0, 8, 0))
    other = [*first[:8], 33, 34]
    pages = own_pages(0)[:2] + own_pages(1)[2:]
    other.append(pair.enter(1, other, SAMPLING[1], pages=pages, computed=8))
    drafted = pair.draft((1, 8, 3, 4))[1]
    assert drafted.token_ids == continued(models[1], other, 4, SAMPLING[1])
    assert_as_from_the_start(pair, drafted, 11)


def assert_as_from_the_start(pair, drafted, num_known):
    """Check that the draft model, reading the whole row again, proposes the same tokens."""
    again = pair.draft((drafted.row, 0, num_known, len(drafted.token_ids)))[drafted.row]
    assert again.token_ids == drafted.token_ids


@pytest.mark.parametrize("in_draft_step", [False, True])
def test_a_fork_copies_the_draft_half_of_its_partial_page(models, late, in_draft_step):
    spec = tiny_spec(windows=True)
    pair = Pair(load(tiny_weights(spec), spec), models[1], late=late)
    prompt = PROMPTS[1]  # two full pages and three tokens of a third
    pair.enter(0, prompt)
    pair.draft((0, 0, 10, 3))
    pages = own_pages(0)[:2] + own_pages(1)[2:]
    copies = copies_of(own_pages(0)[2], pages[2], groups=2)
    known = [*prompt, 50, 51]
    if in_draft_step:
        tables = [BlockTableUpdate(1, group, 0, pages) for group in range(2)]
        pair.enter(1, known, SAMPLING[1])  # with pages of its own at first
        drafted = pair.draft((1, 10, 3, 3), block_tables=tables, page_copies=copies)
    else:
        pair.enter(1, known, SAMPLING[1], pages=pages, copies=copies, computed=10)
        drafted = pair.draft((1, 10, 3, 3))
    assert drafted[1].token_ids == continued(models[1], known, 3, SAMPLING[1])
    assert_as_from_the_start(pair, drafted[1], 13)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_broken_draft_does_not_affect_the_target(models, late, value):
    pair = Pair(models[0], load(poisoned(value)), late=late)
    known = [[*PROMPTS[row], pair.enter(row, PROMPTS[row], SAMPLING[row])] for row in range(2)]
    drafted = pair.draft((0, 0, len(known[0]), 4), (1, 0, len(known[1]), 2))
    for row, count in ((0, 4), (1, 2)):
        assert len(drafted[row].token_ids) == count
        assert all(0 <= token_id < VOCAB for token_id in drafted[row].token_ids)
        assert pair.decode(row, len(known[row]), 6) == continued(models[0], known[row], 6, SAMPLING[row])


@pytest.mark.parametrize("size", [VOCAB - 6, VOCAB + 5])
def test_a_draft_of_another_padded_size(models, late, size):
    """Its logits are truncated or padded, and ids beyond its vocabulary are read as its last id."""
    spec = dataclasses.replace(tiny_spec(), vocab_size=size)
    weights = tiny_weights(tiny_spec(), 1)
    table = weights.tensors["embed.weight"]
    # The surplus ids would be likely if they were permitted.
    weights.tensors["embed.weight"] = table[:size] if size < VOCAB else torch.cat((table, 5 * table[:5]))
    pair = Pair(models[0], load(weights, spec), late=late)
    prompt = [5, VOCAB - 1, 9, VOCAB - 3, 14]
    known = [*prompt, pair.enter(0, prompt, greedy())]
    drafted = pair.draft((0, 0, 6, 5))[0]
    for _ in range(3):  # the last pass is a graph on devices with graphs
        assert pair.draft((0, 5, 1, 5))[0].token_ids == drafted.token_ids
    assert all(0 <= token_id < min(size, VOCAB) for token_id in drafted.token_ids)
    if size < VOCAB:
        clamped = [min(token_id, size - 1) for token_id in known]
        kv = KVStorage(spec, 20, PAGE, torch.float32, "cpu")
        logits = load(weights, spec).forward(make_batch([(clamped, 0, list(range(20)))], PAGE), kv)
        assert drafted.token_ids[0] == logits[-1].argmax()


def test_rows_without_permitted_tokens_get_the_first_token_as_draft(models):
    pair = Pair(models[0], models[1])
    known = [*PROMPTS[0], 3]
    pair.enter(0, known, greedy(allowed_token_ids=(5,), bad_words=((5,),), ignore_eos=True))
    drafted = pair.draft((0, 0, 6, 2))[0]
    assert drafted.token_ids == [0, 0]


def test_invalid_draft_steps_are_rejected(models):
    pair = Pair(models[0], models[1], max_len=12)
    pair.enter(0, PROMPTS[1])
    assert len(pair.draft((0, 0, 12, 1))[0].token_ids) == 1
    assert len(pair.draft((0, 0, 10, 3))[0].token_ids) == 3
    for row in ((0, 0, 12, 2), (0, 0, 13, 0), (0, 11, 0, 1)):
        with pytest.raises(ValueError, match="row 0 drafts"):
            pair.draft(row)
    drafting = [DraftedRow(0, 0, 4, 1)]
    with pytest.raises(ValueError, match="must not schedule tokens"):
        pair.runner.launch(pair.plan(scheduled=[ScheduledTokens(0, 0, 4, True)], drafting=drafting))
    with pytest.raises(ValueError, match="there is no draft model"):
        Pair(models[0]).runner.launch(StepPlan(step=1, scheduled=[], drafting=drafting))


def test_steps_of_both_models_follow_each_other_before_any_is_waited_for(models):
    """Several passes use host buffers at the same time, as with two steps in flight."""
    pair = Pair(models[0], models[1], late=True)
    known = [*PROMPTS[0], pair.enter(0, PROMPTS[0])]
    other = list(PROMPTS[1])
    new = NewRow(row=1, token_ids=other, num_prompt_tokens=11, sampling=SAMPLING[1], eos_token_ids=[2], choice=0)
    launched = [
        pair.runner.launch(pair.plan(drafting=[DraftedRow(0, 0, 6, 9)])),
        pair.runner.launch(
            pair.plan(
                scheduled=[ScheduledTokens(0, 5, 1, True), ScheduledTokens(1, 0, 11, True)],
                new_rows=[new],
                block_tables=[BlockTableUpdate(1, 0, 0, own_pages(1))],
            )
        ),
        pair.runner.launch(pair.plan(drafting=[DraftedRow(1, 0, 11, 0), DraftedRow(0, 6, 1, 4)])),
    ]
    assert not launched[-1].done()
    drafted, sampled, last = (step.result() for step in launched)
    assert launched[0].done() and launched[0].result() == drafted
    assert drafted.drafted[0].token_ids == continued(models[1], known, 9)
    assert [token.token_id for token in sampled.sampled] == [
        *continued(models[0], known, 1),
        *continued(models[0], other, 1, SAMPLING[1]),
    ]
    known.append(sampled.sampled[0].token_id)
    assert last.drafted[0].token_ids == continued(models[1], known, 4)
    assert len(known) + 9 < MAX_MODEL_LEN
