"""Part of bench_engine: gain of speculation where the output repeats the input, and its cost where it does not.

Each load runs on an engine without drafts and on one with n-gram lookup in turns, so that other load of the machine
affects both. The engines share one model and run all loads, so that costs and acceptance rates learned in one
load are used in the next, as in a server.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from gateway.text.tokenizer import TextTokenizer
from kernels.backends.reference import SamplingOps
from scripts._bench.engine_loop import Loop, engine_loop, local_executor, run_requests
from scripts._bench.measurements import Goal
from scripts._distill.prompts import HELD_OUT, tokenize
from shared.messages import Bundle
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.build import make_runner
from worker.executor.device import Device
from worker.executor.memory import KVPlan
from worker.executor.models import Models
from worker.model.decoder import Decoder
from worker.model.loading.model_files import ModelFiles
from worker.parallel import ParallelContext
from worker.stats import Counters

REPEATS_GOAL = Goal(1.6, form=".1f", unit="x")
ORDINARY_GOAL = Goal(0.97, form=".2f", unit="x")
CONCURRENCY = 16
OUTPUT = 128
WARM_UPS = 2
"""Rounds that are not counted: the engine learns costs and acceptance rates while serving."""

CODE = """def rectangle_area(width, height):
    return width * height

def triangle_area(base, height):
    return base * height / 2

def circle_area(radius):
    return 3.14159 * radius * radius

def box_volume(width, height, depth):
    return width * height * depth

print(rectangle_area(3, 4))
print(triangle_area(3, 4))
print(circle_area(2))
print(box_volume(2, 3, 4))
"""
PARAGRAPH = (
    "The lighthouse on the northern cape was built in 1871 by two brothers from the village. Its lamp burned oil for "
    "sixty years, until a cable was laid across the bay. The keeper still climbs the stairs every evening, though "
    "nobody asks him to, and writes the weather of the day into a thick book. There are forty of these books by now, "
    "and the oldest can hardly be read."
)
REPEATING = (
    f"Copy this code:\n\n```python\n{CODE}```",
    f"Change the name `box_volume` to `volume_of_box` in this code and write it again.\n\n```python\n{CODE}```",
    f"Copy this text:\n\n{PARAGRAPH}",
)
"""Prompts that contain the output: code, code with another name, and a paragraph."""

PREDICTIONS = (f"```python\n{CODE}```", f"```python\n{CODE}```".replace("box_volume", "volume_of_box"), PARAGRAPH)
"""Predicted outputs that a client would send."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one kind.

    Attributes:
        name: Name on the command line.
        title: Name in the table.
        prompts: Token ids.
        goal: Goal of the ratio to the speed without drafts.
        temperature: Sampling temperature.
        predictions: Predicted output of each prompt, or empty.
        together: True to run all requests at the same time and to the same length, so that all steps have the same
            number of requests; False to run them one after the other.
    """

    name: str
    title: str
    prompts: Sequence[Sequence[int]]
    goal: Goal
    temperature: float = 0.0
    predictions: Sequence[Sequence[int]] = ()
    together: bool = False


Method = Literal["off", "ngram"]
LOADS = ("repeat", "predict", "chat", "chat16", "sampled16")


def make_loads(bundle: Bundle, max_prompt: int) -> list[Load]:
    """Return the loads; longer prompts are cut to `max_prompt` tokens."""
    repeating, chat = tokenize(REPEATING, bundle, max_prompt), tokenize(HELD_OUT[:CONCURRENCY], bundle, max_prompt)
    tokenizer = TextTokenizer(bundle)
    predictions = [tokenizer.encode(text, add_special_tokens=False) for text in PREDICTIONS]
    return [
        Load("repeat", "1 request, output repeats input", repeating, REPEATS_GOAL),
        Load("predict", "same prompts, with predictions", repeating, REPEATS_GOAL, predictions=predictions),
        Load("chat", "1 request, chat", chat[:3], ORDINARY_GOAL),
        Load("chat16", f"{CONCURRENCY} requests, chat", chat, ORDINARY_GOAL, together=True),
        Load(
            "sampled16", f"{CONCURRENCY} requests, chat, temp. 0.7", chat, ORDINARY_GOAL, temperature=0.7, together=True
        ),
    ]


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Result of one load on one engine.

    Attributes:
        seconds: Time of the engine's steps, prompts included.
        texts: Output tokens of each prompt.
        counts: Increase of the engine's counters.
    """

    seconds: float
    texts: Sequence[Sequence[int]]
    counts: Mapping[str, float]

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return sum(len(text) for text in self.texts) / self.seconds


