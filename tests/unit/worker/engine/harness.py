"""Engine and transport over a real ROUTER socket, with a fake executor and a manual clock, in one thread.

`Client.sync` is a round trip through the engine loop. Messages of a DEALER arrive in order, so everything sent before
the ping has been handled when the Pong arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from shared import sockets
from shared.messages import (
    PROTOCOL_VERSION,
    Bundle,
    Finish,
    FinishReason,
    GatewayMessage,
    Hello,
    Output,
    Ping,
    Pong,
    Steps,
    Submit,
    Welcome,
    WorkerFacts,
    WorkerMessage,
    WorkerStats,
    decode_worker_message,
    encode_message,
)
from shared.sampling_params import SamplingParams
from tests.fakes.fake_executor import EOS_TOKEN_ID, VOCAB_SIZE, FakeExecutor, FakeHandle, generate
from tests.fakes.fake_grammars import FakeGrammars
from worker.engine import Engine
from worker.kv.manager import KVManager
from worker.plan import StepPlan, StepResult
from worker.requests.constraint import Constraints
from worker.scheduler.scheduler import Scheduler, SchedulerConfig
from worker.stats import Counters
from worker.transport import Transport

EPOCH = "0000abcd"
MODEL = "fake"
MAX_MODEL_LEN = 128
PAGE_SIZE = 4
PATIENCE_SECONDS = 30.0
DELIVERY_MS = 20


class Clock:
    """Manual clock that advances only when a test says so, or by `tick` at each reading."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class CountingHandle(FakeHandle):
    """Step handle that tells the executor when its step is waited for."""

    def __init__(self, inner: FakeHandle, executor: CountingExecutor) -> None:
        self._inner = inner
        self._executor = executor

    def done(self) -> bool:
        return self._inner.done()

    def result(self) -> StepResult:
        self._executor.num_in_flight -= 1
        return self._inner.result()


class CountingExecutor(FakeExecutor):
    """Fake executor that counts the steps in flight.

    Attributes:
        max_in_flight: Largest number of steps in flight so far.
    """

    num_in_flight = 0
    max_in_flight = 0

    def submit(self, plan: StepPlan) -> CountingHandle:
        handle = super().submit(plan)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        assert self.num_in_flight <= self.depth
        return CountingHandle(handle, self)


class RecordingTransport(Transport):
    """Transport that records the wait times of the engine, and waits only if `patient`."""

    patient = False

    def __init__(self, endpoint: str, epoch: str, counters: Counters, clock: Clock) -> None:
        super().__init__(endpoint, epoch, counters, clock)
        self.waits: list[float] = []

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        return self._socket

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        super().wait(seconds if self.patient else 0)


