"""Decode steps and prefill as shares of a ceiling: the model's linear layers alone, measured in the same run.

Prints a table and, as the last line, the same figures as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from kernels.cpu.pool import use_cache_directory, use_huge_pages
from scripts._bench import sampling
from scripts.ceiling import LinearShapes
from shared.settings import WorkerSettings
from worker.executor.build import cache_directory
from worker.executor.forward_batch import ForwardBatch
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading.open_model import open_model
from worker.model.spec import DecoderSpec
from worker.quant.raw_weight import RawWeight
from worker.quant.scheme import LinearScheme
from worker.quant.select import linear_scheme

PAGE_SIZE = 16


def alternating_ms(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median time of each call. They take turns, so that what else the machine does falls on all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for run, taken in zip(runs, times):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


class LinearLayers:
    """Every matrix of the model, in the layout that the decoder multiplies by, with nothing between them."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        sizes = LinearShapes(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(LinearShapes)})
        shapes = [*sizes.layer() * sizes.num_layers, sizes.head()]
        self._schemes = [self._make(shape, dtype) for shape in shapes]
        self._inputs = [num_in for _, num_in in shapes]
        self._dtype = dtype

    @staticmethod
    def _make(shape: tuple[int, int], dtype: torch.dtype) -> LinearScheme:
        scheme = linear_scheme(dtype, torch.device("cpu"))
        scheme.create_weights(*shape)
        scheme.load_rows(0, RawWeight("f32", shape, torch.randn(shape) * 0.02))
        scheme.after_load()
        return scheme

    def one_pass(self, rows: int, head_rows: int) -> Callable[[], None]:
        """A pass over all matrices with `rows` rows, the head with `head_rows`."""
        x = {width: torch.randn((rows, width), dtype=self._dtype) for width in set(self._inputs)}
        head = torch.randn((head_rows, self._inputs[-1]), dtype=self._dtype)

        def run() -> None:
            for scheme, width in zip(self._schemes[:-1], self._inputs):
                scheme.apply(x[width], None)
            self._schemes[-1].apply(head, None)

        return run


def make_step(num_requests: int, tokens: int, context: int, vocab_size: int) -> ForwardBatch:
    """Each request computes its last `tokens` of `context`, and wants the last one's logits."""
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


def sampling_shares(decoder: Decoder, kv: KVStorage, context: int, seconds: float) -> list[dict[str, object]]:
    """What requests that want all kinds of things, and a grammar's masks, add to a decode step."""
    step = make_step(sampling.NUM_REQUESTS, 1, context, decoder.spec.vocab_size)
    logits = decoder.forward(step, kv).float()
    runs = sampling.sampling_runs(logits, context, torch.get_num_threads())
    step_ms, *taken = alternating_ms([partial(decoder.forward, step, kv), *runs.values()], seconds)
    return sampling.report(step_ms, dict(zip(runs, taken)))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="scripts/bench_engine", description=__doc__)
    parser.add_argument("--model", default="", help="path of the model; empty: the default model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--context", type=int, default=190, help="context length of the decode steps")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each line")
    parser.add_argument("--cache-dir", type=Path, default=cache_directory(WorkerSettings()))
    options = parser.parse_args()
    dtype, kv_dtype = getattr(torch, options.dtype), getattr(torch, options.kv_cache_dtype)
    use_huge_pages()
    use_cache_directory(options.cache_dir)
    files = open_model(options.model, options.cache_dir)
    decoder = Decoder(
        files.spec, files.weights, dtype=dtype, device="cpu", max_num_tokens=4096, max_model_len=files.spec.max_position
    )
    cases = [("decode", rows, 1, options.context) for rows in options.rows]
    cases += [("prefill", 1, tokens, tokens) for tokens in options.prefill]
    sizes = [(rows, context) for _, rows, _, context in cases] + [(sampling.NUM_REQUESTS, options.context)]
    pages = max(rows * -(-context // PAGE_SIZE) for rows, context in sizes)
    kv = KVStorage(files.spec, pages, PAGE_SIZE, kv_dtype, "cpu")
    decoder.fuse_layers(kv)
    linears = LinearLayers(files.spec, dtype)
    print(f"{'':8} {'rows':>5} {'context':>7} {'step ms':>9} {'linear ms':>9} {'share':>6} {'tok/s':>8}")
    results = []
    for kind, num_requests, tokens, context in cases:
        step = make_step(num_requests, tokens, context, files.spec.vocab_size)
        rows = num_requests * tokens
        runs: list[Callable[[], object]] = [linears.one_pass(rows, num_requests), partial(decoder.forward, step, kv)]
        ceiling, took = alternating_ms(runs, options.seconds)
        share, speed = ceiling / took, rows / took * 1e3
        print(f"{kind:8} {rows:5} {context:7} {took:9.2f} {ceiling:9.2f} {share:6.1%} {speed:8.0f}")
        results.append(
            {"kind": kind, "rows": rows, "context": context, "ms": took, "linear_ms": ceiling, "share": share}
        )
    shares = sampling_shares(decoder, kv, options.context, options.seconds)
    figures = {"dtype": options.dtype, "kv_cache_dtype": options.kv_cache_dtype, "results": results}
    print(json.dumps(figures | {"sampling": shares}))


if __name__ == "__main__":
    main()
