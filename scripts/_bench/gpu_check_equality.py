"""Part of gpu_check: comparison of a small random model on the GPU with the same model on the CPU.

Greedy tokens in float32 must be equal. Where the two round differently (quantized cells between two codes, bfloat16,
quantized activations), a token may differ, and then so do all tokens after it. In these cases the log-probabilities of
a given text are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts._bench.gpu_check_child import error_text
from scripts._bench.gpu_check_model import SMALL, WeightKind, random_executor
from scripts._bench.gpu_check_plans import Generated, generate, random_prompts
from shared.settings import WorkerSettings

LENGTHS = (1, 5, 16, 17, 64, 130, 200)
NUM_TOKENS = 40
CHUNK = 48
PAGES = 256

# Mean absolute difference of log-probabilities, which are about log(1000) = 7 on average.
TOLERANCE = {"float32": 1e-4, "rounded once": 0.02, "bfloat16": 0.1, "quantized activations": 0.2}


def settings_for(device: str, **values: Any) -> WorkerSettings:
    """Return settings for the small model, in float32 by default."""
    defaults: dict[str, Any] = {
        "device": device,
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "num_kv_pages": PAGES,
    }
    return WorkerSettings(**(defaults | values))


def outputs(
    settings: WorkerSettings, kind: WeightKind = "bf16", lengths: Sequence[int] = LENGTHS, chunk: int = CHUNK
) -> list[Generated]:
    """Return the tokens that the model generates for random prompts, and the log-probabilities of the prompts."""
    built = random_executor(SMALL, settings, kind)
    try:
        prompts = random_prompts(lengths, SMALL.vocab_size)
        plain = generate(built.executor, prompts, page_size=built.page_size, num_tokens=NUM_TOKENS, chunk=chunk)
        scored = generate(
            built.executor, prompts, page_size=built.page_size, num_tokens=1, chunk=chunk, prompt_logprobs=True
        )
        return [Generated(one.token_ids, other.prompt_logprobs) for one, other in zip(plain, scored)]
    finally:
        built.executor.close()


def same_tokens(left: Sequence[Generated], right: Sequence[Generated]) -> tuple[bool, str]:
    """Return True and the number of tokens if all are equal, otherwise False and the first difference."""
    for row, (one, other) in enumerate(zip(left, right, strict=True)):
        for position, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            if a != b:
                return False, f"request {row} differs at its token {position}: {a} and {b}"
    return True, f"{sum(len(one.token_ids) for one in left)} tokens"


def close_logprobs(left: Sequence[Generated], right: Sequence[Generated], tolerance: float) -> tuple[bool, str]:
    """Return True if the log-probabilities of the prompts differ by at most `tolerance` on average."""
    differences = [
        abs(a - b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
    ]
    mean = statistics.fmean(differences)
    # The comparison is False for NaN.
    return mean <= tolerance, f"log-probabilities differ by {mean:.1e} on average, {max(differences):.1e} at most"


def run(device: str = "cuda", reference: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield one row per comparison: name, ok, detail. If a comparison raises, the detail is the error."""
    known: dict[tuple[WorkerSettings, WeightKind], list[Generated]] = {}

    def cached_outputs(settings: WorkerSettings, kind: WeightKind = "bf16") -> list[Generated]:
        if (settings, kind) not in known:
            known[settings, kind] = outputs(settings, kind)
        return known[settings, kind]

    def against_cpu(tolerance: str, kind: WeightKind = "bf16", dtype: str = "float32", **values: Any) -> Any:
        expected = cached_outputs(settings_for(reference, **values), kind)
        found = outputs(settings_for(device, dtype=dtype, **values), kind)
        return close_logprobs(found, expected, TOLERANCE[tolerance])

    def same(left: WorkerSettings, right: WorkerSettings) -> tuple[bool, str]:
        return same_tokens(cached_outputs(left), cached_outputs(right))

    plain = settings_for(device)
    yield _row("float32 tokens", same, plain, settings_for(reference))
    yield _row("float32 log-probabilities", against_cpu, "float32")
    yield _row("graphs and eager steps", same, plain, settings_for(device, decode_graphs=False))
    yield _row("bfloat16", against_cpu, "bfloat16", dtype="bfloat16")
    if device != "cpu":
        yield _row("deterministic", _deterministic, device)
    for name in ("fp8", "int8", "int4"):
        yield _row(f"kv {name}", against_cpu, "rounded once", kv_cache_dtype=name)
    yield _row("weights int4", against_cpu, "bfloat16", "int4", dtype="bfloat16")
    yield _row("weights fp8", against_cpu, "quantized activations", "fp8", dtype="bfloat16")


def _row(name: str, compare: Callable[..., tuple[bool, str]], *arguments: Any, **values: Any) -> dict[str, Any]:
    try:
        ok, detail = compare(*arguments, **values)
    except Exception as error:  # noqa: BLE001 - the other comparisons still run
        ok, detail = False, error_text(error)
    return {"name": name, "ok": ok, "detail": detail}


def _deterministic(device: str) -> tuple[bool, str]:
    """Check that each request has bitwise equal tokens and log-probabilities alone and in a batch."""
    settings = settings_for(device, dtype="bfloat16", deterministic=True)
    together = outputs(settings)
    built = random_executor(SMALL, settings)
    try:
        for row, prompt in enumerate(random_prompts(LENGTHS, SMALL.vocab_size)):
            (alone,) = generate(built.executor, [prompt], page_size=built.page_size, num_tokens=NUM_TOKENS, chunk=31)
            (scored,) = generate(
                built.executor, [prompt], page_size=built.page_size, num_tokens=1, chunk=17, prompt_logprobs=True
            )
            if (alone.token_ids, scored.prompt_logprobs) != (together[row].token_ids, together[row].prompt_logprobs):
                return False, f"request {row} gives other results alone than in a batch"
    finally:
        built.executor.close()
    return True, f"{len(LENGTHS)} requests alone, with other chunks, and in a batch"
