"""End-to-end run of a tiny model on the GPU path: the runner, graphs, and every op as a Triton kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.backends.gpu import TritonOps
from kernels.backends.gpu_sampling import TritonSamplingOps
from kernels.ops.step_inputs.triton import TritonStepOps
from shared.messages import Submit
from shared.settings import WorkerSettings
from tests.fakes.engine_harness import make_submit
from tests.fakes.tiny_server import (
    COMMON_SAMPLING_PARAMS,
    MAX_MODEL_LEN,
    RARE_SAMPLING_PARAMS,
    TinyServer,
    submits,
    tiny_spec,
)
from worker.executor.profile import profile_plans
from worker.kv.geometry import KVGroupSpec

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of numpy, in the interpreter
]


def on_triton(monkeypatch, device: torch.device, deterministic: bool = False, **options) -> TinyServer:
    monkeypatch.setattr("worker.model.embedding.keeps_format", lambda _: False)
    return TinyServer(
        monkeypatch,
        device=device,
        ops=TritonOps(device, deterministic),
        sampling_ops=TritonSamplingOps(device),
        step_ops=TritonStepOps,
        **options,
    )


def tokens_of(server: TinyServer, requests) -> dict:
    for submit in requests:
        server.add(submit)
        server.step()
    server.drain()
    return dict(server.tokens)


def compare(
    monkeypatch, device: torch.device, spec, requests, *, deterministic: bool = False, kv_format="dense", **sizes
) -> TinyServer:
    sizes["kv_format"] = kv_format
    with monkeypatch.context() as patch:
        expected = tokens_of(TinyServer(patch, late=False, spec=spec, **sizes), requests)
    server = on_triton(monkeypatch, device, deterministic, spec=spec, **sizes)
    # As before serving: the largest step comes first, so that buffers shared by all steps have its size.
    settings = WorkerSettings(max_num_seqs=sizes["max_num_seqs"], block_size=server.kv.page_size)
    for plan in profile_plans(settings, MAX_MODEL_LEN, len(spec.kv_groups), sizes["max_num_batched_tokens"]):
        server.runner.execute(plan)
    assert tokens_of(server, requests) == expected
    return server


def short_submits(*sampling_params: dict[str, object]) -> list[Submit]:
    """Return requests with a shared prefix of two pages, one of them with two choices."""
    return [
        make_submit(
            f"r{number}",
            [*range(3, 12), 20 + number],
            sampling={"seed": number, "max_tokens": 3} | params,
            num_choices=1 + (number == 1),
        )
        for number, params in enumerate(sampling_params)
    ]


def test_tokens_equal_reference_ops(device: torch.device, monkeypatch) -> None:
    """Cover prefix hits, chunks, forks, captured graphs, and all sampling parameters.

    Filters, repetition penalties and token lists are plain torch around the kernels on a GPU.
    """
    requests = short_submits(*COMMON_SAMPLING_PARAMS, *RARE_SAMPLING_PARAMS)
    sizes = {"num_pages": 80, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    spec = dataclasses.replace(tiny_spec(), num_layers=1, kv_groups=(KVGroupSpec(layers=(0,)),))
    server = compare(monkeypatch, device, spec, requests, **sizes)
    assert server.scheduler.counters.prefix_cache_hits_total > 0
    assert server.num_captured > 0


def test_embeddings_equal_reference_ops(device: torch.device, monkeypatch) -> None:
    """Check that hidden states are summed over chunks, beside a stream."""
    sizes = {"spec": tiny_spec(), "num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    text = make_submit("t", [5, 6, 7], sampling={"temperature": 0.0, "ignore_eos": True, "max_tokens": 3})
    prompt = [3 + (7 * index) % 90 for index in range(9)]
    embedded = [make_submit(pooling, prompt, pooling=pooling) for pooling in ("last", "mean")]
    with monkeypatch.context() as patch:
        calm = TinyServer(patch, late=False, **sizes)
        expected = tokens_of(calm, [text, *embedded])
    server = on_triton(monkeypatch, device, **sizes)
    assert tokens_of(server, [text, *embedded]) == expected
    for pooling in ("last", "mean"):
        found, wanted = (
            torch.tensor(list(memoryview(one.outputs[pooling, 0][-1].embedding).cast("f"))) for one in (server, calm)
        )
        assert (found - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("deterministic", "kv_format"),
    [
        pytest.param(True, "int8", id="deterministic, int8"),
        pytest.param(False, "fp8", id="fp8"),
        pytest.param(False, "int4", id="int4"),
        pytest.param(True, "dense", id="deterministic, dense"),
    ],
)
@pytest.mark.slow  # test_gpu_ops.py covers these modes of the operations
def test_other_modes_equal_reference_ops(deterministic: bool, kv_format, device: torch.device, monkeypatch) -> None:
    """Cover every KV cache format, and one kernel for all queries, compared with plain torch in the same format."""
    sizes = {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    requests = short_submits({"temperature": 0.0, "max_tokens": 5}, COMMON_SAMPLING_PARAMS[2])
    options = {"deterministic": deterministic, "kv_format": kv_format}
    server = compare(monkeypatch, device, tiny_spec(), requests, **options, **sizes)
    assert server.num_captured > 0


@pytest.mark.slow  # minutes in the interpreter
def test_tokens_survive_preemption_with_a_window(device: torch.device, monkeypatch) -> None:
    """Use two KV groups and too few pages for all requests."""
    requests = submits(6, max_tokens=10)
    server = compare(
        monkeypatch,
        device,
        tiny_spec(windows=True),
        requests,
        num_pages=17,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    assert server.scheduler.counters.num_preemptions_total > 0
    assert server.num_captured > 0
