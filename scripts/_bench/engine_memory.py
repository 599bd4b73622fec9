"""Part of bench_engine: growth of a worker's memory with the number of requests.

Short requests of all kinds (sampling parameters, choices, log-probabilities, known and new grammars, deadlines,
priorities, cancellations) pass through the engine and its socket with a tiny random model. All bounded caches are full
after a warm-up, so that growth after it is a leak.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kernels.backends.select import sampling_ops
from scripts._bench.engine_loop import Loop, LoopError, engine_loop
from scripts._bench.engine_steps import EVERY_KIND, PLAIN
from scripts._bench.gpu_check_model import RandomWeights
from scripts._bench.measurements import Goal, resident_bytes, slope
from shared.messages import Bundle, Finish, FinishReason
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.executor.build import build_executor
from worker.model.loading.model_files import ModelFiles
from worker.model.spec import DecoderSpec, RopeSpec

GOAL = Goal(20, is_minimum=False, form=".0f", unit=" KB per 1,000 requests")
"""Equal to 2 MB over 100,000 requests."""
WARM_UP_SHARE = 0.5
_EOS = 2
_NUM_SAMPLES = 20
_IN_FLIGHT = 48
_MAX_TOKENS = 10
_GRAMMARS = tuple(f"start: /{word}[a-z]{{1,6}}/" for word in ("a", "b", "c", "[0-9]+", "x|y", "the "))

SPEC = DecoderSpec(
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=320,
    max_position=256,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=64),
    eos_token_ids=(_EOS,),
)


def measure(settings: WorkerSettings, num_requests: int) -> dict[str, Any]:
    """Serve `num_requests` requests. Raises LoopError if one fails or does not end exactly once."""
    built = build_executor(settings, tiny_files())
    # Compile everything now, otherwise kernels compiled on first use would count as growth.
    sampling_ops(torch.device("cpu"), settings.num_threads).compile()
    try:
        with engine_loop(settings, tiny_files(), built) as loop:
            traffic = _Traffic(loop, Random(0))
            samples: list[tuple[int, int]] = []
            begin = time.monotonic()
            for number in range(_NUM_SAMPLES + 1):
                traffic.run_until(num_requests * number // _NUM_SAMPLES)
                samples.append((traffic.num_ended, resident_bytes()))
            seconds = time.monotonic() - begin
            traffic.drain()
            loop.engine.scheduler.check_integrity()
            counters = loop.counters
    finally:
        built.executor.close()
    figures = growth(samples)
    return {
        "requests": traffic.num_ended,
        "requests_per_second": traffic.num_ended / seconds,
        "ends": dict(sorted(traffic.ends.items())),
        "grammars_compiled": counters.grammar_compilations_total,
        "preemptions": counters.num_preemptions_total,
        "pages_evicted": counters.prefix_cache_evictions_total,
        "samples_kb": [[count, size >> 10] for count, size in samples],
        **figures,
        **GOAL.entry(figures["kb_per_1000_requests"]),
    }


def growth(samples: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the megabytes after the warm-up and at the end, and the slope between, from (requests, bytes)."""
    begin = round(len(samples) * WARM_UP_SHARE)
    later = samples[begin:]
    per_request = slope([float(count) for count, _ in later], [float(size) for _, size in later])
    return {
        "warm_mb": later[0][1] / 2**20,
        "end_mb": later[-1][1] / 2**20,
        "kb_per_1000_requests": per_request * 1000 / 1024,
    }