def run_load(loop: Loop, load: Load) -> LoadRun:
    """Run a load. Raises LoopError if a request fails."""
    before = loop.counters.as_dict()
    min_tokens = OUTPUT if load.together else 0
    sampling = [
        SamplingParams(temperature=load.temperature, seed=number, max_tokens=OUTPUT, min_tokens=min_tokens)
        for number in range(len(load.prompts))
    ]
    concurrency = len(load.prompts) if load.together else 1
    run = run_requests(loop, load.prompts, sampling, concurrency, predictions=load.predictions)
    after = loop.counters.as_dict()
    return LoadRun(run.seconds, run.texts, {name: after[name] - before[name] for name in after})


@contextmanager
def open_loops(
    settings: WorkerSettings, files: ModelFiles, decoder: Decoder, ops: SamplingOps
) -> Iterator[tuple[Loop, Loop]]:
    """Open an engine with n-gram lookup and one without drafts on one model.

    The settings must have max_model_len and num_kv_pages; the prefix cache is disabled.
    """
    assert settings.max_model_len is not None
    models = Models(decoder, ParallelContext(), None)
    methods: tuple[Method, Method] = ("ngram", "off")
    with ExitStack() as stack:
        loops = []
        for method in methods:
            chosen = dataclasses.replace(settings, enable_prefix_caching=False, speculative_method=method)
            runner = make_runner(chosen, models, KVPlan(chosen.num_kv_pages, settings.max_model_len), ops, Device())
            built = local_executor(chosen, runner.launch, len(files.spec.kv_groups), runner.draft_max_len)
            loops.append(stack.enter_context(engine_loop(chosen, files, built)))
        yield loops[0], loops[1]


def measure(loops: tuple[Loop, Loop], loads: Sequence[Load], rounds: int) -> list[dict[str, Any]]:
    """Run each load with and without drafts, print a line for each, and return the figures for JSON."""
    print("\n" + HEADER)
    entries = []
    for load in loads:
        runs: tuple[list[LoadRun], list[LoadRun]] = ([], [])
        for number in range(WARM_UPS + rounds):
            # Reverse the order every second round, because the first engine may be slower.
            for index in (0, 1) if number % 2 else (1, 0):
                run = run_load(loops[index], load)
                if number >= WARM_UPS:
                    runs[index].append(run)
        entries.append(figures(load, *runs))
        print(line(entries[-1], load.goal), flush=True)
    print(f"acceptance by position: {by_position(loops[0].counters)}")
    return entries


def figures(load: Load, runs: Sequence[LoadRun], off: Sequence[LoadRun]) -> dict[str, Any]:
    """Return the figures of an engine, given its runs and the runs without drafts next to them."""
    ratio = statistics.median(run.speed / other.speed for run, other in zip(runs, off))

    def total(counter: str) -> float:
        return sum(run.counts[counter] for run in runs)

    steps, drafted = total("engine_steps_total"), total("spec_decode_num_draft_tokens_total")
    texts = [pair for run, other in zip(runs, off) for pair in zip(run.texts, other.texts)]
    return {
        "load": load.name,
        "title": load.title,
        "tokens_per_second": statistics.median(run.speed for run in runs),
        "tokens_per_second_off": statistics.median(run.speed for run in off),
        "ratio": ratio,
        "tokens_per_step": total("generation_tokens_total") / steps,
        "drafts_per_step": drafted / steps,
        "acceptance": total("spec_decode_num_accepted_tokens_total") / drafted if drafted else None,
        "same_texts": sum(ours == theirs for ours, theirs in texts) / len(texts),
    } | load.goal.entry(ratio)


HEADER = f"{'speculation':34}{'tok/s':>7}{'off':>7}{'ratio':>8}{'tok/step':>10}{'drafts':>8}{'accepted':>10}"


def line(entry: Mapping[str, Any], goal: Goal) -> str:
    """Return a line of the table."""
    accepted = "-" if entry["acceptance"] is None else f"{entry['acceptance']:.0%}"
    return (
        f"{entry['title']:34}{entry['tokens_per_second']:7.0f}{entry['tokens_per_second_off']:7.0f}"
        f"{entry['ratio']:7.2f}x{entry['tokens_per_step']:10.2f}{entry['drafts_per_step']:8.2f}{accepted:>10}"
        f"  {entry['same_texts']:.0%} same texts ({goal.verdict(entry['ratio'])})"
    )


def by_position(counters: Counters) -> str:
    """Return the acceptance rate of each draft position, as shares of all verifications."""
    verified = counters.spec_decode_num_drafts_total
    return " ".join(f"{count / verified:.2f}" for count in counters.accepted_per_position) or "-"
