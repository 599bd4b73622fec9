"""Distillation of a draft model for speculative decoding: the first layers of the target, trained on its texts.

The draft has the first layers of the target, its embedding and its head. The target generates greedy and sampled texts,
and the layers of the draft are trained to reproduce the target's distributions. The embedding is not trained; a linear
map in front of the head is. The result is a model in the target's format (a GGUF file, or a folder with safetensors)
for --speculative-model.

Texts and checkpoints are stored in the folder `work` beside it, so that an interrupted run resumes with the same
result. Before and after training, the acceptance of the draft's tokens is measured on held-out prompts, greedy and at a
temperature of 0.7 with shared noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from scripts._distill import acceptance
from scripts._distill.draft import Draft, draft_spec
from scripts._distill.export import write_draft
from scripts._distill.loaded_model import LoadedModel, Text
from scripts._distill.prompts import own_prompts, read_prompts, tokenize
from scripts._distill.texts import (
    EVALUATED,
    TEXTS_AT_ONCE,
    Order,
    Recipe,
    digest,
    evaluation_orders,
    make_texts,
    orders,
    replaced,
)
from scripts._distill.training import Schedule, Training
from shared import log
from shared.arguments import Parser
from shared.errors import ConfigurationError, InvalidRequestError
from shared.settings import WorkerSettings
from worker.executor.resolve import cache_directory, prepare_process, resolve_dtype
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import default_model_path, open_model

_NUM_TOP = 32
"""Probabilities of the target that are recorded per token."""


class Distillation:
    """One run, with the options of `parser`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._out = Path(options.out)
        self._target = Path(options.model).expanduser() if options.model else default_model_path()
        if self._target.is_dir() and not (self._target / "config.json").exists():
            raise ConfigurationError(
                f"--model: {self._target.name} has no config.json; for GGUF give the path of the file"
            )
        if not self._target.exists():
            raise ConfigurationError(f"--model: there is no file or folder {self._target}")
        files = self._open()
        self._spec = draft_spec(files.spec, options.layers)
        self._recipe = Recipe(
            num_texts=options.texts,
            max_tokens=options.max_tokens,
            num_top=min(_NUM_TOP, files.spec.vocab_size),
            seed=options.seed,
        )
        if options.prompts is None:
            training, evaluation = own_prompts(options.seed)
        else:
            training, evaluation = read_prompts(options.prompts, options.seed)
        bundle = files.bundle
        self._training_orders = orders(tokenize(training, bundle, self._recipe.max_prompt), self._recipe)
        self._evaluation_orders = evaluation_orders(tokenize(evaluation, bundle, self._recipe.max_prompt), self._recipe)
        self._model_hash = files.model_hash
        self._loaded: LoadedModel | None = None
        files.weights.close()

    def run(self) -> dict[str, Any]:
        """Run the distillation and return the figures."""
        options = self._options
        path = self._write(None if options.steps == 0 else self._work / "untrained", None)
        figures: dict[str, Any] = {"layers": options.layers, "steps": options.steps}
        evaluated = (
            {}
            if options.no_measure
            else {t: self._texts(o, "evaluation texts") for t, o in self._evaluation_orders.items()}
        )
        found = self._measure("first layers", path, evaluated)
        if options.steps:
            draft = self._train(self._texts(self._training_orders, "training texts"), figures)
            path = self._write(None, draft)
            found |= self._measure("trained", path, evaluated)
        if found:
            print("\n".join(acceptance.table(found)), flush=True)
        figures["cpu_seconds"] = round(time.process_time())
        figures |= {"path": str(path), "acceptance": {name: msgspec.to_builtins(one) for name, one in found.items()}}
        with replaced(self._out / "report.json") as temporary:
            temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return figures

    @property
    def _work(self) -> Path:
        return self._out / "work"

    def _open(self) -> ModelFiles:
        return open_model(str(self._target), self._options.cache_dir)

    def _write(self, folder: Path | None, draft: Draft | None) -> Path:
        """Write a draft, or the target's layers if it is None, and return the path to load."""
        files = self._open()
        spec, trained = (self._spec, {}) if draft is None else (draft.written_spec, draft.written())
        try:
            return write_draft(folder or self._out, self._target, spec, trained, files.weights)
        finally:
            files.weights.close()

    def _texts(self, wanted: Sequence[Order], name: str) -> list[Text]:
        """Generate texts, or read those that were generated before."""
        found: list[Text] = []
        with tqdm(total=len(wanted), desc=name, unit="text", disable=None, file=sys.stderr) as bar:
            for texts in make_texts(wanted, self._work, self._recipe, self._model_hash, self._model):
                found += texts
                bar.update(len(texts))
                bar.set_postfix(tokens=sum(text.num_outputs for text in found))
        return found

    def _model(self) -> LoadedModel:
        """Return the target, loaded on first use."""
        if self._loaded is None:
            length = self._recipe.max_prompt + self._recipe.max_tokens
            self._loaded = LoadedModel(self._open(), num_texts=TEXTS_AT_ONCE, max_length=length)
        return self._loaded

    def _measure(self, name: str, path: Path, evaluated: dict[float, list[Text]]) -> dict[str, acceptance.Acceptance]:
        """Measure the acceptance of a written draft, loaded the way a worker loads it."""
        if not evaluated:
            return {}
        length = self._recipe.max_prompt + self._recipe.max_tokens
        draft = LoadedModel(open_model(str(path), self._options.cache_dir), num_texts=1, max_length=length)
        found = {}
        for temperature in EVALUATED:
            label = f"{name}, " + ("greedy" if temperature == 0 else f"temperature {temperature}")
            draws = [order.draw for order in self._evaluation_orders[temperature]]
            found[label] = acceptance.measure(draft, evaluated[temperature], draws)
        return found

    def _train(self, texts: Sequence[Text], figures: dict[str, Any]) -> Draft:
        self._loaded = None  # free memory for training
        options = self._options
        schedule = Schedule(
            steps=options.steps,
            batch=options.batch,
            learning_rate=options.learning_rate,
            warm_up=max(1, options.steps // 20),
            seed=options.seed,
        )
        files = self._open()
        dtype = resolve_dtype(WorkerSettings(device="cpu"), torch.device("cpu"))
        draft = Draft(self._spec, files.weights, dtype)
        files.weights.close()
        content = [
            digest(self._model_hash, self._recipe, self._training_orders),
            self._spec.num_layers,
            msgspec.to_builtins(schedule),
        ]
        run = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        training = Training(draft, schedule, self._work / "checkpoint.safetensors", run)
        training.resume()
        resumed = training.step
        losses: list[float] = []
        with tqdm(
            total=schedule.steps, initial=training.step, desc="training", unit="step", disable=None, file=sys.stderr
        ) as bar:

            def on_step(step: int, loss: float) -> None:
                losses.append(loss)
                bar.update(1)
                bar.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}")

            training.run(texts, on_step)
        figures["texts"] = {"count": len(texts), "tokens": sum(text.num_outputs for text in texts)}
        if losses and resumed == 0:
            figures["first_loss"] = losses[0]
        if losses:
            figures["last_loss"] = sum(losses[-20:]) / len(losses[-20:])
        return draft


