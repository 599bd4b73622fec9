"""The worker's own engine in this process, with a client on its socket: what several parts of bench_engine drive."""

from __future__ import annotations

import gc
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import zmq

from kernels.backends.reference import SamplingOps
from shared import sockets, wire
from shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    GatewayMessage,
    Hello,
    Output,
    Ping,
    Steps,
    Submit,
    Welcome,
    WorkerMessage,
)
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.__main__ import build_engine
from worker.engine import Engine
from worker.executor.build import BuiltExecutor, make_rows
from worker.executor.device import CpuDevice
from worker.executor.executor import LocalExecutor
from worker.executor.model_runner import Model, ModelRunner, PageStorage
from worker.model.forward_batch import ForwardBatch
from worker.model.loading.model_files import ModelFiles
from worker.sampling.sampled_rows import SampledRows
from worker.sampling.sampler import SampledTokens, Sampler
from worker.stats import Counters
from worker.transport import Transport

_T = TypeVar("_T")
_PING_SECONDS = 1.0
_ARRIVAL_MS = 10_000
"""By then a message has come through the socket, on however busy a machine."""


class LoopError(RuntimeError):
    """The engine did not do what it was asked for; figures would mislead."""


class OpClock:
    """Seconds that the model and the sampler took, since someone last set them to nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """Calls it on the clock."""
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - begin


class TimedModel:
    """A model on the clock."""

    def __init__(self, model: Model, clock: OpClock) -> None:
        self._model = model
        self._clock = clock

    def hidden_states(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """As the model's."""
        return self._clock.timed(self._model.hidden_states, batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model's."""
        return self._clock.timed(self._model.logits, hidden)


class TimedSampler(Sampler):
    """The sampler on the clock."""

    clock: OpClock

    def sample(self, logits: torch.Tensor, sampled: SampledRows) -> SampledTokens:
        """As the sampler's."""
        return self.clock.timed(super().sample, logits, sampled)


class FreeModel:
    """Computes nothing: every token is as likely as any other."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._hidden = torch.zeros(max_num_seqs, 1)
        self._logits = torch.zeros(max_num_seqs, vocab_size)

    def hidden_states(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """[S, 1] zeros."""
        return self._hidden[: len(batch.logits_indices)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, vocab] zeros, the same memory for all steps: the sampler may write to them."""
        return self._logits[: len(hidden)]

    def copy_pages(self, copies: Any) -> None:
        """It is its own KV cache, which holds nothing."""


class _Sized(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def kv_groups(self) -> Sequence[Any]: ...


def timed_executor(
    settings: WorkerSettings, spec: _Sized, model: Model, kv: PageStorage, ops: SamplingOps, clock: OpClock
) -> BuiltExecutor:
    """A worker's executor on the CPU around a model that is there already.

    Args:
        settings: with max_model_len and num_kv_pages, which `kv` has.
    """
    device = CpuDevice()
    rows = make_rows(settings, settings.max_model_len, len(spec.kv_groups), spec.vocab_size, device)
    sampler = TimedSampler(rows.sampling, ops)
    sampler.clock = clock
    runner = ModelRunner(TimedModel(model, clock), kv, rows, sampler, device)
    return BuiltExecutor(
        executor=LocalExecutor(runner.launch),
        num_pages=settings.num_kv_pages,
        page_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_kv_groups=len(spec.kv_groups),
        device="cpu",
        dtype="",
        check=lambda: None,
        use_idle_time=lambda: False,
    )


class CountingTransport(Transport):
    """Counts what it sends, so that a client in the same thread knows what is still on its way."""

    num_sent = 0

    def send(self, identity: bytes, message: WorkerMessage) -> None:
        """As the transport's."""
        super().send(identity, message)
        self.num_sent += 1


class Loop:
    """An engine whose steps the caller makes, and the one gateway that is connected to it."""

    def __init__(self, engine: Engine, transport: CountingTransport, socket: zmq.Socket[bytes], model: str) -> None:
        self.engine = engine
        self.counters = engine.scheduler.counters
        self._transport = transport
        self._socket = socket
        self._num_received = 0
        self._model = model
        self._num_submitted = 0
        self._next_ping = 0.0

    @property
    def num_queued(self) -> int:
        """Choices that wait or run."""
        return self.engine.scheduler.num_running + self.engine.scheduler.num_waiting

    def connect(self) -> None:
        """Says hello. Raises LoopError where nobody answers."""
        self.send(Hello(version=PROTOCOL_VERSION, gateway_id="bench"))
        self._next_ping = time.monotonic() + _PING_SECONDS
        for _ in range(10):
            self.engine.step()
            if self._socket.poll(100):
                if isinstance(self._read(), Welcome):
                    return
                break
        raise LoopError("the engine did not answer")

    def warm_up(self) -> None:
        """Has the grammars' vocabulary made, which an idle engine makes some seconds after its start."""
        self.submit([1], SamplingParams(max_tokens=1), grammar="start: /./")
        while not any(output.finish for output in self.receive()):
            self.step()

    def send(self, message: GatewayMessage) -> None:
        """Queues a message for the engine."""
        self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def submit(self, token_ids: Sequence[int], sampling: SamplingParams, **more: Any) -> str:
        """Sends a request; returns its id."""
        self._num_submitted += 1
        name = f"r{self._num_submitted}"
        count = len(token_ids)
        submit = Submit(
            request_id=name, model=self._model, token_ids=list(token_ids), num_prompt_tokens=count, sampling=sampling,
            **more,
        )  # fmt: skip
        self.send(submit)
        return name

    def cancel(self, request_id: str) -> None:
        """As a gateway whose client has gone."""
        self.send(Cancel(request_id))

    def step(self) -> None:
        """One pass of the loop, and what keeps the gateway's lease."""
        now = time.monotonic()
        if now >= self._next_ping:
            self.send(Ping(nonce=0))
            self._next_ping = now + _PING_SECONDS
        self.engine.step()

    def receive(self) -> list[Output]:
        """What has arrived from the engine, and from one that has nothing left to compute all that it has sent.

        That one would sleep a whole second in its next step for messages that are sent only when the last output is
        here. Raises LoopError where one gets lost.
        """
        outputs: list[Output] = []
        while self._num_received < self._transport.num_sent:
            working = self.engine.scheduler.has_requests
            if not self._socket.poll(0 if working else _ARRIVAL_MS):
                if working:
                    break
                raise LoopError("a message of the engine did not arrive")
            message = self._read()
            if isinstance(message, Steps):
                outputs += message.outputs
        return outputs

    def _read(self) -> WorkerMessage:
        self._num_received += 1
        return wire.decode_worker_message(self._socket.recv())


@contextmanager
def engine_loop(settings: WorkerSettings, files: ModelFiles, built: BuiltExecutor) -> Iterator[Loop]:
    """An engine as a worker builds it, connected to. The executor stays open."""
    epoch, counters = secrets.token_hex(4), Counters()
    with ExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="pelton-", dir="/tmp")))
        endpoint = sockets.worker_endpoint(directory, 0, epoch)
        transport = CountingTransport(endpoint, epoch, counters)
        ending.callback(transport.close)
        engine = build_engine(settings, files, built, transport, counters)
        transport.start()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ending.callback(context.term)
        socket = sockets.make_dealer(context, endpoint, b"bench")
        ending.callback(socket.close, 0)
        loop = Loop(engine, transport, socket, files.default_name)
        loop.connect()
        loop.warm_up()
        gc.collect()
        gc.freeze()  # as a worker does
        ending.callback(gc.unfreeze)
        yield loop
