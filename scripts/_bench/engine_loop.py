"""Engine of a worker in this process with a client on its socket, driven by several parts of bench_engine."""

from __future__ import annotations

import gc
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import zmq

from kernels.backends.reference import SamplingOps
from shared import sockets
from shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    FinishReason,
    GatewayMessage,
    Hello,
    Output,
    Ping,
    Steps,
    Submit,
    Welcome,
    WorkerMessage,
    decode_worker_message,
    encode_message,
)
from shared.sampling_params import SamplingParams
from shared.settings import WorkerSettings
from worker.__main__ import build_engine
from worker.engine import Engine
from worker.executor.build import BuiltExecutor, make_rows
from worker.executor.device import Device
from worker.executor.executor import LocalExecutor, StepHandle
from worker.executor.model_runner import Model, ModelRunner, PageStorage
from worker.model.forward_batch import ForwardBatch
from worker.model.loading.model_files import ModelFiles
from worker.plan import StepPlan
from worker.sampling.sampled_rows import SampledRows
from worker.sampling.sampler import SampledTokens, Sampler
from worker.stats import Counters
from worker.transport import Transport

_T = TypeVar("_T")
_PING_SECONDS = 1.0
_ARRIVAL_MS = 10_000
"""Time limit for a message that was sent, even on a busy machine."""


class LoopError(RuntimeError):
    """Unexpected behavior of the engine that would make the figures misleading."""


class OpClock:
    """Stopwatch of the model and the sampler; `seconds` is reset by its readers."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """Call a function and add its time."""
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - begin


class TimedModel:
    """Model whose time is added to a clock."""

    def __init__(self, model: Model, clock: OpClock) -> None:
        self._model = model
        self._clock = clock

    def hidden_states(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Return the hidden states of the model."""
        return self._clock.timed(self._model.hidden_states, batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model."""
        return self._clock.timed(self._model.logits, hidden)


@dataclass(frozen=True, kw_only=True)
class TimedSampler(Sampler):
    """Sampler whose time is added to a clock."""

    clock: OpClock

    def sample(self, logits: torch.Tensor, sampled: SampledRows) -> SampledTokens:
        """Sample tokens."""
        return self.clock.timed(super().sample, logits, sampled)


class _Sized(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def kv_groups(self) -> Sequence[Any]: ...


def timed_executor(
    settings: WorkerSettings, spec: _Sized, model: Model, kv: PageStorage, ops: SamplingOps, clock: OpClock
) -> BuiltExecutor:
    """Build a worker's executor on the CPU around a loaded model, timed by a clock.

    The settings must have the max_model_len and num_kv_pages of `kv`.
    """
    device = Device()
    rows = make_rows(settings, settings.max_model_len, len(spec.kv_groups), spec.vocab_size, device)
    sampler = TimedSampler(rows.sampling, ops, clock=clock)
    runner = ModelRunner(TimedModel(model, clock), kv, rows, sampler, device)
    return local_executor(settings, runner.launch, len(spec.kv_groups))


def local_executor(
    settings: WorkerSettings, launch: Callable[[StepPlan], StepHandle], num_kv_groups: int, draft_max_len: int = 0
) -> BuiltExecutor:
    """Return an executor on the CPU that launches steps in this process."""
    assert settings.max_model_len is not None
    return BuiltExecutor(
        executor=LocalExecutor(launch),
        num_pages=settings.num_kv_pages,
        page_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_kv_groups=num_kv_groups,
        device="cpu",
        dtype="",
        check=lambda: None,
        use_idle_time=lambda: False,
        draft_max_len=draft_max_len,
    )


class CountingTransport(Transport):
    """Transport that counts sent messages, so that a client in the same thread knows how many are in transit."""

    num_sent = 0

    def send(self, identity: bytes, message: WorkerMessage) -> None:
        """Send a message."""
        super().send(identity, message)
        self.num_sent += 1


class Loop:
    """Engine that the caller steps, and the only gateway connected to it."""

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
        """Number of waiting and running choices."""
        return self.engine.scheduler.num_running + self.engine.scheduler.num_waiting

    def connect(self) -> None:
        """Send a Hello. Raises LoopError if the engine does not answer."""
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
        """Build the vocabulary of grammars, which an idle engine otherwise builds some seconds after its start."""
        self.submit([1], SamplingParams(max_tokens=1), grammar="start: /./")
        while not any(output.finish for output in self.receive()):
            self.step()

    def send(self, message: GatewayMessage) -> None:
        """Queue a message for the engine."""
        self._socket.send(encode_message(message), zmq.NOBLOCK)

    def submit(self, token_ids: Sequence[int], sampling: SamplingParams, **more: Any) -> str:
        """Send a request and return its id."""
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
        """Cancel a request."""
        self.send(Cancel(request_id))

    def step(self) -> None:
        """Run one iteration of the engine and renew the lease of the gateway."""
        now = time.monotonic()
        if now >= self._next_ping:
            self.send(Ping(nonce=0))
            self._next_ping = now + _PING_SECONDS
        self.engine.step()

    def receive(self) -> list[Output]:
        """Return the outputs that have arrived; if the engine has become idle, wait for all that it has sent.

        An idle engine would sleep for a second in its next step, waiting for messages that the caller sends only after
        the last output. Raises LoopError if a message is lost.
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
        return decode_worker_message(self._socket.recv())


@contextmanager
def engine_loop(settings: WorkerSettings, files: ModelFiles, built: BuiltExecutor) -> Iterator[Loop]:
    """Connect to an engine built the way a worker builds it. The executor is not closed at the end."""
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


@dataclass(frozen=True, slots=True)
class Run:
    """Result of running a set of requests.

    Attributes:
        seconds: Time of the engine's steps, prompts included.
        host_seconds: The part of it outside the model and the sampler; equal to `seconds` without a clock.
        texts: Output tokens of each request, in order of submission.
    """

    seconds: float
    host_seconds: float
    texts: list[list[int]]


def run_requests(
    loop: Loop,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    concurrency: int,
    *,
    clock: OpClock | None = None,
    predictions: Sequence[Sequence[int]] = (),
) -> Run:
    """Run requests in a closed loop: a new request is submitted when another one ends.

    Raises:
        LoopError: A request failed.
    """
    clock = clock or OpClock()
    outputs: dict[str, list[int]] = {}
    num_running = 0
    seconds = host = 0.0
    while len(outputs) < len(prompts) or num_running:
        while num_running < concurrency and len(outputs) < len(prompts):
            number = len(outputs)
            more = {"prediction": list(predictions[number])} if predictions else {}
            outputs[loop.submit(prompts[number], sampling[number], **more)] = []
            num_running += 1
        # Only the engine's steps are timed; the client runs in the same thread.
        clock.seconds = 0.0
        begin = time.perf_counter()
        loop.step()
        taken = time.perf_counter() - begin
        seconds, host = seconds + taken, host + taken - clock.seconds
        for output in loop.receive():
            outputs[output.request_id] += output.token_ids
            if output.finish is not None:
                num_running -= 1
                if output.finish.reason not in (FinishReason.LENGTH, FinishReason.STOP):
                    raise LoopError(f"a request ended with {output.finish.reason}: {output.finish.message}")
    return Run(seconds, host, list(outputs.values()))
