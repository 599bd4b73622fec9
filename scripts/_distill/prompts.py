"""What the target is asked for its outputs: prompts of a file, or Pelton's own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import TextTokenizer
from scripts._distill.prompt_texts import HELD_OUT, TASKS, TOPICS
from shared.errors import ConfigurationError
from shared.messages import Bundle

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a conversation."""
_HELD_OUT_SHARE = 20
_FEWEST = 2


def own_prompts(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to learn from, every task with every topic in random order; and others, on other things, to judge by."""
    learned: list[Prompt] = [task.format(topic) for task in TASKS for topic in TOPICS]
    random.Random(seed).shuffle(learned)
    return learned, list(HELD_OUT)


def read_prompts(path: Path, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of a file in random order, a twentieth of them to judge by.

    In a .jsonl file each line is an object with `prompt` (text, as in the traces of scripts/replay) or `messages`;
    lines with neither say nothing and are passed over. Any other file has a prompt a line. Empty lines and those that
    begin with # are skipped.

    Raises:
        ConfigurationError: the file cannot be read, a line is wrong, or there are not two different prompts.
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
    if len(found) < _FEWEST:
        raise ConfigurationError(f"{path.name} has {len(found)} prompts; {_FEWEST} are needed: one is to judge by")
    random.Random(seed).shuffle(found)
    num_held_out = max(1, len(found) // _HELD_OUT_SHARE)
    return found[num_held_out:], found[:num_held_out]


def _of_object(line: str, where: str) -> Prompt | None:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where}: a JSON object is needed")
    messages, prompt = entry.get("messages"), entry.get("prompt")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    if isinstance(prompt, str) and prompt:
        return prompt
    if messages is not None or prompt is not None:
        raise ConfigurationError(f"{where}: `prompt` must be a text, `messages` a list of objects")
    return None


def tokenize(prompts: Sequence[Prompt], bundle: Bundle, max_tokens: int) -> list[list[int]]:
    """Token ids of prompts as the server makes them: a text is what a user says, or goes as it is where the model has
    no chat template. Longer ones keep their last `max_tokens` tokens.

    Raises:
        ConfigurationError: the model's tokenizer cannot be used, or there are messages and no template.
        InvalidRequestError: the template refuses the messages.
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
            raise ConfigurationError("the model has no chat template: prompts must be texts")
        found.append(ids[-max_tokens:])
    return [ids for ids in found if ids]