def parser() -> argparse.ArgumentParser:
    """Return the option parser of scripts/distill_draft."""
    p = Parser(prog="scripts/distill_draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="folder of the draft")
    p.add_argument("--model", default="", help="path of the target; empty for the default model")
    p.add_argument(
        "--prompts",
        type=Path,
        help="file with a prompt per line, or .jsonl with `prompt` or `messages` (default: built-in prompts)",
    )
    p.add_argument("--layers", type=int, default=2, help="number of layers: the first ones of the target")
    p.add_argument("--steps", type=int, default=1500, help="training steps; 0 copies the layers without training")
    p.add_argument("--batch", type=int, default=4, help="texts per step")
    p.add_argument("--learning-rate", type=float, default=2e-3)
    p.add_argument("--texts", type=int, default=4096, help="number of texts for training; too few cause overfitting")
    p.add_argument("--max-tokens", type=int, default=192, help="maximum output tokens")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=0, help="number of threads; 0 for one per core")
    p.add_argument("--no-measure", action="store_true", help="do not measure acceptance")
    p.add_argument("--cache-dir", type=Path, default=cache_directory(WorkerSettings()))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 for invalid options or models and 130 if interrupted."""
    options = parser().parse_args(argv)
    prepare_process(WorkerSettings(device="cpu", num_threads=options.threads, cache_dir=str(options.cache_dir)))
    try:
        print(json.dumps(Distillation(options).run()))
    except (ConfigurationError, InvalidRequestError) as error:
        print(f"distill_draft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("distill_draft: interrupted; repeat the command to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    log.configure("warning", "console", process="distill")
    sys.exit(main())
