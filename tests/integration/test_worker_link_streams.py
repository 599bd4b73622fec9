"""Streams over real ZeroMQ with a fake worker in a thread: normal operation and faults of the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.client import Liveness
from shared.errors import (
    ContextLengthError,
    InternalError,
    ModelNotFoundError,
    UnavailableError,
    WorkerLostError,
)
from shared.messages import MAX_CHOICES, Output, Steps
from tests.fakes.fake_worker import ENDLESS, LONG_CONTEXT, MANY_TOKENS, FakeWorker, Misbehaviour
from tests.fakes.gateway_core import collect, ids_of, joined, linked, make_request, running_core, text_of, until

HELLO = [39, 68, 75, 75, 78]


async def test_one_request_from_text_to_text(directory: Path) -> None:
    async with linked(directory) as (core, worker):
        entry = core.registry.model("fake")
        ids = await entry.pipeline.encode("Grüße, 你好 🛑!")
        deltas = await collect(core.generator.submit(make_request(ids, salt=b"s", tenant="t", priority=3)))
        assert text_of(deltas) == "Grüße, 你好 🛑!"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
        assert ids_of(deltas) == [*ids, 2]
        assert deltas[0].num_cached_tokens == 0
        submit = worker.submits()[0]
        assert (submit.token_ids, submit.num_prompt_tokens, submit.salt) == (ids, len(ids), b"s")
        assert (submit.tenant, submit.priority, submit.model) == ("t", 3, "fake")
        assert worker.cancels() == []
        assert core.admission.num_requests == core.admission.waiting_tokens == 0
        assert core.registry.counters.wire_errors == 0


async def test_each_accepted_request_is_counted_as_one_outcome(directory: Path) -> None:
    script = [40] * 30
    async with linked(directory, script=lambda _: script, delay=0.001) as (core, worker):
        await collect(core.generator.submit(make_request(HELLO, max_tokens=10, n=2)))
        script[4] = 2
        await collect(core.generator.submit(make_request(HELLO, max_tokens=10)))
        # The answer cannot be complete before the client disconnects.
        script[4] = 40
        script *= 1000
        worker.delay = 0.01
        async with core.generator.submit(make_request(HELLO, max_tokens=4000)) as left:
            await anext(left)
        worker.delay = 0.001
        with pytest.raises(ContextLengthError):
            core.generator.submit(make_request(HELLO, max_tokens=10**6))
        worker.faults.bad_token_id = 512
        with pytest.raises(InternalError):
            await collect(core.generator.submit(make_request(HELLO)))
        outcomes = {
            "length": core.sample("request_success_total", model_name="fake", finished_reason="length"),
            "stop": core.sample("request_success_total", model_name="fake", finished_reason="stop"),
            "abort": core.sample("request_failures_total", model_name="fake", reason="abort"),
            "error": core.sample("request_failures_total", model_name="fake", reason="error"),
            "lost": core.sample("request_failures_total", model_name="fake", reason="worker_lost"),
        }
        assert outcomes == {"length": 1, "stop": 1, "abort": 1, "error": 1, "lost": 0}
        assert core.sample("requests_accepted_total", model_name="fake") == 4
        assert core.sample("requests_rejected_total", code="context_length_exceeded") == 1
        assert core.sample("time_to_first_token_seconds_count", model_name="fake") == 3
        assert core.sample("inter_token_latency_seconds_count", model_name="fake") >= 9 + 9 + 4
        assert core.sample("e2e_request_latency_seconds_count", model_name="fake") == 2


async def test_stop_string_cancels_the_worker(directory: Path) -> None:
    script = [66, 67, *[65] * MANY_TOKENS]
    async with linked(directory, script=lambda _: script, delay=0.002, **LONG_CONTEXT) as (core, worker):
        entry = core.registry.model("fake")
        before, first, second = (entry.pipeline.decode([token_id]) for token_id in (66, 67, 65))
        request = make_request(HELLO, max_tokens=MANY_TOKENS, stop=(first + second,), n=2)
        deltas = await collect(core.generator.submit(request))
        for choice in range(2):
            assert text_of(deltas, choice) == before
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop", "stop"]
        await until(lambda: worker.num_running == 0)
        assert core.registry.counters.unknown_ids == 0


@pytest.mark.parametrize(
    ("fault", "counter"), [({"skip_sequence": 1}, "sequence_gaps"), ({"wrong_epoch": True}, "wrong_epoch")]
)
async def test_an_unreliable_link_fails_its_streams_and_serves_again(
    directory: Path, fault: dict[str, Any], counter: str
) -> None:
    async with linked(directory, **ENDLESS, delay=0.005) as (core, worker):
        with pytest.raises(WorkerLostError):
            async with core.generator.submit(make_request(HELLO, max_tokens=MANY_TOKENS)) as generation:
                await anext(generation)
                worker.faults = Misbehaviour(**fault)
                async for _ in generation:
                    pass
        worker.faults = Misbehaviour()
        assert getattr(core.registry.counters, counter) >= 1
        await joined(core)
        await until(lambda: worker.num_running == 0)
        deltas = await collect(core.generator.submit(make_request(HELLO, max_tokens=5)))
        assert len(ids_of(deltas)) == 5


async def test_repeated_steps_are_dropped(directory: Path) -> None:
    async with linked(directory, faults=Misbehaviour(repeat_steps=True)) as (core, _):
        deltas = await collect(core.generator.submit(make_request(HELLO)))
        assert ids_of(deltas) == [*HELLO, 2]
        await until(lambda: core.registry.counters.repeated >= len(HELLO))


async def test_malformed_frames_are_counted_and_ignored(directory: Path) -> None:
    async with linked(directory, **ENDLESS, delay=0.002) as (core, worker):
        bad: list[list[bytes]] = [
            [b""],
            [b"\x80\x04\x95pickle"],
            [b"\xdf\xff\xff\xff\xff"],
            [b"\x91" * 10_000 + b"\xc0"],
            [b"a", b"b"],
            [b"x"] * 50,
            [b"\x81\xa4type\xa7nothing"],
        ]
        async with core.generator.submit(make_request(HELLO, max_tokens=400)) as generation:
            await anext(generation)
            for _ in range(200):
                for frames in bad:
                    worker.send_raw(frames)
            deltas = [delta async for delta in generation]
        assert deltas[-1].finish_reason == "length"
        await until(lambda: core.registry.counters.malformed == 200 * len(bad))
        assert core.registry.ready()[0]


async def test_a_message_of_many_frames_does_not_stop_streams(directory: Path) -> None:
    async with linked(directory, {"liveness": Liveness()}, **ENDLESS, delay=0.002) as (core, worker):
        async with core.generator.submit(make_request(HELLO, max_tokens=50)) as generation:
            await anext(generation)
            worker.send_raw([b"x"] * 100_000)
            deltas = [delta async for delta in generation]
        assert deltas[-1].finish_reason == "length"
        await until(lambda: core.registry.counters.malformed == 1)


async def test_outputs_for_unknown_ids_are_counted_and_cancelled(directory: Path) -> None:
    async with linked(directory) as (core, worker):
        worker.send(Steps(epoch=worker.epoch, sequence=1, outputs=[Output("nobody", 0, [5]), Output("", 0, [5])]))
        await until(lambda: core.registry.counters.unknown_ids == 2)
        await until(lambda: [cancel.request_id for cancel in worker.cancels()] == ["nobody"])


async def test_slow_consumer_is_cut_and_others_are_not(directory: Path) -> None:
    async with linked(directory, {"write_timeout": 0.2}, **ENDLESS, delay=0.0005) as (core, worker):
        async with core.generator.submit(make_request(HELLO, max_tokens=MANY_TOKENS)) as slow:
            await anext(slow)
            # It does not read; the worker's own queue shows when it was disconnected.
            await until(lambda: worker.num_running == 0)
            other = await collect(core.generator.submit(make_request(HELLO, max_tokens=50)))
            assert other[-1].finish_reason == "length"
            pending = await anext(slow)
            assert len(pending.token_ids) >= 256
            with pytest.raises(UnavailableError) as caught:
                await anext(slow)
            assert caught.value.code == "slow_client"
        assert core.sample("slow_clients_total") == 1


async def test_requests_that_do_not_fit_are_refused_with_numbers(directory: Path) -> None:
    with FakeWorker(directory, num_pages=10, max_model_len=4096):
        async with running_core(directory) as core:
            with pytest.raises(UnavailableError):
                core.generator.submit(make_request(HELLO))
            await joined(core)
            with pytest.raises(ContextLengthError, match=r"5 tokens.*5000.*4096"):
                core.generator.submit(make_request(HELLO, max_tokens=5000))
            with pytest.raises(ContextLengthError, match="KV cache is 160"):
                core.generator.submit(make_request(HELLO, max_tokens=200))
            with pytest.raises(ModelNotFoundError):
                core.generator.submit(make_request(HELLO, model="../../etc/passwd"))
            for changes in ({"n": 0}, {"n": MAX_CHOICES + 1}):
                with pytest.raises(Exception, match="n must be"):
                    core.generator.submit(make_request(HELLO, **changes))
            assert core.admission.num_requests == 0


async def test_each_gateway_has_its_own_step_numbers(directory: Path) -> None:
    with FakeWorker(directory, delay=0.001):
        async with running_core(directory, gateway_id="gw-1") as one, running_core(directory, gateway_id="gw-2") as two:
            await joined(one)
            await joined(two)
            results = await asyncio.gather(
                *(collect(core.generator.submit(make_request(HELLO))) for core in (one, two) for _ in range(5))
            )
            for deltas in results:
                assert ids_of(deltas) == [*HELLO, 2]
            assert one.registry.counters == two.registry.counters
