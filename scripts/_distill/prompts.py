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

TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me five tips for {}.",
    "Write a poem about {}.",
    "Summarise what is known about {} in three sentences.",
    "Write an email to a colleague about {}.",
    "List ten words that have to do with {}, and say what each means.",
    "How did {} change over the last hundred years?",
    "Write a dialogue between two friends who talk about {}.",
    "What should a beginner know about {}?",
    "Write a blog post about {} with a title and three headings.",
    "Compare {} with something similar.",
    "What questions would an expert ask about {}?",
    "Write an introduction to a lecture on {}.",
    "Describe {} as somebody from the year 1800 would.",
    "Make a plan for a week that has to do with {}.",
    "What is a common mistake about {}, and how is it put right?",
    "Write a Python program that has to do with {}, and explain it.",
    "Write a JSON object that describes {}.",
    "Make a table in Markdown about {}.",
    "Argue against {} in one paragraph.",
    "Give step by step instructions about {}.",
    "Write a news report about {}.",
    "What would happen if {} did not exist?",
    "Write a letter of complaint about {}.",
    "Invent a riddle about {} and give its answer.",
    "Describe a picture of {} in detail.",
    "Answer in one word: what do you think of first when you hear of {}?",
    "Write the minutes of a meeting about {}.",
    "Which books or films deal with {}?",
    "Write a short speech in favour of {}.",
)
"""Templates with one gap for a topic."""

TOPICS = (
    "baking bread", "the ocean", "learning a language", "electric cars", "old maps", "keeping bees", "black holes",
    "city parks", "public libraries", "chess", "gardening in winter", "the human heart", "volcanoes",
    "the printing press", "working from home", "cats and dogs", "railways", "saving money", "dreams",
    "the Roman Empire", "mountain climbing", "databases", "sorting numbers", "the weather", "vaccines",
    "cooking rice", "a lost key", "photography", "tea", "playing the piano", "solar power", "friendship",
    "the moon", "bicycles", "recycling", "a job interview", "sleep", "computer networks", "ancient Egypt",
    "running a small shop", "dinosaurs", "online privacy", "birds", "a birthday party", "mathematics at school",
    "rivers", "healthy food", "robots", "time travel", "travelling by ship", "museums", "honesty",
    "a haunted house", "football", "writing a diary", "prime numbers", "earthquakes", "a broken window", "coffee",
    "spiders",
)  # fmt: skip

HELD_OUT = (
    "Why is the sky blue?",
    "Name three rivers in Europe and say where they end.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me how a refrigerator works.",
    "My neighbour plays loud music at night. What can I do?",
    "Translate into French: Where is the nearest pharmacy?",
    "Write a function in JavaScript that reverses a string.",
    "Who was Marie Curie?",
    "I have eggs, flour and milk. What can I cook?",
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a haiku about autumn leaves.",
    "How do I find large files on Linux?",
    "Correct the grammar: he go to school every days and like it much.",
    "What does a notary do?",
    "Tell a joke about a penguin.",
    "Give me a packing list for three days in the rain.",
    "Explain how interest on a loan is worked out, with an example.",
    "Write a product description for a wooden spoon.",
    "What are the planets of the solar system, from the sun outwards?",
    "Say thank you to a teacher in four sentences.",
    "How does a bill become a law?",
    "Write an SQL query that counts orders by customer.",
    "What is 17 times 23? Show how you get there.",
    "Recommend a way to remember names.",
    "Describe the taste of a lemon to somebody who has never had one.",
    "Why do leaves fall in autumn?",
    "Continue: Once upon a time there was a clock that ran backwards",
    "What should I look at before I rent a flat?",
    "Write three interview questions for a nurse.",
    "Explain the offside rule.",
    "What is inflation?",
    "Make up a name and a slogan for a bakery.",
)
"""Prompts for evaluation, with other subjects than TOPICS and other forms than TASKS."""


Prompt = str | list[dict[str, Any]]
"""Text, or messages of a conversation."""
_HELD_OUT_SHARE = 20
_MIN_PROMPTS = 2


def own_prompts(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return prompts for training (every task with every topic, in random order) and prompts for evaluation."""
    learned: list[Prompt] = [task.format(topic) for task in TASKS for topic in TOPICS]
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
