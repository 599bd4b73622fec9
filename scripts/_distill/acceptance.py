"""Acceptance of a draft's tokens by the target, on texts that the target generated.

The figures are exact without running the target: a draft token is accepted only if it equals the token of the text, so
the draft always continues the text. Sampled texts use the same noise for both models, as in serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scripts._distill.loaded_model import Draw, LoadedModel, Text

LONGEST = 7
"""Draft length for which the acceptance by position is reported."""
NUM_DRAFTS = (1, 2, 3, 5, LONGEST)


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance over all texts.

    Attributes:
        num_tokens: Number of compared tokens.
        match: Share of tokens that the draft chooses too.
        by_position: Acceptance rate of the first, second, ... of LONGEST draft tokens.
        per_round: Draft length -> mean number of tokens per pass of the target: accepted draft tokens plus one.
    """

    num_tokens: int
    match: float
    by_position: list[float]
    per_round: dict[int, float]


def rounds(matches: Sequence[bool], num_drafts: int) -> list[int]:
    """Return the number of accepted draft tokens in each round of a text, up to the end of the text."""
    accepted, start = [], 0
    while start < len(matches):
        part = list(matches[start : start + num_drafts])
        accepted.append(part.index(False) if False in part else len(part))
        start += accepted[-1] + 1
    return accepted


def summary(matches: Sequence[Sequence[bool]]) -> Acceptance:
    """Compute the acceptance from the matches at each position of the texts."""
    num_tokens = sum(map(len, matches))
    longest = [count for text in matches for count in rounds(text, LONGEST)]
    per_round = {k: num_tokens / max(1, sum(len(rounds(text, k)) for text in matches)) for k in NUM_DRAFTS}
    return Acceptance(
        num_tokens=num_tokens,
        match=sum(map(sum, matches)) / max(1, num_tokens),
        by_position=[sum(count > j for count in longest) / max(1, len(longest)) for j in range(LONGEST)],
        per_round=per_round,
    )


def measure(draft: LoadedModel, texts: Sequence[Text], draws: Sequence[Draw]) -> Acceptance:
    """Measure a draft on texts that were sampled with the given draws."""
    matches = []
    for text, draw in zip(texts, draws):
        chosen: list[int] = []
        for positions, logits in draft.predictions(text):
            chosen += draft.choose(logits, [draw] * len(positions), positions).tolist()
        written = text.token_ids[text.num_prompt :].tolist()
        matches.append([draft_token == token for draft_token, token in zip(chosen, written)])
    return summary(matches)


def table(found: dict[str, Acceptance]) -> list[str]:
    """Return the lines of the table; the keys name draft and temperature."""
    head = f"{'':28}{'match':>7}  " + "".join(f"{f'k={k}':>6}" for k in NUM_DRAFTS) + "  acceptance by position"
    lines = [head]
    for name, one in found.items():
        cells = "".join(f"{value:6.2f}" for value in one.per_round.values())
        positions = " ".join(f"{share:.0%}" for share in one.by_position)
        lines.append(f"{name:28}{one.match:7.1%}  {cells}  {positions}")
    return lines