class Worker:
    """Complete worker except for the model.

    Attributes:
        compiled: True if grammars compile as soon as they are requested.
    """

    def __init__(
        self,
        directory: Path,
        fail: Callable[[StepPlan], Exception | None],
        *,
        depth: int = 1,
        max_num_seqs: int = 8,
        num_pages: int = 256,
    ) -> None:
        self.clock = Clock()
        self.counters = Counters()
        self.endpoint = sockets.worker_endpoint(directory, 0, EPOCH)
        self.transport = RecordingTransport(self.endpoint, EPOCH, self.counters, self.clock)
        self.executor = CountingExecutor(
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            depth=depth,
            fail=fail,
        )
        self.kv = KVManager(num_pages=num_pages, page_size=PAGE_SIZE)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.compiled = True
        self.grammars = FakeGrammars(VOCAB_SIZE, lambda source, num_polls: self.compiled)
        constraints = Constraints(self.grammars, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
        self.scheduler = Scheduler(config, self.kv, self.counters, clock=time.time, constraints=constraints)
        self.facts = WorkerFacts(
            model_names=[MODEL, "alias"],
            max_model_len=MAX_MODEL_LEN,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_TOKEN_ID],
            model_hash="m",
            bundle_hash="b",
        )
        self.bundle = Bundle(bundle_hash="b", tokenizer_json=b"{}" * 500_000)
        self.checks = 0
        self.engine = Engine(
            self.scheduler,
            self.executor,
            self.transport,
            self.facts,
            self.bundle,
            check_executor=self._check,
            drain_seconds=30.0,
            clock=self.clock,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients: list[Client] = []
        self.transport.start()

    def _check(self) -> None:
        self.checks += 1

    def close(self) -> None:
        self.transport.close()
        # Not `term`, which would wait forever for a socket left open by a failed test.
        self.context.destroy(linger=0)

    def client(self, identity: bytes = b"gateway", *, hello: bool = True) -> Client:
        """Return a connected gateway client."""
        client = Client(self, identity)
        self.clients.append(client)
        if hello:
            client.hello()
        return client

    def pump(self, condition: Callable[[], object], what: str) -> None:
        """Step the engine until the condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for: {what}"
            self._await_delivery()
            self.engine.step()
            for client in self.clients:
                client.read()

    def _await_delivery(self) -> None:
        """Give ZeroMQ's threads time to deliver pending messages.

        Steps of the fake model take no time. Without this wait, a busy machine runs through a whole request before a
        message sent in the meantime arrives.
        """
        poller = zmq.Poller()
        for socket in (self.transport.socket, *(client.socket for client in self.clients)):
            if socket is not None and not socket.closed:
                poller.register(socket, zmq.POLLIN)
        poller.poll(DELIVERY_MS)

    def elapse(self, seconds: float) -> None:
        """Advance the clock second by second, as for a running loop."""
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            self.engine.step()

    def run_until_idle(self) -> None:
        """Step until no request is live, then check that all resources are freed."""
        self.pump(lambda: not self.scheduler.has_requests, "idle")
        self.engine.step()
        self.scheduler.check_integrity()
        assert self.kv.pages_in_use == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


class Client:
    """DEALER socket of a gateway that checks every message it reads against the protocol.

    Attributes:
        outputs: Outputs since the last Hello, by request id and choice.
        stats: Statistics of the last Pong.
    """

    def __init__(self, worker: Worker, identity: bytes) -> None:
        self.worker = worker
        self.identity = identity
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.steps: list[Steps] = []
        self.bundles: list[Bundle] = []
        self.welcomes: list[Welcome] = []
        self.stats: WorkerStats | None = None
        self._nonce = 0
        self._ponged = 0
        self.socket = sockets.make_dealer(worker.context, worker.endpoint, identity)
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)

    def close(self) -> None:
        """Disconnect; unread messages are lost."""
        self.socket.close(0)

    # Messages to the worker.

    def send(self, message: GatewayMessage) -> None:
        """Send one message in one frame."""
        self.socket.send(encode_message(message))

    def send_frames(self, *frames: bytes) -> None:
        """Send arbitrary frames."""
        self.socket.send_multipart(list(frames))

    def hello(self) -> Welcome:
        """Start a new session of this gateway."""
        count = len(self.welcomes)
        self.send(Hello(PROTOCOL_VERSION, self.identity.decode()))
        self.worker.pump(lambda: len(self.welcomes) > count, "welcome")
        return self.welcomes[-1]

    def submit(self, request_id: str, prompt: list[int] | None = None, **changes: object) -> Submit:
        """Send a Submit with defaults that fit the fake model."""
        message = make_submit(request_id, prompt, **changes)
        self.send(message)
        return message

    def sync(self) -> WorkerStats:
        """Wait until everything sent so far has been handled."""
        self._nonce += 1
        nonce = self._nonce
        self.send(Ping(nonce))
        self.worker.pump(lambda: self._ponged >= nonce, "pong")
        assert self.stats is not None
        return self.stats

    # Messages from the worker.

    def read(self) -> None:
        """Read and record the messages that have arrived."""
        while not self.socket.closed:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            assert len(frames) == 1
            self._on_message(decode_worker_message(frames[0]))

    def _on_message(self, message: WorkerMessage) -> None:
        if isinstance(message, Welcome):
            assert message.epoch == EPOCH
            self.welcomes.append(message)
            self.steps.clear()
            self.outputs.clear()
        elif isinstance(message, Pong):
            assert message.epoch == EPOCH
            self._ponged = message.nonce
            self.stats = message.stats
        elif isinstance(message, Bundle):
            self.bundles.append(message)
        elif self.welcomes:
            assert message.epoch == EPOCH
            assert message.sequence == len(self.steps) + 1, "sequence numbers have a gap"
            assert message.outputs, "Steps message without outputs"
            self.steps.append(message)
            for output in message.outputs:
                news = self.outputs.setdefault((output.request_id, output.choice), [])
                assert not news or news[-1].finish is None, "Output after the terminal output"
                news.append(output)

    def ended(self, request_id: str, choice: int = 0) -> Finish | None:
        """Return the finish of a choice, or None while it runs."""
        news = self.outputs.get((request_id, choice))
        return news[-1].finish if news else None

    def finish(self, request_id: str, choice: int = 0) -> Finish:
        """Step until a choice has ended."""
        self.worker.pump(lambda: self.ended(request_id, choice) is not None, f"end of {request_id}")
        finish = self.ended(request_id, choice)
        assert finish is not None
        return finish

    def text(self, request_id: str, choice: int = 0) -> list[int]:
        """Return the token ids of a choice so far."""
        return [token_id for output in self.outputs.get((request_id, choice), []) for token_id in output.token_ids]

    def complete(self, request_id: str, prompt: list[int] | None = None, **changes: object) -> None:
        """Run a request and check every choice against the model's text."""
        self.check(self.submit(request_id, prompt, **changes))

    def check(self, submit: Submit) -> None:
        """Wait for the ends of a Submit's choices and compare them with the model's text."""
        for choice in range(submit.choice, submit.choice + submit.num_choices):
            finish = self.finish(submit.request_id, choice)
            assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH), finish
            assert self.text(submit.request_id, choice) == expected(submit, choice)


def make_submit(request_id: str, prompt: list[int] | None = None, **changes: object) -> Submit:
    """Return a valid Submit. `changes` are its fields or those of its sampling parameters."""
    token_ids = prompt if prompt is not None else [5, 6, 7, 8, 9]
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__struct_fields__}
    sampling = {"max_tokens": 8, "seed": 3} | sampling
    fields: dict = {"model": MODEL, "num_prompt_tokens": len(token_ids), "sampling": SamplingParams(**sampling)}
    return Submit(request_id=request_id, token_ids=token_ids, **fields | changes)


def expected(submit: Submit, choice: int = 0) -> list[int]:
    """Return the tokens that the fake model generates for a choice."""
    return generate(submit.token_ids, submit.sampling, choice, MAX_MODEL_LEN, submit.num_prompt_tokens)
