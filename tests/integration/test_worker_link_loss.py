"""Workers that die, become silent, restart or are incompatible, over real ZeroMQ."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cluster.client import Liveness
from shared.errors import ModelNotFoundError, UnavailableError, WorkerLostError
from shared.messages import PROTOCOL_VERSION, Output, Steps, WorkerStats
from tests.fakes.fake_worker import ENDLESS, MANY_TOKENS, FakeWorker, Misbehaviour
from tests.fakes.gateway_core import FAST, collect, ids_of, joined, linked, make_request, running_core, until
from tests.fakes.tokenizers import byte_level_json, make_bundle

HELLO = [39, 68, 75, 75, 78]


@contextmanager
def worker_process(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.fakes.fake_worker", "--dir", str(directory), *arguments]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_killed_worker_fails_only_its_own_streams(directory: Path) -> None:
    with (
        worker_process(directory, "--index", "0", "--delay", "0.01", "--endless") as process,
        FakeWorker(directory, index=1, delay=0.005, script=lambda _: [41] * 100) as other,
    ):
        async with running_core(directory) as core:
            await joined(core, 2)
            generations = [core.generator.submit(make_request(HELLO, max_tokens=4000)) for _ in range(8)]
            firsts = [await anext(generation) for generation in generations]
            on_victim = [40 in first.token_ids for first in firsts]
            assert 0 < sum(on_victim) < 8
            victim = next(link for link in core.registry.models()[0].workers if link.name == "0")
            process.send_signal(signal.SIGKILL)
            for generation, lost in zip(generations, on_victim, strict=True):
                if lost:
                    with pytest.raises(WorkerLostError):
                        await collect(generation)
                else:
                    assert (await collect(generation))[-1].finish_reason == "length"
            assert victim.lost_reason == "disconnected"
            assert core.registry.ready() == (True, "ok")
            assert core.admission.num_requests == core.admission.waiting_tokens == 0
            assert other.num_running == 0
            assert core.sample("workers_lost_total") == 1
            assert core.sample("request_failures_total", model_name="fake", reason="worker_lost") == sum(on_victim)
            # Capacity counts live workers only.
            await until(lambda: len(core.registry.models()[0].workers) == 1)
            await collect(core.generator.submit(make_request(HELLO, max_tokens=1000)))


async def test_lost_before_output_without_another_worker(directory: Path) -> None:
    async with linked(directory, faults=Misbehaviour(skip_sequence=10**9), delay=1.0) as (core, worker):
        generation = core.generator.submit(make_request(HELLO))
        await until(lambda: worker.submits())
        await asyncio.to_thread(worker.stop)
        with pytest.raises(WorkerLostError):
            await collect(generation)
        # A known model without a worker is 503, an unknown model is 404.
        with pytest.raises(UnavailableError):
            core.registry.model("fake")
        with pytest.raises(ModelNotFoundError):
            core.registry.model("other")
        assert core.registry.ready() == (False, "all workers are gone")


async def test_a_stopped_worker_is_lost_and_rejoins(directory: Path) -> None:
    # There is enough time between both to see the first.
    liveness = Liveness(ping_interval=0.05, not_ready_after=1.0, lost_after=5.0)
    with worker_process(directory, "--delay", "0.01", "--endless") as process:
        async with running_core(directory, liveness=liveness) as core:
            await joined(core)
            async with core.generator.submit(make_request(HELLO, max_tokens=4000)) as generation:
                await anext(generation)
                process.send_signal(signal.SIGSTOP)
                await until(lambda: core.registry.ready() == (False, "no worker answers"))
                with pytest.raises(UnavailableError):
                    core.generator.submit(make_request(HELLO))
                with pytest.raises(WorkerLostError):
                    async for _ in generation:
                        pass
            assert core.registry.models() == ()
            process.send_signal(signal.SIGCONT)
            await joined(core)
            # Late messages do not reach a new stream.
            deltas = await collect(core.generator.submit(make_request(HELLO, max_tokens=7)))
            assert len(ids_of(deltas)) == 7


async def test_short_silence_only_delays(directory: Path) -> None:
    liveness = Liveness(ping_interval=0.05, not_ready_after=1.0, lost_after=50.0)
    async with linked(directory, {"liveness": liveness}, script=lambda _: [40] * 4000, delay=0.01) as (core, worker):
        async with core.generator.submit(make_request(HELLO, max_tokens=4000)) as generation:
            first = await anext(generation)
            worker.faults.silent = True
            await until(lambda: not core.registry.ready()[0])
            worker.delay = 0.0
            worker.faults.silent = False
            deltas = [first] + [delta async for delta in generation]
        assert len(ids_of(deltas)) == 4000
        await until(lambda: core.registry.ready()[0])


async def test_an_engine_that_hangs_is_lost_though_its_socket_lives(directory: Path) -> None:
    async with linked(directory, {"liveness": FAST}, **ENDLESS, delay=3600) as (core, worker):
        async with core.generator.submit(make_request(HELLO, max_tokens=1000)) as generation:
            await anext(generation)
            worker.faults.no_pong = True
            with pytest.raises(WorkerLostError):
                await anext(generation)


async def test_a_restarted_worker_joins_and_late_tokens_are_dropped(directory: Path) -> None:
    async with linked(directory, **ENDLESS, delay=0.01) as (core, first):
        generation = core.generator.submit(make_request(HELLO, max_tokens=MANY_TOKENS))
        await anext(generation)
        old_id = first.submits()[0].request_id
        await asyncio.to_thread(first.stop)
        with pytest.raises(WorkerLostError):
            await collect(generation)
        with FakeWorker(directory, epoch="00000002", delay=0.01) as second:
            await until(lambda: core.registry.models() and core.registry.models()[0].workers[0].epoch == "00000002")
            # After a late message of the first epoch the link is unreliable, so the worker joins again.
            second.send(Steps(epoch="00000001", sequence=1, outputs=[Output(old_id, 0, [9, 9, 9])]))
            await until(lambda: core.registry.counters.wrong_epoch == 1)
            await joined(core)
            deltas = await collect(core.generator.submit(make_request(HELLO)))
            assert ids_of(deltas) == [*HELLO, 2]


async def test_sockets_without_a_worker_are_retried_until_removed(directory: Path) -> None:
    worker = FakeWorker(directory)
    with worker:
        pass
    socket_file = directory / "worker-0-00000001.sock"
    if not socket_file.exists():
        # ZeroMQ removes the file on an orderly close; kill -9 would have left it.
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(socket_file))
    async with running_core(directory) as core:
        await asyncio.sleep(0.1)
        assert core.registry.ready() == (False, "no worker has joined")
        with pytest.raises(UnavailableError, match="may still be loading"):
            core.registry.model("fake")
        socket_file.unlink()
        with FakeWorker(directory, epoch="00000002"):
            await joined(core)
            await collect(core.generator.submit(make_request(HELLO)))


@pytest.mark.parametrize("changes", [{"version": PROTOCOL_VERSION + 1}, {"welcome_epoch": "0000000f"}])
async def test_workers_of_another_version_or_epoch_do_not_join(directory: Path, changes: dict) -> None:
    with FakeWorker(directory, **changes) as worker:
        async with running_core(directory) as core:
            await until(lambda: core.registry.counters.wire_errors >= 1)
            assert core.registry.models() == ()
            assert worker.submits() == []


async def test_a_bundle_is_fetched_once(directory: Path) -> None:
    with FakeWorker(directory, index=0) as one, FakeWorker(directory, index=1) as two:
        async with running_core(directory) as core:
            await joined(core, 2)
            asked = [type(message).__name__ for worker in (one, two) for message in worker.received]
            assert asked.count("BundleRequest") == 1


async def test_a_second_model_cannot_take_a_used_name(directory: Path) -> None:
    template = "{{ messages[0].content }}"
    other = make_bundle(byte_level_json(), template)
    async with linked(directory, index=1, bundle=other, model_names=("second", "alias")) as (core, _):
        with FakeWorker(directory, index=0, model_names=("fake", "alias")) as conflicting:
            await until(lambda: conflicting.received)
            await asyncio.sleep(0.2)
            assert [entry.name for entry in core.registry.models()] == ["second"]
            assert core.registry.model("alias").name == "second"


async def test_stats_and_limits_of_workers_are_seen(directory: Path) -> None:
    stats = WorkerStats(num_running=3, pages_in_use=64, counters={"prompt_tokens_total": 5.0})
    with (
        FakeWorker(directory, index=0, stats=stats, num_pages=128),
        FakeWorker(directory, index=1, max_model_len=100),
    ):
        async with running_core(directory) as core:
            await joined(core, 2)
            await until(lambda: any(snapshot.stats == stats for snapshot in core.registry.snapshots()))
            snapshots = {snapshot.worker: snapshot for snapshot in core.registry.snapshots()}
            assert snapshots["0"].num_pages == 128
            assert snapshots["0"].ready
            assert snapshots["1"].stats == WorkerStats()
            assert core.registry.model("fake").facts.max_model_len == 100


async def test_closing_fails_running_requests_and_leaves_no_descriptor(directory: Path) -> None:
    with FakeWorker(directory, **ENDLESS, delay=0.01):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with running_core(directory) as core:
                await joined(core)
                generation = core.generator.submit(make_request(HELLO, max_tokens=MANY_TOKENS))
                await anext(generation)
            with pytest.raises(WorkerLostError):
                await collect(generation)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
