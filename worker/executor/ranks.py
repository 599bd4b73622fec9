"""The other ranks of a tensor-parallel group, as the leader sees them.

Each is a process `python -m worker.executor.rank_main` with a ZeroMQ PAIR socket to the leader, in a directory of mode
0700. The leader sends it the settings, the size of the KV cache, then every plan, as MessagePack; all ranks run the
same plans and sample the same ids, so nothing comes back but a few answers while loading. A rank keeps no more steps
in flight than its device is worth, and looks at no result. Tensors go through
torch.distributed; the ranks meet by a file in the same directory, and gloo listens on the loopback interface only.

A rank ends when its pipe to the leader closes. A rank that dies is noticed by its process, and by gloo in the
collective that misses it; either raises ExecutorError in the leader, which can only exit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import FileStore

from shared.errors import ConfigurationError
from shared.settings import WorkerSettings
from shared.sockets import runtime_dir
from shared.supervisor_pipe import ENVIRONMENT_VARIABLE
from worker.executor.executor import ExecutorError
from worker.executor.memory import KVPlan
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext
from worker.plan import StepPlan

ENDPOINT_VARIABLE = "PELTON_RANK_ENDPOINT"
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""A rank that is stopped, not dead, holds the others up for this long before they give up."""
IDLE = b""
"""What is sent in place of a plan while there is none."""
_START_SECONDS = 300.0
_STOP_SECONDS = 5.0
_POLL_MS = 100


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a rank.

    Attributes:
        settings: with device and dtype resolved.
        store: path of the file by which the ranks find each other.
    """

    settings: WorkerSettings
    rank: int
    store: str


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a rank while it loads.

    Attributes:
        stage: what it has reached.
        error: why it cannot go on, or empty; `configuration` says whose fault it is.
        available: once loaded, bytes that its KV cache may take.
    """

    stage: str
    error: str = ""
    configuration: bool = False
    available: int = 0


class RankGroup:
    """Ranks 1 .. size - 1. `start`, `join`, `prepare`, then `send` for every plan, then `close`."""

    def __init__(self, size: int, settings: WorkerSettings) -> None:
        self.parallel = ParallelContext(tp_size=size)
        self._settings = settings
        self._size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pipe: int | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=runtime_dir(settings.runtime_dir)))
        self._encoder = msgspec.msgpack.Encoder()

    def start(self) -> None:
        """Starts the processes and waits until each has imported what it needs."""
        read_end, self._pipe = os.pipe()
        try:
            for rank in range(1, self._size):
                endpoint = f"ipc://{self._directory}/{rank}"
                socket = self._context.socket(zmq.PAIR)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 16)
                socket.bind(endpoint)
                self._sockets.append(socket)
                environment = os.environ | {ENDPOINT_VARIABLE: endpoint, ENVIRONMENT_VARIABLE: str(read_end)}
                command = [sys.executable, "-P", "-m", "worker.executor.rank_main"]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        pass_fds=(read_end,),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        finally:
            os.close(read_end)
        self._expect("started")

    def join(self) -> ParallelContext:
        """Hands the settings out and meets the ranks in torch.distributed; they go on to load the model."""
        store = str(self._directory / "store")
        for rank, socket in enumerate(self._sockets, start=1):
            self._send(socket, self._encoder.encode(RankStart(settings=self._settings, rank=rank, store=store)))
        self.parallel = join_group(0, self._size, store, self._settings.device)
        return self.parallel

    def loaded(self) -> int:
        """Waits until all have loaded; the bytes that the KV cache of each may take."""
        return min(reply.available for reply in self._expect("loaded"))

    def prepare(self, plan: KVPlan) -> None:
        """Lets all that have loaded allocate the KV cache, and waits for them."""
        message = self._encoder.encode((plan.num_pages, plan.max_model_len))
        for socket in self._sockets:
            self._send(socket, message)
        self._expect("ready")

    def send(self, plan: StepPlan) -> None:
        """Sends a step to every rank. Raises ExecutorError where one is gone."""
        self.check()
        message = self._encoder.encode(plan)
        for socket in self._sockets:
            self._send(socket, message)

    def send_idle(self) -> None:
        """Lets every rank use idle time as the leader does now: graphs with collectives are captured together."""
        for socket in self._sockets:
            self._send(socket, IDLE)

    def check(self) -> None:
        """Raises ExecutorError where a rank has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise ExecutorError(f"tensor-parallel rank {rank} ended with status {process.returncode}")

    def close(self) -> None:
        """Ends the ranks, waits for them, and removes the directory. May be called twice."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self._context.term()
        if dist.is_initialized():
            # The ranks are gone, so the group has nobody to say goodbye to.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, socket: zmq.Socket[bytes], message: bytes) -> None:
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ExecutorError("a tensor-parallel rank does not take its plans") from error

    def _expect(self, stage: str) -> list[RankReply]:
        replies = []
        deadline = time.monotonic() + _START_SECONDS
        for rank, socket in enumerate(self._sockets, start=1):
            while not socket.poll(_POLL_MS):
                self.check()
                if time.monotonic() > deadline:
                    raise ExecutorError(f"tensor-parallel rank {rank} has not {stage} after {_START_SECONDS:.0f} s")
            reply = msgspec.msgpack.decode(socket.recv(), type=RankReply)
            if reply.error:
                message = f"tensor-parallel rank {rank}: {reply.error}"
                raise ConfigurationError(message) if reply.configuration else ExecutorError(message)
            if reply.stage != stage:
                raise ExecutorError(f"tensor-parallel rank {rank} says {reply.stage!r}, expected {stage!r}")
            replies.append(reply)
        return replies


def join_group(rank: int, size: int, store: str, device: str) -> ParallelContext:
    """Meets the other ranks. Raises ExecutorError where one does not come."""
    # gloo listens on the loopback interface only; it would else take the one that the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, store=FileStore(store, size), rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        raise ExecutorError(f"the tensor-parallel ranks did not meet: {error}") from error
    return ParallelContext(tp_rank=rank, tp_size=size, group=dist.group.WORLD)


def rank_settings(settings: WorkerSettings, *, device: torch.device, dtype: torch.dtype) -> WorkerSettings:
    """What a rank is told: the worker's settings alone, with device and dtype resolved."""
    values = {field.name: getattr(settings, field.name) for field in fields(WorkerSettings)}
    values |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    return WorkerSettings(**values)


def check_parallel_size(spec: DecoderSpec, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raises ConfigurationError for a layout that the model cannot be split into; lists those that it can."""
    if pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"pipeline-parallel-size is {pipeline_parallel_size}; only 1 is supported: use tensor-parallel-size"
        )
    sizes = [size for size in range(1, spec.num_heads + 1) if _splits(spec, size)]
    if tensor_parallel_size not in sizes:
        raise ConfigurationError(
            f"tensor-parallel-size is {tensor_parallel_size}; the model's {spec.num_heads} attention heads, "
            f"{spec.num_kv_heads} key-value heads and {spec.intermediate_size} feed-forward features can be split "
            f"over {', '.join(map(str, sizes))}"
        )


def _splits(spec: DecoderSpec, size: int) -> bool:
    kv_fits = spec.num_kv_heads % size == 0 or (size > spec.num_kv_heads and size % spec.num_kv_heads == 0)
    return spec.num_heads % size == 0 and spec.intermediate_size % size == 0 and kv_fits
