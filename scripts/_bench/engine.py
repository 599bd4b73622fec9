"""Speed of the engine without HTTP, each figure beside its goal. Ratios are to ceilings measured in the same run.

- decode, prefill: steps as shares of the ceiling that memory and matrix products set.
- sampling: time that sampling parameters and grammars add to a step.
- host: time of a step outside the model and the sampler, for several numbers of requests.
- prefix: cost of the prefix cache without hits, and its gain with many hits.
- speculation: gain of drafts where the output repeats the input, and their cost where it does not.
- memory: growth of a worker over --requests requests; not a default part.

Prints tables and, as the last line, the same figures as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.backends.select import sampling_ops
from kernels.common.cpu.pool import use_cache_directory, use_huge_pages
from scripts._bench import engine_host, engine_memory, engine_prefix, engine_speculation, engine_steps
from scripts._bench.engine_loop import Loop, OpClock, engine_loop, timed_executor
from shared import log
from shared.arguments import Parser
from shared.settings import WorkerSettings
from worker.executor.resolve import cache_directory
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.forward_batch import ForwardBatch
from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import open_model

PAGE_SIZE = 16
PARTS = ("decode", "prefill", "sampling", "host", "prefix", "speculation", "memory")
_LOADED = frozenset(PARTS) - {"memory"}
EMPTY_LOAD = engine_prefix.Load(concurrency=16, num_requests=16, prompt=128, output=64)
SHARED_LOAD = engine_prefix.Load(concurrency=16, num_requests=32, prompt=512, output=64)


def make_step(num_requests: int, tokens: int, context: int, vocab_size: int) -> ForwardBatch:
    """Return a batch in which each request computes the last `tokens` of its `context`, with logits for the last."""
    pages = -(-context // PAGE_SIZE)
    table = torch.randperm(num_requests * pages).view(num_requests, pages)
    positions = torch.arange(context - tokens, context).repeat(num_requests)
    request = torch.arange(num_requests).repeat_interleave(tokens)
    return ForwardBatch(
        input_ids=torch.randint(0, vocab_size, (num_requests * tokens,), dtype=torch.int32),
        positions=positions.int(),
        cu_seqlens_q=torch.arange(num_requests + 1, dtype=torch.int32) * tokens,
        seq_lens=torch.full((num_requests,), context, dtype=torch.int32),
        slot_mapping=(table[request, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,),
        block_tables=(table.int(),),
        logits_indices=torch.arange(1, num_requests + 1) * tokens - 1,
        max_seqlen_q=tokens,
        max_seqlen_k=context,
    )


class Bench:
    """Loaded model and the parts that are measured on it.

    Args:
        options: Options of `parser`.
        files: Opened model files; the weights are read and closed.
    """

    def __init__(self, options: argparse.Namespace, files: ModelFiles) -> None:
        self._options = options
        self._files = files
        spec = files.spec
        dtype, kv_dtype = getattr(torch, options.dtype), getattr(torch, options.kv_cache_dtype)
        self._decoder = Decoder(spec, files.weights, dtype=dtype, device="cpu", max_model_len=spec.max_position)
        self._kv = KVStorage(spec, self._num_pages(), PAGE_SIZE, kv_dtype, "cpu")
        self._decoder.fuse_layers(self._kv)
        files.weights.close()

    def _num_pages(self) -> int:
        """Return the number of pages of the largest part. Unused pages take no memory."""
        options = self._options
        contexts = [(1, tokens) for tokens in options.prefill]
        contexts += [(rows, options.context) for rows in [*options.rows, engine_steps.NUM_REQUESTS]]
        contexts += [(count, engine_host.longest(options.host_steps)) for count in options.host_counts]
        contexts += [(load.concurrency + 2, load.prompt + load.output) for load in (EMPTY_LOAD, SHARED_LOAD)]
        return int(max(rows * -(-context // PAGE_SIZE) for rows, context in contexts))

    def steps(self, kinds: Sequence[str]) -> list[dict[str, Any]]:
        """Measure decode steps, prefill, or both."""
        options, spec = self._options, self._decoder.spec
        cases = [("decode", rows, 1, options.context) for rows in options.rows]
        cases += [("prefill", 1, tokens, tokens) for tokens in options.prefill]
        print(engine_steps.HEADER)
        figures = []
        for kind, num_requests, tokens, context in cases:
            if kind not in kinds:
                continue
            step = partial(self._decoder.forward, make_step(num_requests, tokens, context, spec.vocab_size), self._kv)
            line = engine_steps.measure(
                spec,
                kind,
                step,
                num_requests=num_requests,
                tokens=tokens,
                context=context,
                seconds=options.seconds,
            )
            print(engine_steps.text(line), flush=True)
            figures.append(line.figures())
        return figures

    def sampling(self) -> list[dict[str, object]]:
        """Measure the time that sampling parameters and grammar masks add to a decode step."""
        decoder, kv, context = self._decoder, self._kv, self._options.context
        step = make_step(engine_steps.NUM_REQUESTS, 1, context, decoder.spec.vocab_size)
        logits = decoder.forward(step, kv).float()
        runs = engine_steps.sampling_runs(logits, context, torch.get_num_threads())
        step_ms, *taken = engine_steps.alternating_ms(
            [partial(decoder.forward, step, kv), *runs.values()], self._options.seconds
        )
        return engine_steps.sampling_report(step_ms, dict(zip(runs, taken)))

    def host(self) -> dict[str, Any]:
        """Measure the time of a step outside the model and the sampler."""
        options, spec, clock = self._options, self._decoder.spec, OpClock()
        settings = self._settings(max(options.host_counts))
        built = timed_executor(settings, spec, self._decoder, self._kv, self._sampling_ops(), clock)
        with engine_loop(settings, self._files, built) as loop:
            found = engine_host.figures(
                {
                    count: engine_host.step_ms(loop, clock, count, options.host_steps, spec.vocab_size)
                    for count in options.host_counts
                }
            )
        print("\n" + "\n".join(engine_host.table(found)), flush=True)
        return found

    def prefix(self) -> dict[str, Any]:
        """Measure the cost and the gain of the prefix cache."""
        spec, clock = self._decoder.spec, OpClock()
        settings = self._settings(SHARED_LOAD.concurrency)
        built = timed_executor(settings, spec, self._decoder, self._kv, self._sampling_ops(), clock)

        def open_loop(num_pages: int, caching: bool) -> AbstractContextManager[Loop]:
            changed = dataclasses.replace(settings, enable_prefix_caching=caching)
            return engine_loop(changed, self._files, dataclasses.replace(built, num_pages=num_pages))

        few = min(settings.num_kv_pages, EMPTY_LOAD.num_pages(PAGE_SIZE))
        costs = engine_prefix.cost(
            partial(open_loop, few), clock, EMPTY_LOAD, spec.vocab_size, self._options.prefix_rounds
        )
        gains = engine_prefix.gain(partial(open_loop, settings.num_kv_pages), clock, SHARED_LOAD, spec.vocab_size)
        print("\n" + "\n".join(engine_prefix.table(costs, gains)), flush=True)
        return {"cost": costs, "gain": gains}

    def speculation(self) -> list[dict[str, Any]]:
        """Measure the gain and the cost of drafts."""
        options = self._options
        settings = self._settings(engine_speculation.CONCURRENCY)
        length = settings.max_model_len or 0
        pages = engine_speculation.CONCURRENCY * -(-length // PAGE_SIZE)
        settings = dataclasses.replace(
            settings, num_kv_pages=pages, dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype
        )
        loads = [
            load
            for load in engine_speculation.make_loads(self._files.bundle, length // 2)
            if load.name in options.speculation_loads
        ]
        with engine_speculation.open_loops(settings, self._files, self._decoder, self._sampling_ops()) as loops:
            return engine_speculation.measure(loops, loads, options.speculation_rounds)

    def _settings(self, max_num_seqs: int) -> WorkerSettings:
        return WorkerSettings(
            device="cpu",
            max_num_seqs=max_num_seqs,
            max_model_len=min(1024, self._decoder.spec.max_position),
            block_size=PAGE_SIZE,
            num_kv_pages=self._num_pages(),
            speculative_method="off",
        )

    def _sampling_ops(self) -> Any:
        ops = sampling_ops(torch.device("cpu"), torch.get_num_threads())
        ops.compile_usual()
        return ops


def parser() -> argparse.ArgumentParser:
    """Return the option parser of scripts/bench_engine."""
    p = Parser(prog="scripts/bench_engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="", help="path of the model; empty for the default model")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part in _LOADED])
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    p.add_argument("--kv-cache-dtype", choices=["float32", "bfloat16"], default="bfloat16")
    p.add_argument("--context", type=int, default=190, help="context length of the decode steps")
    p.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    p.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048])
    p.add_argument("--seconds", type=float, default=2.0, help="time per line")
    p.add_argument(
        "--host-counts", type=int, nargs="+", default=[16, 32, 64, 128], help="numbers of requests of part host"
    )
    p.add_argument("--host-steps", type=int, default=24, help="timed steps for each number of requests")
    p.add_argument("--prefix-rounds", type=int, default=4, help="number of loads with and without the cache")
    p.add_argument("--speculation-loads", nargs="+", choices=engine_speculation.LOADS, default=engine_speculation.LOADS)
    p.add_argument("--speculation-rounds", type=int, default=5, help="rounds of each load, after two warm-up rounds")
    p.add_argument("--requests", type=int, default=20_000, help="number of requests of part memory")
    p.add_argument("--cache-dir", type=Path, default=cache_directory(WorkerSettings()))
    return p


def main() -> None:
    """Run the selected parts."""
    options = parser().parse_args()
    log.configure("warning", "console", process="bench")
    use_huge_pages()
    use_cache_directory(options.cache_dir)
    figures: dict[str, Any] = {"dtype": options.dtype, "kv_cache_dtype": options.kv_cache_dtype}
    if "memory" in options.parts:
        # Before a model is loaded, because growth would be small compared to its memory.
        settings = engine_memory.tiny_settings(str(options.cache_dir))
        figures["memory"] = engine_memory.measure(settings, options.requests)
        print("\n".join(engine_memory.table(figures["memory"])), flush=True)
    if _LOADED & set(options.parts):
        bench = Bench(options, open_model(options.model, options.cache_dir))
        if {"decode", "prefill"} & set(options.parts):
            figures["results"] = bench.steps(options.parts)
        for part in ("sampling", "host", "prefix", "speculation"):
            if part in options.parts:
                figures[part] = getattr(bench, part)()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
