"""The other ranks of a tensor-parallel group, as the leader controls them.

Each rank is a process `python -m worker.executor.rank_main` with a ZeroMQ PAIR socket to the leader, in a directory of
mode 0700. The leader sends the settings, the size of the KV cache and then every plan as MessagePack. All ranks
execute the same plans and sample the same ids, so they reply only while loading. A rank keeps at most as many steps in
flight as its device uses and ignores the results. Tensors go through torch.distributed: the ranks meet through a file
in the same directory, and gloo listens on the loopback interface only.

A rank exits when its pipe to the leader closes. The death of a rank is detected by its process status, or by gloo in
the next collective. Both raise ExecutorError in the leader, which must exit.
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

from shared.errors import ConfigurationError
from shared.notify import SUPERVISOR_FD_VARIABLE
from shared.settings import WorkerSettings
from shared.sockets import runtime_dir
from worker.executor.executor import ExecutorError
from worker.executor.memory import KVPlan
from worker.model.spec import DecoderSpec
from worker.parallel import ParallelContext
from worker.plan import StepPlan

ENDPOINT_VARIABLE = "PELTON_RANK_ENDPOINT"
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""Time for which a collective waits for a rank that is stopped but not dead."""
IDLE = b""
"""Message sent instead of a plan while the engine is idle."""
_START_SECONDS = 300.0
_STOP_SECONDS = 5.0
_POLL_MS = 100


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a rank.

    Attributes:
        settings: Settings with device and dtype resolved.
        rank: Index of the rank.
        store: Path of the file through which the ranks meet.
    """

    settings: WorkerSettings
    rank: int
    store: str


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a rank while it loads.

    Attributes:
        stage: Stage that the rank has reached.
        error: Reason of a failure; empty on success.
        configuration: True if the settings caused the failure.
        available: After loading, bytes that the KV cache of the rank may use.
    """

    stage: str
    error: str = ""
    configuration: bool = False
    available: int = 0


class RankGroup:
    """Ranks 1 .. size - 1. Call `start`, `join`, `prepare`, then `send` for every plan, then `close`."""

    def __init__(self, size: int, settings: WorkerSettings) -> None:
        self._settings = settings
        self._size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pipe: int | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=runtime_dir(settings.runtime_dir)))
        self._encoder = msgspec.msgpack.Encoder()

    def start(self) -> None:
        """Start the processes and wait until each has imported its modules."""
        read_end, self._pipe = os.pipe()
        try:
            for rank in range(1, self._size):
                endpoint = f"ipc://{self._directory}/{rank}"
                socket = self._context.socket(zmq.PAIR)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 16)
                socket.bind(endpoint)
                self._sockets.append(socket)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "worker.executor.rank_main"],
                        env=os.environ | {ENDPOINT_VARIABLE: endpoint, SUPERVISOR_FD_VARIABLE: str(read_end)},
                        pass_fds=(read_end,),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        finally:
            os.close(read_end)
        self._expect("started")

    def join(self) -> ParallelContext:
        """Send the settings and join the process group of torch.distributed. The ranks then load the model."""
        store = str(self._directory / "store")
        for rank, socket in enumerate(self._sockets, start=1):
            self._send(socket, self._encoder.encode(RankStart(settings=self._settings, rank=rank, store=store)))
        return join_group(0, self._size, store, self._settings.device)

    def loaded(self) -> int:
        """Wait until all ranks have loaded. Return the bytes that the KV cache of each may use."""
        return min(reply.available for reply in self._expect("loaded"))

    def prepare(self, plan: KVPlan) -> None:
        """Make all ranks allocate the KV cache, and wait for them."""
        self._broadcast(self._encoder.encode((plan.num_pages, plan.max_model_len)))
        self._expect("ready")

    def send(self, plan: StepPlan) -> None:
        """Send a step to every rank. Raise ExecutorError if a rank has died."""
        self.check()
        self._broadcast(self._encoder.encode(plan))

    def send_idle(self) -> None:
        """Make every rank use idle time as the leader does, because graphs with collectives are captured together."""
        self._broadcast(IDLE)

    def check(self) -> None:
        """Raise ExecutorError if a rank has exited."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise ExecutorError(f"tensor-parallel rank {rank} exited with status {process.returncode}")

    def close(self) -> None:
        """Terminate the ranks, wait for them, and remove the directory. May be called repeatedly."""
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
            # The other ranks have exited, so the group cannot be shut down in an orderly way.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _broadcast(self, message: bytes) -> None:
        for socket in self._sockets:
            self._send(socket, message)

    def _send(self, socket: zmq.Socket[bytes], message: bytes) -> None:
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ExecutorError("a tensor-parallel rank does not receive its plans") from error

    def _expect(self, stage: str) -> list[RankReply]:
        replies = []
        deadline = time.monotonic() + _START_SECONDS
        for rank, socket in enumerate(self._sockets, start=1):
            while not socket.poll(_POLL_MS):
                self.check()
                if time.monotonic() > deadline:
                    raise ExecutorError(
                        f"tensor-parallel rank {rank} has not reached stage {stage!r} after {_START_SECONDS:.0f} s"
                    )
            reply = msgspec.msgpack.decode(socket.recv(), type=RankReply)
            if reply.error:
                message = f"tensor-parallel rank {rank}: {reply.error}"
                raise ConfigurationError(message) if reply.configuration else ExecutorError(message)
            if reply.stage != stage:
                raise ExecutorError(f"tensor-parallel rank {rank} reports stage {reply.stage!r}, expected {stage!r}")
            replies.append(reply)
        return replies


def join_group(rank: int, size: int, store: str, device: str) -> ParallelContext:
    """Join the process group of torch.distributed. Raise ExecutorError if a rank does not join."""
    # Without this, gloo listens on the interface that the host name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if device == "cuda" else "gloo"
    file_store = dist.FileStore(store, size)  # type: ignore[attr-defined]  # documented, but not exported for mypy
    try:
        dist.init_process_group(backend, store=file_store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ExecutorError(f"the tensor-parallel ranks did not form a process group: {error}") from error
    return ParallelContext(tp_rank=rank, tp_size=size, group=dist.group.WORLD)


def rank_settings(settings: WorkerSettings, *, device: torch.device, dtype: torch.dtype) -> WorkerSettings:
    """Return the settings for a rank: those of the worker alone, with device and dtype resolved."""
    values = {field.name: getattr(settings, field.name) for field in fields(WorkerSettings)}
    values |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    return WorkerSettings(**values)


def check_parallel_size(spec: DecoderSpec, tensor_parallel_size: int) -> None:
    """Raise ConfigurationError, listing the possible sizes, if the model cannot be split in this way."""
    sizes = [size for size in range(1, spec.num_heads + 1) if _splits(spec, size)]
    if tensor_parallel_size not in sizes:
        raise ConfigurationError(
            f"--tensor-parallel-size is {tensor_parallel_size}, but the model's {spec.num_heads} attention heads, "
            f"{spec.num_kv_heads} key-value heads and {spec.intermediate_size} feed-forward features can only be split "
            f"over {', '.join(map(str, sizes))}; choose one of these"
        )


def _splits(spec: DecoderSpec, size: int) -> bool:
    kv_fits = spec.num_kv_heads % size == 0 or (size > spec.num_kv_heads and size % spec.num_kv_heads == 0)
    return spec.num_heads % size == 0 and spec.intermediate_size % size == 0 and kv_fits
