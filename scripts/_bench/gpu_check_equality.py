"""Part of gpu_check: the whole model on the GPU against the CPU, on a small random model.

Greedy tokens in float32 must be the same. Where numbers are rounded differently on the two (quantized cells at a
border between two codes, bfloat16, quantized activations) a token may differ for good reason, and then so do all that
follow; there the log-probabilities that both give to the same text are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts._bench.gpu_check_model import SMALL, WeightKind, start
from scripts._bench.gpu_check_plans import Generated, generate, random_prompts
from shared.settings import WorkerSettings

LENGTHS = (1, 5, 16, 17, 64, 130, 200)
NUM_TOKENS = 40
CHUNK = 48
PAGES = 256

# Mean difference of log-probabilities; they are about log(1000) = 7 on average.
TOLERANCE = {"float32": 1e-4, "rounded once": 0.02, "bfloat16": 0.1, "quantized activations": 0.2}


def settings_for(device: str, **values: Any) -> WorkerSettings:
    """Small, in float32 unless said otherwise."""
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
    """What the model says to the prompts, with the log-probabilities of the prompts themselves."""
    built = start(SMALL, settings, kind)
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
    """Whether all tokens are equal, and where the first is not."""
    for row, (one, other) in enumerate(zip(left, right, strict=True)):
        for position, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            if a != b:
                return False, f"request {row} differs at its token {position}: {a} and {b}"
    return True, f"{sum(len(one.token_ids) for one in left)} tokens"


def close_logprobs(left: Sequence[Generated], right: Sequence[Generated], tolerance: float) -> tuple[bool, str]:
    """Whether the prompts' log-probabilities differ by no more than `tolerance` on average."""
    differences = [
        abs(a - b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
    ]
    mean = statistics.fmean(differences)
    # Written so that NaN fails.
    return mean <= tolerance, f"log-probabilities differ by {mean:.1e} on average, {max(differences):.1e} at most"


def run(device: str = "cuda", reference: str = "cpu") -> Iterator[dict[str, Any]]:
    """One row per comparison: name, ok, detail. One that cannot be made has an error as its detail."""
    known: dict[tuple[WorkerSettings, WeightKind], list[Generated]] = {}

    def once(settings: WorkerSettings, kind: WeightKind = "bf16") -> list[Generated]:
        if (settings, kind) not in known:
            known[settings, kind] = outputs(settings, kind)
        return known[settings, kind]

    def against_cpu(tolerance: str, kind: WeightKind = "bf16", dtype: str = "float32", **values: Any) -> Any:
        wanted = once(settings_for(reference, **values), kind)
        found = outputs(settings_for(device, dtype=dtype, **values), kind)
        return close_logprobs(found, wanted, TOLERANCE[tolerance])

    def same(left: WorkerSettings, right: WorkerSettings) -> tuple[bool, str]:
        return same_tokens(once(left), once(right))

    plain = settings_for(device)
    yield _row("float32 tokens", same, plain, settings_for(reference))
    yield _row("float32 log-probabilities", against_cpu, "float32")
    yield _row("graphs as without", same, plain, settings_for(device, decode_graphs=False))
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
    except Exception as error:  # noqa: BLE001 - the others are still worth knowing
        ok, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return {"name": name, "ok": ok, "detail": detail}


def _deterministic(device: str) -> tuple[bool, str]:
    """Tokens and log-probabilities of each request alone are those that it has among the others, to the last bit."""
    settings = settings_for(device, dtype="bfloat16", deterministic=True)
    together = outputs(settings)
    built = start(SMALL, settings)
    try:
        for row, prompt in enumerate(random_prompts(LENGTHS, SMALL.vocab_size)):
            (alone,) = generate(built.executor, [prompt], page_size=built.page_size, num_tokens=NUM_TOKENS, chunk=31)
            (scored,) = generate(
                built.executor, [prompt], page_size=built.page_size, num_tokens=1, chunk=17, prompt_logprobs=True
            )
            if (alone.token_ids, scored.prompt_logprobs) != (together[row].token_ids, together[row].prompt_logprobs):
                return False, f"request {row} alone differs from itself among others"
    finally:
        built.executor.close()
    return True, f"{len(LENGTHS)} requests alone, in other chunks, and together"
