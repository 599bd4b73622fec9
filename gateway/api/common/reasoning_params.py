"""The fields that say whether and how long a model reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.api.common.ranges import MAX_INT32, check_range
from gateway.flow.requests import ModelEntryLike
from shared.errors import InvalidRequestError
from shared.sampling_params import ThinkingBudget

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn reasoning on and off."""
PROMPT_END = 16
"""So many last tokens of a prompt show whether it ends inside reasoning."""


def effort_variables(effort: str | None, given: Mapping[str, Any], entry: ModelEntryLike) -> dict[str, Any]:
    """What the chat template is told of `reasoning_effort`.

    It is passed on under its name where the template reads that, and as a switch (`none` is off, all else is on) where
    it reads one. Raises InvalidRequestError where the template reads neither, unless nothing was to be turned off.

    Args:
        given: the request's chat_template_kwargs; they must not say something else.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
    known = entry.pipeline.template_variables
    values: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in known}
    if "reasoning_effort" in known and (effort != "none" or not values):
        values["reasoning_effort"] = effort
    if not values and not (effort == "none" and entry.formats.reasoning is None):
        raise InvalidRequestError(
            "reasoning_effort is not supported by this model: its chat template has nothing for it.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    for name, value in values.items():
        if name in given and given[name] != value:
            raise InvalidRequestError(
                f"reasoning_effort and chat_template_kwargs.{name} say different things.", param="reasoning_effort"
            )
    return values


def ends_inside_reasoning(ids: list[int], continued: str, entry: ModelEntryLike) -> bool:
    """Whether the model goes on with reasoning when it answers this prompt.

    Args:
        continued: the content of the message that the model continues, if it does.
    """
    reasoning = entry.formats.reasoning
    if reasoning is None:
        return False
    last_start = max(continued.rfind(start) for start in reasoning.starts)
    if last_start >= 0:
        return all(continued.find(end, last_start) < 0 for end in reasoning.ends)
    return not continued and reasoning.is_open(entry.pipeline.decode(ids[-PROMPT_END:], False))


def marks_are_tokens(marks: Iterable[str], entry: ModelEntryLike) -> bool:
    """Whether each has a token of its own in it, by which it is found among ids."""
    return all(any(token in mark for token in entry.formats.added_ids) for mark in marks)


async def thinking_budget(
    max_tokens: int | None, entry: ModelEntryLike, *, opened: bool, constrained: bool
) -> ThinkingBudget | None:
    """`thinking_token_budget` with the ids of the model's marks.

    Args:
        opened: the prompt ends inside reasoning.
        constrained: a grammar says what follows the reasoning.

    Raises InvalidRequestError for a model without reasoning, or whose marks are no tokens, so that nobody could tell
    from the ids where reasoning begins.
    """
    if max_tokens is None:
        return None
    name = "thinking_token_budget"
    check_range(name, max_tokens, 0, MAX_INT32)
    reasoning = entry.formats.reasoning
    if reasoning is None:
        raise InvalidRequestError(
            f"{name} is not supported by this model: it has no reasoning format.",
            param=name,
            code="unsupported_parameter",
        )
    start, end = reasoning.starts[0], reasoning.ends[0] if constrained else reasoning.forced_end
    if not marks_are_tokens((start, end), entry):
        raise InvalidRequestError(
            f"{name} is not supported by this model: the marks of its reasoning are no tokens.",
            param=name,
            code="unsupported_parameter",
        )
    start_ids = await entry.pipeline.encode(start, False, param=name)
    end_ids = await entry.pipeline.encode(end, False, param=name)
    return ThinkingBudget(max_tokens=max_tokens, start_ids=tuple(start_ids), end_ids=tuple(end_ids), open=opened)
