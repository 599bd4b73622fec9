"""Worker without a model over real ZeroMQ, in a thread (`FakeWorker`) or as a process (`python -m`).

It answers each prompt with a scripted list of token ids, one per tick, and has configurable faults.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shared import sockets
from shared.messages import (
    PROTOCOL_VERSION,
    Bundle,
    BundleRequest,
    Cancel,
    DraftCounts,
    Finish,
    FinishReason,
    GatewayMessage,
    Hello,
    Output,
    Ping,
    Pong,
    Steps,
    Submit,
    TokenLogprobs,
    Welcome,
    WorkerFacts,
    WorkerMessage,
    WorkerStats,
    decode_gateway_message,
    encode_message,
)
from tests.fakes.tokenizers import make_bundle
from tests.fakes.vectors import HIDDEN_SIZE, vector_of


@dataclass
class Misbehaviour:
    """Faults of a worker; they may be set while it runs.

    Attributes:
        silent: Read and send nothing, as under SIGSTOP.
        stalled: Accept requests and answer pings, but send no tokens.
        no_pong: Do not answer pings; everything else continues.
        skip_sequence: Number of step messages that are numbered but not sent.
        repeat_steps: Send step messages twice.
        wrong_epoch: Send step messages with another epoch.
        bad_token_id: Token id sent in place of the scripted ones.
    """

    silent: bool = False
    stalled: bool = False
    no_pong: bool = False
    skip_sequence: int = 0
    repeat_steps: bool = False
    wrong_epoch: bool = False
    bad_token_id: int | None = None


@dataclass
class _Running:
    submit: Submit
    identity: bytes
    choice: int
    script: list[int]
    drafts: list[DraftCounts]
    position: int = 0
    counts: DraftCounts | None = None
    pace: int = 1
    num_ticks: int = 0


def echo(submit: Submit) -> list[int]:
    """Return the default script: the prompt again, then the end-of-text id 2."""
    return [*submit.token_ids, 2]


_ENDLESS = [40] * 400_000
MANY_TOKENS = len(_ENDLESS)
LONG_CONTEXT: dict[str, Any] = {"max_model_len": 1 << 20, "num_pages": 1 << 17}
"""Fields of a FakeWorker that allows MANY_TOKENS tokens per request."""


def endless(_: Submit) -> list[int]:
    """Return a script longer than any test, for a request with MANY_TOKENS tokens and some delay."""
    return _ENDLESS


ENDLESS: dict[str, Any] = {"script": endless, **LONG_CONTEXT}
"""Fields of a FakeWorker whose answers do not end."""


def embedded(submit: Submit) -> bytes:
    """Return the default embedding."""
    return vector_of(submit.token_ids, submit.pooling)


@dataclass
class FakeWorker:
    """Worker that binds in `directory` and serves from a thread while its context is entered.

    Attributes:
        script: Function of a prompt that returns the answer's ids; it ends early at id 2 (STOP) or at max_tokens
            (LENGTH).
        failure: Function of a prompt; the error that it returns ends each choice after the script.
        drafts: Function of a prompt that returns the accepted and rejected drafts of its first steps. Such a step
            sends the accepted tokens and one more, with the counts so far; the finish has the counts too.
        embedding: Function of a prompt to embed; it returns the embedding, or a Finish that ends the request.
        delay: Seconds between tokens of a request.
        pace: Function of a prompt that returns the factor applied to its delay.
        received: All received messages, in order.
    """

    directory: Path
    index: int = 0
    epoch: str = "00000001"
    script: Callable[[Submit], list[int]] = echo
    failure: Callable[[Submit], Finish | None] = lambda _: None
    drafts: Callable[[Submit], Sequence[DraftCounts]] = lambda _: ()
    embedding: Callable[[Submit], bytes | Finish] = embedded
    delay: float = 0.0
    pace: Callable[[Submit], int] = lambda _: 1
    bundle: Bundle = field(default_factory=make_bundle)
    model_names: Sequence[str] = ("fake",)
    max_model_len: int = 4096
    num_pages: int = 1024
    max_num_seqs: int = 64
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    speculative_method: str = "off"
    faults: Misbehaviour = field(default_factory=Misbehaviour)
    welcome_epoch: str | None = None
    version: int = PROTOCOL_VERSION
    stats: WorkerStats = field(default_factory=WorkerStats)

    def __post_init__(self) -> None:
        self.received: list[GatewayMessage] = []
        self.endpoint = sockets.worker_endpoint(self.directory, self.index, self.epoch)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._running: list[_Running] = []
        self._sequences: dict[bytes, int] = {}
        self._raw: list[list[bytes]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FakeWorker:
        self._router = sockets.make_router(self._context, self.endpoint)
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the socket as an exiting process does. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._context.term()

    def send_raw(self, frames: list[bytes]) -> None:
        """Send frames unchanged to every connected gateway."""
        self._raw.append(frames)

    def send(self, message: WorkerMessage) -> None:
        """Send a message chosen by the test."""
        self.send_raw([encode_message(message)])

    @property
    def num_running(self) -> int:
        """Number of unfinished choices."""
        return len(self._running)

    def cancels(self) -> list[Cancel]:
        return [message for message in self.received if isinstance(message, Cancel)]

    def submits(self) -> list[Submit]:
        return [message for message in self.received if isinstance(message, Submit)]

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            model_names=list(self.model_names),
            max_model_len=self.max_model_len,
            num_pages=self.num_pages,
            page_size=16,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=512,
            vocab_size=512,
            eos_token_ids=[2],
            model_hash="fake",
            bundle_hash=self.bundle.bundle_hash,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            speculative_method=self.speculative_method,
            hidden_size=HIDDEN_SIZE,
        )

    # ---- Loop of the thread or process ----

    def serve(self) -> None:
        """Run until stopped."""
        next_tick = 0.0
        while not self._stop.is_set():
            if self.faults.silent:
                time.sleep(0.005)
                continue
            wait = 5.0 if not self._running else max(0.0, (next_tick - time.monotonic()) * 1000)
            if self._router.poll(min(wait, 5.0)):
                identity, *frames = self._router.recv_multipart()
                self._on_message(identity, decode_gateway_message(frames[0]))
            while self._raw:
                frames = self._raw.pop(0)
                for identity in self._sequences:
                    self._send_frames(identity, frames)
            if self._running and not self.faults.stalled and time.monotonic() >= next_tick:
                self._step()
                next_tick = time.monotonic() + self.delay
        self._router.close(0)

    def _on_message(self, identity: bytes, message: GatewayMessage) -> None:
        self.received.append(message)
        if isinstance(message, Hello):
            self._sequences[identity] = 0
            self._running = [one for one in self._running if one.identity != identity]
            epoch = self.welcome_epoch or self.epoch
            self._send(identity, Welcome(version=self.version, epoch=epoch, facts=self.facts()))
        elif isinstance(message, Ping):
            if not self.faults.no_pong:
                self._send(identity, Pong(epoch=self.epoch, nonce=message.nonce, stats=self.stats))
        elif isinstance(message, BundleRequest):
            self._send(identity, self.bundle)
        elif isinstance(message, Submit):
            script = [] if message.pooling is not None else self.script(message)
            for choice in range(message.choice, message.choice + message.num_choices):
                drafts = [*self.drafts(message)]
                self._running.append(_Running(message, identity, choice, script, drafts, pace=self.pace(message)))
        else:
            self._cancel(identity, message)

    def _cancel(self, identity: bytes, message: Cancel) -> None:
        outputs = []
        for one in list(self._running):
            if one.submit.request_id == message.request_id and message.choice in (None, one.choice):
                self._running.remove(one)
                outputs.append(Output(message.request_id, one.choice, [], Finish(FinishReason.ABORT)))
        if outputs:
            self._send_steps(identity, outputs)

    def _step(self) -> None:
        by_gateway: dict[bytes, list[Output]] = {}
        for one in list(self._running):
            one.num_ticks += 1
            if one.num_ticks % one.pace:
                continue
            output = self._embedding(one) if one.submit.pooling is not None else self._next_output(one)
            by_gateway.setdefault(one.identity, []).append(output)
            if output.finish is not None:
                self._running.remove(one)
        for identity, outputs in by_gateway.items():
            self._send_steps(identity, outputs)

    def _embedding(self, one: _Running) -> Output:
        result = self.embedding(one.submit)
        if isinstance(result, Finish):
            return Output(one.submit.request_id, 0, [], result)
        return Output(one.submit.request_id, 0, [], Finish(FinishReason.STOP), num_cached_tokens=0, embedding=result)

    def _next_output(self, one: _Running) -> Output:
        """Return one token, or several if drafts are accepted."""
        verified = one.drafts.pop(0) if one.drafts else None
        output = self._with_one_token(one)
        for _ in range(0 if verified is None else verified.num_accepted):
            if output.finish is None:
                output = _joined(output, self._with_one_token(one))
        if verified is not None:
            before = one.counts or DraftCounts(0, 0)
            one.counts = DraftCounts(
                before.num_accepted + verified.num_accepted, before.num_rejected + verified.num_rejected
            )
        drafts = one.counts if verified is not None or output.finish is not None else None
        return msgspec.structs.replace(output, drafts=drafts)

    def _with_one_token(self, one: _Running) -> Output:
        sampling = one.submit.sampling
        ended = one.position >= len(one.script)
        failure = self.failure(one.submit)
        if ended and failure is not None:
            return Output(one.submit.request_id, one.choice, [], failure)
        token_id = one.script[-1] if ended else one.script[one.position]
        one.position += 1
        finish = None
        if token_id == 2 and not sampling.ignore_eos:
            finish = Finish(FinishReason.STOP, stop_token_id=2)
        elif one.position >= sampling.max_tokens or (one.position >= len(one.script) and failure is None):
            finish = Finish(FinishReason.LENGTH)
        if self.faults.bad_token_id is not None:
            token_id = self.faults.bad_token_id
        logprobs = None
        if sampling.logprobs is not None:
            top = [token_id][: sampling.logprobs]
            logprobs = [TokenLogprobs(token_id, -0.5, 1, top, [-0.5] * len(top))]
        cached = 0 if one.position == 1 else None
        return Output(one.submit.request_id, one.choice, [token_id], finish, logprobs, cached)

    def _send_steps(self, identity: bytes, outputs: list[Output]) -> None:
        self._sequences[identity] += 1
        if self.faults.skip_sequence > 0:
            self.faults.skip_sequence -= 1
            return
        epoch = "ffffffff" if self.faults.wrong_epoch else self.epoch
        message = Steps(epoch=epoch, sequence=self._sequences[identity], outputs=outputs)
        for _ in range(2 if self.faults.repeat_steps else 1):
            self._send(identity, message)

    def _send(self, identity: bytes, message: WorkerMessage) -> None:
        self._send_frames(identity, [encode_message(message)])

    def _send_frames(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._running = [one for one in self._running if one.identity != identity]


def _joined(first: Output, second: Output) -> Output:
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or ())]
    return msgspec.structs.replace(
        first, token_ids=[*first.token_ids, *second.token_ids], finish=second.finish, logprobs=logprobs
    )


def main() -> None:
    """Run the worker as a process that a test can signal: `python -m tests.fakes.fake_worker --dir DIR`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--epoch", default="00000001")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--endless", action="store_true")
    args = parser.parse_args()
    script = endless if args.endless else echo
    with FakeWorker(args.dir, args.index, args.epoch, script, delay=args.delay):
        threading.Event().wait()


if __name__ == "__main__":
    main()
