"""The target's own texts, which a draft learns from and is judged by: made once, and kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from scripts._distill.files import replaced
from scripts._distill.loaded_model import Draw, LoadedModel, Text

TEXTS_AT_ONCE = 64
"""Generated together, and kept in one file."""
JUDGED = (0.0, 0.7)
"""Temperatures at which drafts are judged."""
_FORMAT = 1


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How texts are made.

    Attributes:
        num_texts: to learn from. Where there are fewer prompts, each is used several times.
        max_prompt, max_tokens: of a text; longer prompts keep their end.
        num_top: alternatives that are recorded at each position.
        temperature: of the texts that are sampled; a fourth of them is greedy.
    """

    num_texts: int
    max_prompt: int
    max_tokens: int
    num_top: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Order:
    """One text to make."""

    prompt: Sequence[int]
    draw: Draw


def orders(prompts: Sequence[Sequence[int]], recipe: Recipe) -> list[Order]:
    """The texts to learn from. None is greedy after the first round through the prompts: it would be the same text."""
    found = []
    for number in range(recipe.num_texts):
        greedy = number % 4 == 0 and number < len(prompts)
        draw = Draw(0.0 if greedy else recipe.temperature, recipe.seed + number)
        found.append(Order(prompts[number % len(prompts)], draw))
    return found


def judged_orders(prompts: Sequence[Sequence[int]], recipe: Recipe) -> dict[float, list[Order]]:
    """The texts to judge by, each prompt once at each temperature."""
    return {
        temperature: [Order(prompt, Draw(temperature, recipe.seed + i)) for i, prompt in enumerate(prompts)]
        for temperature in JUDGED
    }


def digest(model_hash: str, recipe: Recipe, wanted: Sequence[Order]) -> str:
    """Equal where the texts would be the same."""
    content = [_FORMAT, model_hash, recipe.max_tokens, recipe.num_top, [asdict(order) for order in wanted]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def make_texts(
    wanted: Sequence[Order], folder: Path, recipe: Recipe, model_hash: str, model: Callable[[], LoadedModel]
) -> Iterator[list[Text]]:
    """The texts, file by file: those that are on disk are read, the others are made and written.

    Args:
        model: called where texts are to be made.
    """
    for start in range(0, len(wanted), TEXTS_AT_ONCE):
        part = wanted[start : start + TEXTS_AT_ONCE]
        path = folder / f"texts-{digest(model_hash, recipe, part)}.safetensors"
        texts = _read(path)
        if texts is None:
            texts = model().generate(
                [order.prompt for order in part],
                [order.draw for order in part],
                max_tokens=recipe.max_tokens,
                num_top=recipe.num_top,
            )
            _write(path, texts)
        yield texts


def _write(path: Path, texts: Sequence[Text]) -> None:
    tensors = {
        "token_ids": torch.cat([text.token_ids for text in texts]),
        "lengths": torch.tensor([len(text.token_ids) for text in texts]),
        "num_prompt": torch.tensor([text.num_prompt for text in texts]),
        "top_ids": torch.cat([text.top_ids for text in texts]),
        "top_logprobs": torch.cat([text.top_logprobs for text in texts]),
    }
    with replaced(path) as temporary:
        save_file(tensors, temporary)


def _read(path: Path) -> list[Text] | None:
    """None where there is no such file, or one that cannot be used."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError):
        return None
    prompts = stored["num_prompt"].tolist()
    tokens = stored["token_ids"].split(stored["lengths"].tolist())
    counts = [len(ids) - prompt for ids, prompt in zip(tokens, prompts)]
    top_ids, top_logprobs = stored["top_ids"].split(counts), stored["top_logprobs"].split(counts)
    return [Text(*fields) for fields in zip(tokens, prompts, top_ids, top_logprobs)]
