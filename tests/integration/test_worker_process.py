"""`python -m worker` as its own process with a tiny random model: start, service, signals, death."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from tokenizers import Tokenizer

from shared import sockets
from shared.messages import (
    PROTOCOL_VERSION,
    BundleRequest,
    Cancel,
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
    WorkerMessage,
    decode_worker_message,
    encode_message,
)
from shared.sampling_params import SamplingParams
from tests.fakes.numba_cache import CACHE
from tests.fakes.processes import alive, children, refusals
from tests.fakes.tiny_model import CONFIG, write_tiny_model
from tests.fakes.tokenizers import characters_json

PATIENCE_SECONDS = 100.0
LONG_CONTEXT = 131_072


class Process:
    """Worker process and its socket directory."""

    def __init__(self, directory: Path, model: Path, *args: str, pass_fds: tuple[int, ...] = (), **env: str) -> None:
        self.directory = directory
        self.log = directory.parent / "worker.log"
        command = [sys.executable, "-m", "worker", "--model", str(model), "--runtime-dir", str(directory)]
        command += ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--num-kv-pages", "8192"]
        command += ["--max-num-seqs", "8", "--cache-dir", str(CACHE), *args]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | env, pass_fds=pass_fds
            )

    def output(self) -> str:
        """Return the process output."""
        return self.log.read_text()

    def endpoint(self) -> str:
        """Return the endpoint once the worker listens."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self.output().count("worker_ready") and (found := sockets.list_worker_endpoints(self.directory)):
                return found[-1]
            assert self.popen.poll() is None, self.output()
            time.sleep(0.02)
        raise AssertionError("does not listen")

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if number is not None:
            self.popen.send_signal(number)
        return self.popen.wait(PATIENCE_SECONDS)


class Gateway:
    """DEALER socket that checks the epoch and numbers of received messages."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes = b"gateway") -> None:
        self.epoch = (sockets.parse_endpoint(endpoint) or (0, ""))[1]
        self.outputs: dict[str, list[Output]] = {}
        self.sequence = 0
        self.socket = sockets.make_dealer(context, endpoint, identity)

    def send(self, message: GatewayMessage) -> None:
        self.socket.send(encode_message(message))

    def receive(self) -> WorkerMessage:
        """Return the next message."""
        assert self.socket.poll(PATIENCE_SECONDS * 1000), "the worker sends nothing"
        message = decode_worker_message(self.socket.recv())
        if isinstance(message, Steps):
            self.sequence += 1
            assert (message.epoch, message.sequence) == (self.epoch, self.sequence)
            for output in message.outputs:
                news = self.outputs.setdefault(output.request_id, [])
                assert not news or news[-1].finish is None
                news.append(output)
        return message

    def hello(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, "gateway"))
        message = self.receive()
        assert isinstance(message, Welcome) and message.epoch == self.epoch
        self.facts = message.facts

    def ping(self, nonce: int = 1) -> Pong:
        """Send a Ping and wait for the Pong."""
        self.send(Ping(nonce))
        while True:
            message = self.receive()
            if isinstance(message, Pong):
                assert (message.nonce, message.epoch) == (nonce, self.epoch)
                return message

    def submit(self, request_id: str, max_tokens: int = 6, grammar: str = "") -> None:
        """Submit a greedy request that ignores end tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.send(
            Submit(
                request_id=request_id,
                model="tiny",
                token_ids=[1, 17, 99, 200],
                num_prompt_tokens=4,
                sampling=sampling,
                grammar=grammar,
            )
        )

    def begin(self, request_id: str, max_tokens: int = 100_000) -> None:
        """Submit a request and wait for its first token."""
        self.submit(request_id, max_tokens)
        while not self.outputs.get(request_id):
            self.receive()

    def finish(self, request_id: str) -> Finish:
        """Wait for the end of a request."""
        while not self.outputs.get(request_id) or self.outputs[request_id][-1].finish is None:
            self.receive()
        finish = self.outputs[request_id][-1].finish
        assert finish is not None
        return finish

    def text(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a long context, so that a request runs as long as a test needs."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": LONG_CONTEXT}))
    return folder


