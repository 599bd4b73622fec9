"""Token ids that end a text: the union of all places in which a model declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

# Names of tokens that end a turn. One counts if it is an added token of the vocabulary (a piece that ordinary text does
# not merge into) and the chat template writes it.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)


def turn_end_ids(chat_template: str | None, added_token_id: Callable[[str], int | None]) -> list[int]:
    """Return the ids of the turn ends that the template uses."""
    if not chat_template:
        return []
    found = (added_token_id(name) for name in TURN_ENDS if name in chat_template)
    return [token_id for token_id in found if token_id is not None]


def united(*places: Iterable[int]) -> tuple[int, ...]:
    """Return all ids, once each, in ascending order."""
    return tuple(sorted({token_id for place in places for token_id in place}))
