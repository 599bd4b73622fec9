"""Process of a rank other than the leader: `python -m worker.executor.rank_main`, started by worker.executor.ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque

import msgspec
import zmq

from kernels.backends.select import sampling_ops
from shared import notify
from shared.errors import ConfigurationError
from worker.executor.build import make_runner, measure_memory
from worker.executor.device import open_device
from worker.executor.draft_files import open_draft
from worker.executor.executor import EnqueuedStep
from worker.executor.memory import KVPlan
from worker.executor.models import load_models
from worker.executor.ranks import ENDPOINT_VARIABLE, IDLE, RankReply, RankStart, join_group
from worker.executor.resolve import cache_directory, num_threads, prepare_process, resolve_device
from worker.model.loading.open_model import open_model
from worker.plan import StepPlan


def main() -> int:
    """Run the rank until the leader closes the pipe."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE)
    if endpoint is None or notify.watch_supervisor(lambda: os._exit(0)) is None:
        print("worker.executor.rank_main is started by a worker; do not run it directly", file=sys.stderr)
        return 2
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    _reply(socket, RankReply(stage="started"))
    try:
        _serve(socket)
    except Exception as error:  # noqa: BLE001 - the leader reports it
        configuration = isinstance(error, ConfigurationError)
        text = str(error) if configuration else f"{type(error).__name__}: {error}"
        with contextlib.suppress(zmq.ZMQError):
            _reply(socket, RankReply(stage="failed", error=text, configuration=configuration))
        socket.close()
        context.term()
    # Skip the interpreter's shutdown, in which a process group with dead peers may hang.
    os._exit(1)


def _serve(socket: zmq.Socket[bytes]) -> None:
    start = msgspec.msgpack.decode(socket.recv(), type=RankStart)
    settings = start.settings
    prepare_process(settings)
    cache_dir = cache_directory(settings)
    parallel = join_group(start.rank, settings.tensor_parallel_size, start.store, settings.device)
    files = open_model(settings.model, cache_dir)
    device = open_device(resolve_device(settings, start.rank))
    models = load_models(settings, files, open_draft(settings, files, cache_dir), device, parallel)
    ops = sampling_ops(device.torch_device, num_threads(settings), files.spec.vocab_size)
    memory = measure_memory(settings, models, ops, device)
    _reply(socket, RankReply(stage="loaded", available=memory.available))
    num_pages, max_model_len = msgspec.msgpack.decode(socket.recv(), type=tuple[int, int])
    ops.compile()
    runner = make_runner(settings, models, KVPlan(num_pages, max_model_len), ops, device)
    _reply(socket, RankReply(stage="ready"))
    plan_decoder = msgspec.msgpack.Decoder(StepPlan)
    in_flight: deque[EnqueuedStep] = deque()
    while True:
        message = socket.recv()
        if message == IDLE:
            runner.capture_next()
            continue
        in_flight.append(runner.launch(plan_decoder.decode(message)))
        if len(in_flight) >= device.depth:
            in_flight.popleft().wait()


def _reply(socket: zmq.Socket[bytes], reply: RankReply) -> None:
    socket.send(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    sys.exit(main())
