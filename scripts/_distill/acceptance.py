"""How many of a draft's tokens a target would accept, on texts that the target wrote itself.

Exact, without the target: a draft is accepted only where it is the token of the text, and so a draft is only ever
asked to continue the text. At a temperature both sample with the same noise, as in serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scripts._distill.loaded_model import Draw, LoadedModel, Text

LONGEST = 7
"""Drafts at a time for which acceptance by position is reported."""
NUM_DRAFTS = (1, 2, 3, 5, LONGEST)


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Of all texts together.

    Attributes:
        num_tokens: that were compared.
        match: share of them that the draft would have chosen, too.
        by_position: of LONGEST drafts at a time, the share of rounds in which the first, the second, ... is accepted.
        per_round: number of drafts at a time -> mean tokens that come of a pass of the target: those accepted, and one.
    """

    num_tokens: int
    match: float
    by_position: list[float]
    per_round: dict[int, float]


def rounds(matches: Sequence[bool], num_drafts: int) -> list[int]:
    """How many drafts are accepted in each round of a text, one after the other. Those beyond its end do not count."""
    accepted, start = [], 0
    while start < len(matches):
        part = list(matches[start : start + num_drafts])
        accepted.append(part.index(False) if False in part else len(part))
        start += accepted[-1] + 1
    return accepted


def summary(matches: Sequence[Sequence[bool]]) -> Acceptance:
    """Of the texts' matches, position by position."""
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
    """Of a draft, on texts that were drawn so. It has room for one text at least."""
    matches = []
    for text, draw in zip(texts, draws):
        chosen: list[int] = []
        for positions, logits in draft.predictions(text):
            chosen += draft.choose(logits, [draw] * len(positions), positions).tolist()
        written = text.token_ids[text.num_prompt :].tolist()
        matches.append([mine == theirs for mine, theirs in zip(chosen, written)])
    return summary(matches)


def table(found: dict[str, Acceptance]) -> list[str]:
    """Lines for people; keys say which draft and which temperature."""
    head = f"{'':28}{'match':>7}  " + "".join(f"{f'k={k}':>6}" for k in NUM_DRAFTS) + "  accepted by position"
    lines = [head]
    for name, one in found.items():
        cells = "".join(f"{value:6.2f}" for value in one.per_round.values())
        positions = " ".join(f"{share:.0%}" for share in one.by_position)
        lines.append(f"{name:28}{one.match:7.1%}  {cells}  {positions}")
    return lines
