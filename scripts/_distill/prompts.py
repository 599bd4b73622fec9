"""Prompts for the target: those of a file, or Pelton's own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import TextTokenizer
from shared.errors import ConfigurationError
from shared.messages import Bundle

_BUILT_IN = json.loads(Path(__file__).with_name("prompts.json").read_text("utf-8"))
HELD_OUT: list[str] = _BUILT_IN["held_out"]
"""Prompts for evaluation, with other subjects and other forms than those for training."""


Prompt = str | list[dict[str, Any]]
"""Text, or messages of a conversation."""
_HELD_OUT_SHARE = 20
_MIN_PROMPTS = 2


def own_prompts(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return prompts for training (every task with every topic, in random order) and prompts for evaluation."""
    learned: list[Prompt] = [task.format(topic) for task in _BUILT_IN["tasks"] for topic in _BUILT_IN["topics"]]
    random.Random(seed).shuffle(learned)
    return learned, list(HELD_OUT)


def read_prompts(path: Path, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Read prompts from a file and return them in random order: those for training, and one in 20 for evaluation.

    In a .jsonl file each line is an object with `prompt` (a string, as in the traces of scripts/replay) or `messages`;
    lines with neither are skipped. Any other file has one prompt per line. Empty lines and lines that begin with # are
    skipped.

    Raises:
        ConfigurationError: The file cannot be read, a line is invalid, or there are fewer than two different prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    found: list[Prompt] = []
    for number, line in numbered:
        prompt = _of_object(line, f"{path.name}, line {number}") if path.suffix == ".jsonl" else line.strip()
        if prompt is not None and prompt not in found:
            found.append(prompt)
    if len(found) < _MIN_PROMPTS:
        raise ConfigurationError(
            f"{path.name} has {len(found)} prompts, at least {_MIN_PROMPTS} are required (one is for evaluation)"
        )
    random.Random(seed).shuffle(found)
    num_held_out = max(1, len(found) // _HELD_OUT_SHARE)
    return found[num_held_out:], found[:num_held_out]


def _of_object(line: str, where: str) -> Prompt | None:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where}: expected a JSON object")
    messages, prompt = entry.get("messages"), entry.get("prompt")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    if isinstance(prompt, str) and prompt:
        return prompt
    if messages is not None or prompt is not None:
        raise ConfigurationError(f"{where}: `prompt` must be a string, `messages` a list of objects")
    return None


def tokenize(prompts: Sequence[Prompt], bundle: Bundle, max_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts as the server computes them; longer ones keep the last `max_tokens` tokens.

    A text is the message of a user, or is tokenized directly if the model has no chat template.

    Raises:
        ConfigurationError: The tokenizer cannot be used, or there are messages and no chat template.
        InvalidRequestError: The template rejects the messages.
    """
    tokenizer = TextTokenizer(bundle)
    template = None if bundle.chat_template is None else ChatTemplate(bundle.chat_template, bundle.special_tokens)
    found = []
    for prompt in prompts:
        if template is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = tokenizer.encode_guarded(template.render(tokenizer.guard(messages), None, True, {}))
        elif isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special_tokens=True)
        else:
            raise ConfigurationError("the model has no chat template: prompts must be strings")
        found.append(ids[-max_tokens:])
    return [ids for ids in found if ids]