def table(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table."""
    slope_kb = figures["kb_per_1000_requests"]
    ends = ", ".join(f"{count} {reason}" for reason, count in figures["ends"].items())
    rss = f"RSS {figures['warm_mb']:.1f} MB warm, {figures['end_mb']:.1f} at the end, {slope_kb:+.1f} KB per 1,000"
    work = f"{figures['grammars_compiled']} grammars, {figures['preemptions']} preemptions"
    speed = f"{figures['requests']} requests ({figures['requests_per_second']:.0f}/s)"
    return [
        f"memory, {speed}: {rss} ({GOAL.verdict(slope_kb)})",
        f"{'':8}choices ended: {ends}; {work}, {figures['pages_evicted']} pages evicted",
    ]


def tiny_settings(cache_dir: str) -> WorkerSettings:
    """Return settings with few rows and pages, so that there are queues, preemptions and evictions."""
    return WorkerSettings(
        device="cpu",
        num_threads=1,
        cache_dir=cache_dir,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=96,
        num_kv_pages=64,
    )


def tiny_files() -> ModelFiles:
    """Return the files of a random model whose tokens are single bytes."""
    return ModelFiles(
        spec=SPEC,
        weights=RandomWeights(SPEC),
        bundle=Bundle(bundle_hash="", tokenizer_json=_byte_tokenizer()),
        eos_token_ids=SPEC.eos_token_ids,
        default_name="tiny",
        created=0,
        model_hash="",
    )


def _byte_tokenizer() -> bytes:
    names = ["<unk>", "<s>", "</s>"]
    vocab = {name: index for index, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    return tokenizer.to_str().encode()


def sampling_kinds(vocab_size: int) -> list[dict[str, Any]]:
    """Return sampling parameters of all kinds, for a small vocabulary and short texts."""
    found: list[dict[str, Any]] = [dict(PLAIN), {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}]
    for kind in EVERY_KIND:
        fitted = dict(kind)
        if "min_tokens" in fitted:
            fitted["min_tokens"] = 1
        if "allowed_token_ids" in fitted:
            fitted["allowed_token_ids"] = tuple(range(50, vocab_size))
        found.append(fitted)
    return found


class _Traffic:
    """Closed loop of random requests."""

    def __init__(self, loop: Loop, generator: Random) -> None:
        self.num_ended = 0
        self.ends: Counter[str] = Counter()
        self._loop = loop
        self._generator = generator
        self._kinds = sampling_kinds(SPEC.vocab_size)
        self._prefix = [generator.randrange(3, 256) for _ in range(32)]
        self._open: dict[str, set[int]] = {}
        self._num_sent = 0

    def run_until(self, num_ended: int) -> None:
        """Serve until `num_ended` requests have ended in total."""
        while self.num_ended < num_ended:
            while len(self._open) < _IN_FLIGHT:
                self._submit()
            self._step()

    def drain(self) -> None:
        """Serve the remaining requests without submitting new ones."""
        while self._open:
            self._step()
        gc.collect()

    def _step(self) -> None:
        self._loop.step()
        for output in self._loop.receive():
            if output.finish is not None:
                self._end(output.request_id, output.choice, output.finish)
        if self._open and self._generator.random() < 0.2:
            self._loop.cancel(self._generator.choice(list(self._open)))

    def _end(self, request_id: str, choice: int, finish: Finish) -> None:
        if finish.reason is FinishReason.ERROR and finish.code != "deadline_exceeded":
            raise LoopError(f"request {request_id} failed: {finish.message}")
        choices = self._open.get(request_id, set())
        if choice not in choices:
            raise LoopError(f"choice {choice} of request {request_id} ended twice")
        choices.remove(choice)
        self.ends[finish.code or str(finish.reason)] += 1
        if not choices:
            del self._open[request_id]
            self.num_ended += 1

    def _submit(self) -> None:
        draw = self._generator
        prompt = self._prefix[: draw.choice((0, 0, 16, 32))]
        prompt = prompt + [draw.randrange(3, 256) for _ in range(draw.randrange(1, 24))]
        fields = dict(draw.choice(self._kinds))
        more: dict[str, Any] = {"num_choices": draw.choice((1, 1, 1, 3)), "priority": draw.randrange(3)}
        if draw.random() < 0.1:
            more["deadline"] = time.time() + draw.random() * 0.05
        # These parameters could forbid all tokens that a grammar allows.
        if draw.random() < 0.2 and not {"bad_words", "allowed_token_ids", "min_tokens"} & set(fields):
            # One in four is new, is compiled, and evicts another one from the cache.
            new = f"start: /{self._num_sent}[a-z]*/"
            more["grammar"] = new if draw.random() < 0.25 else draw.choice(_GRAMMARS)
        fields["seed"] = draw.randrange(1 << 30)
        sampling = SamplingParams(max_tokens=draw.randrange(1, _MAX_TOKENS), **fields)
        request_id = self._loop.submit(prompt, sampling, **more)
        self._open[request_id] = set(range(more["num_choices"]))
        self._num_sent += 1