@pytest.fixture
def start(directory: Path, model: Path) -> Iterator[Callable[..., Process]]:
    """Return a function that starts a worker."""
    processes: list[Process] = []

    def make(*args: str, **options) -> Process:
        processes.append(Process(directory, options.pop("model", model), *args, **options))
        return processes[-1]

    yield make
    for process in processes:
        process.popen.kill()
        process.popen.wait()


@pytest.fixture
def serve(start) -> Iterator[Callable[..., tuple[Process, Gateway]]]:
    """Return a function that starts a worker and connects a gateway to it."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def make(*args: str, **options) -> tuple[Process, Gateway]:
            process = start(*args, **options)
            gateway = Gateway(context, process.endpoint())
            stack.callback(gateway.socket.close, 0)
            gateway.hello()
            return process, gateway

        yield make


def test_serves_and_ends(serve, directory: Path) -> None:
    process, gateway = serve()
    facts = gateway.facts
    assert facts.model_names == ["tiny"]
    assert (facts.tool_call_parser, facts.reasoning_parser) == ("auto", "auto")
    assert (facts.vocab_size, facts.max_model_len, facts.device) == (CONFIG["vocab_size"], LONG_CONTEXT, "cpu")
    gateway.send(BundleRequest(facts.bundle_hash))
    bundle = gateway.receive()
    assert bundle.bundle_hash == facts.bundle_hash and b'"t7"' in bundle.tokenizer_json
    gateway.submit("a")
    assert gateway.finish("a").reason is FinishReason.LENGTH
    assert len(gateway.text("a")) == 6
    gateway.begin("b")
    gateway.send(Cancel("b"))
    assert gateway.finish("b").reason is FinishReason.ABORT
    # The tokenizer has no bytes.
    gateway.submit("masked", 40, 'start: "a"')
    assert "tokenizer does not support grammars" in gateway.finish("masked").message
    gateway.submit("again")
    gateway.finish("again")
    assert gateway.text("again") == gateway.text("a")
    stats = gateway.ping().stats
    assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
    assert process.end() == 0
    assert list(directory.iterdir()) == []
    said = process.output()
    assert 0 < said.index("loading") < said.index("worker_ready") and "Traceback" not in said


def test_grammars_are_followed_and_flags_reach_the_facts(serve, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_bytes(characters_json())
    process, gateway = serve("--tool-call-parser", "hermes", "--reasoning-parser", "none", model=folder)
    facts = gateway.facts
    assert (facts.tool_call_parser, facts.reasoning_parser) == ("hermes", "none")
    text = Tokenizer.from_str(characters_json().decode())
    for number in range(3):
        gateway.submit(f"followed{number}", 40, "start: /[a-c]{4}x/")
        gateway.submit(f"bad{number}", 40, "start: /(unclosed/")
        assert gateway.finish(f"followed{number}") == Finish(FinishReason.STOP)
        assert re.fullmatch("[a-c]{4}x", text.decode(gateway.text(f"followed{number}")))
        assert gateway.finish(f"bad{number}").code == "invalid_grammar"
    counters = gateway.ping().stats.counters
    assert counters["grammar_compilations_total"] == 4
    assert counters["grammar_cache_hits_total"] == 2
    assert process.end() == 0
    assert "Traceback" not in process.output()


def test_a_second_signal_ends_the_worker_immediately(serve) -> None:
    process, gateway = serve()
    gateway.begin("long")
    process.popen.send_signal(signal.SIGTERM)
    # Two pending signals merge into one, so the first must have been handled.
    count = 0
    while count == 0 or gateway.finish(f"new{count}").code != "service_unavailable":
        count += 1
        gateway.submit(f"new{count}", 1)
    assert gateway.outputs["long"][-1].finish is None
    process.popen.send_signal(signal.SIGTERM)
    finish = gateway.finish("long")
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "service_unavailable")
    assert process.end(None) == 0


def test_a_worker_ends_with_its_supervisor(serve, directory: Path) -> None:
    read_end, write_end = os.pipe()
    process, gateway = serve(pass_fds=(read_end,), PELTON_SUPERVISOR_FD=str(read_end))
    os.close(read_end)
    gateway.begin("long")
    os.close(write_end)
    assert gateway.finish("long").code == "service_unavailable"
    assert process.end(None) == 0
    assert list(directory.iterdir()) == []


def test_a_loading_worker_ends_with_its_supervisor(start, directory: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    process = start(pass_fds=(read_end,), PELTON_SUPERVISOR_FD=str(read_end))
    os.close(read_end)
    assert process.end(None) == 1
    assert "worker_ready" not in process.output()
    assert list(directory.iterdir()) == []


def test_a_signal_ends_a_loading_worker(start, directory: Path) -> None:
    process = start()
    status = Path(f"/proc/{process.popen.pid}/status")
    # Python handles SIGINT during imports, until the worker installs its handler.
    for caught in (True, False):
        while catches_sigint(status) is not caught and "worker_ready" not in process.output():
            time.sleep(0.005)
    assert process.end(signal.SIGINT) in (0, -signal.SIGINT)
    assert "Traceback" not in process.output()
    assert list(directory.iterdir()) == []


def test_a_worker_removes_sockets_of_its_predecessors(serve, directory: Path) -> None:
    stale, other = (
        sockets.worker_endpoint(directory, index, epoch).removeprefix("ipc://")
        for index, epoch in ((0, "0000aaaa"), (1, "0000abcd"))
    )
    # A killed worker leaves its socket; another worker listens on its own.
    with socket.socket(socket.AF_UNIX) as killed, zmq.Context() as own, own.socket(zmq.ROUTER) as neighbour:
        killed.bind(stale)
        neighbour.bind(f"ipc://{other}")
        process, gateway = serve()
        names = {path.name for path in directory.iterdir()}
        assert Path(stale).name not in names and len(names) == 2 and Path(other).name in names
        gateway.submit("a")
        assert gateway.finish("a").reason is FinishReason.LENGTH
        assert process.end() == 0


def test_unusable_configuration_is_one_sentence_and_exit_code_1(directory: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    cases = {"/nowhere/model.gguf": "/nowhere/model.gguf", str(broken): "model.safetensors", "--oops": "oops"}
    started = [["--runtime-dir", str(directory), "--device", "cpu", model] for model in cases]
    for reason, words in zip(refusals("worker", started), cases.values(), strict=True):
        assert "pelton worker:" in reason and words in reason


@pytest.mark.slow
def test_a_killed_rank_ends_the_worker_and_its_requests(serve, directory: Path) -> None:
    process, gateway = serve("--tensor-parallel-size", "2")
    gateway.begin("long")
    ranks = children(process.popen.pid)
    (rank,) = ranks
    os.kill(rank, signal.SIGKILL)
    finish = gateway.finish("long")
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "worker_lost")
    assert process.end(None) == 1
    assert not alive(ranks)
    assert list(directory.iterdir()) == []
    assert "Traceback" not in process.output()


def test_a_split_worker_exits_with_0_and_leaves_no_rank(serve, directory: Path) -> None:
    process, gateway = serve("--tensor-parallel-size", "2")
    gateway.submit("a")
    assert gateway.finish("a").reason is FinishReason.LENGTH
    ranks = children(process.popen.pid)
    assert ranks
    assert process.end() == 0
    assert not alive(ranks)
    assert list(directory.iterdir()) == []


def catches_sigint(status: Path) -> bool:
    """Return True if a process has a SIGINT handler, from /proc/PID/status."""
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) & 1 << (signal.SIGINT - 1))
