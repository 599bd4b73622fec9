"""Prompts that ask for what stands between a prefix and a suffix, in the marks that a model was trained with.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle". Which family a model is of, its
vocabulary says.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.flow.requests import TextPipelineLike
from shared.errors import InvalidRequestError

_ANCHOR = "\u263a"
"""A character before a text that must not begin as texts do, with the space that some tokenizers put there."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Attributes:
    prefix, suffix, middle: the marks; without a middle one the suffix comes first.
    ends: further tokens that end what is filled in, where the model has them.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark is not None)


_FAMILIES = (
    # Qwen's coders, CodeGemma, Granite 4
    _Family(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>",
        "<|file_separator|>", "<|repo_name|>"),
    ),
    # StarCoder, Granite, SantaCoder
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder: the hole is where the prefix ends
    _Family("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # CodeLlama
    _Family("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    # Codestral
    _Family("[PREFIX]", "[SUFFIX]", None),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FilledPrompt:
    """Attributes:
    token_ids: the whole prompt.
    end_ids: tokens that end what is filled in.
    """

    token_ids: list[int]
    end_ids: tuple[int, ...]


def can_fill_in_middle(pipeline: TextPipelineLike) -> bool:
    """Whether the model has marks for it."""
    return _family(pipeline) is not None


def _family(pipeline: TextPipelineLike) -> _Family | None:
    return next((one for one in _FAMILIES if all(pipeline.token_id(mark) is not None for mark in one.marks)), None)


async def fill_in_middle(
    prompt: str | list[int],
    suffix: str,
    pipeline: TextPipelineLike,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    param: str = "prompt",
) -> FilledPrompt:
    """The prompt for what stands between `prompt` and `suffix`.

    Raises InvalidRequestError, naming suffix, where the model has no marks for it.
    """
    family = _family(pipeline)
    if family is None:
        raise InvalidRequestError(
            "suffix is for models that were trained to fill in the middle; this one has no tokens for it.",
            param="suffix",
            code="unsupported_parameter",
        )
    before = (
        await pipeline.encode(prompt, False, max_tokens=max_tokens, param=param) if isinstance(prompt, str) else prompt
    )
    behind = await _continued(suffix, pipeline, max_tokens)
    marks = {mark: pipeline.token_id(mark) or 0 for mark in family.marks}
    opening = await pipeline.encode("", True) if add_special_tokens else []
    if family.middle is None:
        ids = [*opening, marks[family.suffix], *behind, marks[family.prefix], *before]
    else:
        ids = [*opening, marks[family.prefix], *before, marks[family.suffix], *behind, marks[family.middle]]
    ends = [token_id for text in family.ends if (token_id := pipeline.token_id(text)) is not None]
    return FilledPrompt(ids, (*ends, *marks.values()))


async def _continued(text: str, pipeline: TextPipelineLike, max_tokens: int | None) -> list[int]:
    """Ids of a text that continues another."""
    anchor = await pipeline.encode(_ANCHOR, False)
    ids = await pipeline.encode(_ANCHOR + text, False, max_tokens=max_tokens, param="suffix")
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    return await pipeline.encode(text, False, max_tokens=max_tokens, param="suffix")
