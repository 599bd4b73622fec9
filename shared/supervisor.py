"""`pelton serve`: supervisor of the gateway and worker processes of one machine.

It imports neither aiohttp nor torch. Each child has a session of its own, so that a Ctrl-C reaches only the
supervisor, which stops the children in order: the gateway first, so that it drains while the workers still compute,
then the workers. A child that dies is restarted with exponential back-off. A child that cannot start (exit code 1
before it was ever ready), or that cannot use the others (shared.errors), ends everything, because another attempt
would end the same way; the last line of the output is the reason that it gave. When the supervisor itself dies, the
children read end-of-file on their pipe and exit (shared.notify).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import http.client
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shared import config, log, notify, sockets
from shared.errors import EXIT_CONFIGURATION, EXIT_REFUSED, ConfigurationError
from shared.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WORKER_STOP_SECONDS = 10.0
_GATEWAY_STOP_MARGIN_SECONDS = 5.0
_POLL_SECONDS = 0.1
_REQUEST_SECONDS = 2.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}

logger = log.get_logger("supervisor")


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """One process to keep running.

    Attributes:
        name: Name of the child.
        argv: Command line.
        env: Environment variables.
        stop_order: Children with a lower number are stopped first; the next follow when those are gone.
        stop_seconds: Seconds after SIGTERM at which the child gets SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_order: int
    stop_seconds: float


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds before a restart: `first`, doubled at each further failure up to `limit`.

    After a child has run for `healthy` seconds the count of failures starts again.
    """

    first: float = 0.25
    limit: float = 30.0
    healthy: float = 60.0

    def delay(self, num_failures: int) -> float:
        """Return the seconds to wait after `num_failures` >= 1 failures in a row."""
        return min(self.limit, self.first * 2.0 ** min(num_failures - 1, 30))


class Child:
    """State of one child. Only the Supervisor changes it.

    Attributes:
        was_ready: True if the child has ever sent READY=1.
        reason: Reason that its last process gave for its end; empty if it gave none.
    """

    def __init__(self, spec: ChildSpec, notify_path: Path) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.was_ready = False
        self.reason = ""
        self.notify_path = notify_path
        self.notify_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notify_socket.setblocking(False)
        notify_path.unlink(missing_ok=True)
        self.notify_socket.bind(str(notify_path))

    def read_notifications(self) -> None:
        """Receive the child's sd_notify messages."""
        with contextlib.suppress(BlockingIOError):
            while True:
                # Not splitlines: a carriage return in a reason does not end a line.
                lines = self.notify_socket.recv(4096).decode("utf-8", "replace").split("\n")
                self.was_ready = self.was_ready or "READY=1" in lines
                reasons = [line for line in lines if line.startswith(notify.REASON_PREFIX)]
                if reasons:
                    self.reason = reasons[-1].removeprefix(notify.REASON_PREFIX)

    def signal(self, number: int) -> None:
        """Signal the child alone; SIGKILL goes to every process of its session's group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.process.pid, number)
                else:
                    self.process.send_signal(number)

    def close(self) -> None:
        """Kill the process and remove the notification socket."""
        self.signal(signal.SIGKILL)
        self.notify_socket.close()
        self.notify_path.unlink(missing_ok=True)


class Supervisor:
    """Supervisor that starts, watches, restarts and stops children.

    Attributes:
        reason: Reason of a child that could not start, if that has ended everything.

    Args:
        specs: The children.
        directory: Private directory for the notification sockets.
    """

    def __init__(self, specs: Sequence[ChildSpec], directory: Path, *, backoff: Backoff | None = None) -> None:
        self._backoff = backoff if backoff is not None else Backoff()
        self._children = [Child(spec, directory / f"notify-{spec.name}.sock") for spec in specs]
        self._pipe_read, self._pipe_write = os.pipe()
        self._stopping = asyncio.Event()
        self._exit_code = 0
        self.reason = ""

    def run(self) -> int:
        """Run until a stop signal or until a child cannot start; return the exit code. For the main thread only."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        for child in self._children:
            loop.add_reader(child.notify_socket, child.read_notifications)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(self._keep_running(child)): child for child in self._children}
                await self._stopping.wait()
                for order in sorted({child.spec.stop_order for child in self._children}):
                    await _stop({task: child for task, child in tasks.items() if child.spec.stop_order == order})
            return self._exit_code
        finally:
            for child in self._children:
                loop.remove_reader(child.notify_socket)
                child.close()
            os.close(self._pipe_read)
            os.close(self._pipe_write)

    async def _keep_running(self, child: Child) -> None:
        """Start the child, and start it again whenever it ends, until everything stops."""
        num_failures = 0
        while not self._stopping.is_set():
            begin = time.monotonic()
            code = await self._run_once(child)
            lifetime = time.monotonic() - begin
            if self._stopping.is_set():
                said = {"reason": child.reason} if child.reason else {}
                logger.info("ended", child=child.spec.name, exit_code=code, **said)
            elif code == EXIT_REFUSED or (code == EXIT_CONFIGURATION and not child.was_ready):
                logger.error("could not start", child=child.spec.name, exit_code=code)
                self.reason = child.reason
                self._begin_stop(EXIT_CONFIGURATION)
            else:
                num_failures = 1 if lifetime >= self._backoff.healthy else num_failures + 1
                delay = self._backoff.delay(num_failures)
                logger.error(
                    "died",
                    child=child.spec.name,
                    exit_code=code,
                    reason=child.reason,
                    lifetime=round(lifetime, 2),
                    restart_in=delay,
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_once(self, child: Child) -> int:
        """Run a process of the child and return its exit code."""
        env = {
            **child.spec.env,
            notify.SUPERVISOR_FD_VARIABLE: str(self._pipe_read),
            "NOTIFY_SOCKET": str(child.notify_path),
        }
        child.reason = ""
        child.process = await asyncio.create_subprocess_exec(
            *child.spec.argv,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._pipe_read,),
        )
        logger.info("started", child=child.spec.name, pid=child.process.pid)
        if self._stopping.is_set():  # since the start began
            child.signal(signal.SIGTERM)
        code = await child.process.wait()
        # Processes that the child started in its group (ranks of a worker) end with it.
        child.signal(signal.SIGKILL)
        child.process = None
        child.read_notifications()
        return code

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._stopping.is_set():
            logger.info("signal", signal=name, next_one="ends_everything")
            self._begin_stop(0)
            return
        logger.info("signal", signal=name)
        # A second signal: stop waiting.
        self._exit_code = self._exit_code or 1
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _begin_stop(self, exit_code: int) -> None:
        self._exit_code = exit_code
        notify.stopping("stopping")
        self._stopping.set()

    def were_ready(self, kind: str) -> bool:
        """Return True if every child named `kind`-NUMBER has been ready at some time. Other threads may call this."""
        return all(child.was_ready for child in self._children if child.spec.name.startswith(f"{kind}-"))


async def _stop(children: Mapping[asyncio.Task[None], Child]) -> None:
    """Stop a group of children, given with the tasks that run them; kill those that take too long."""
    number, seconds = signal.SIGTERM, max(child.spec.stop_seconds for child in children.values())
    running = set(children)
    while running:
        for task in running:
            children[task].signal(number)
        _, running = await asyncio.wait(running, timeout=seconds)
        for task in running:
            logger.warning("killed because it did not end in time", child=children[task].spec.name)
        number, seconds = signal.SIGKILL, 1.0


def serve(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `pelton serve` and return its exit code.

    Raises:
        ConfigurationError: The settings are invalid, or a child could not start; the message is its reason.
    """
    settings = config.load_settings(ServeSettings, argv, env, prog="pelton serve")
    writer = log.configure(settings.log_level, settings.log_format, process="supervisor")
    # A free port is chosen here, once, so that a restarted gateway listens on the same port.
    settings = dataclasses.replace(settings, port=settings.port or _free_port(settings.host))
    own = settings.runtime_dir or str(sockets.runtime_dir() / f"serve-{settings.port}")
    directory = sockets.runtime_dir(own)
    settings = dataclasses.replace(settings, runtime_dir=str(directory))
    with _lock(directory):
        supervisor = Supervisor(child_specs(settings, env), directory)
        done = threading.Event()
        threading.Thread(
            target=announce_when_ready,
            args=(settings, done, lambda: supervisor.were_ready("gateway")),
            name="announce",
            daemon=True,
        ).start()
        try:
            exit_code = supervisor.run()
        finally:
            done.set()
            writer.flush()
    if supervisor.reason:
        raise ConfigurationError(supervisor.reason)
    return exit_code


def child_specs(settings: ServeSettings, env: Mapping[str, str]) -> list[ChildSpec]:
    """Return the workers and gateways of one `pelton serve`; the gateways stop first."""
    # Not the supervisor's own socket: each child gets the socket on which the supervisor listens.
    inherited = {name: value for name, value in env.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
    if settings.num_threads == 0 and settings.data_parallel_size > 1:
        num_threads = max(1, len(os.sched_getaffinity(0)) // settings.data_parallel_size)
        settings = dataclasses.replace(settings, num_threads=num_threads)
    gateway_seconds = settings.drain_timeout + _GATEWAY_STOP_MARGIN_SECONDS
    sides: tuple[tuple[str, type[CommonSettings], int, int, float], ...] = (
        ("worker", WorkerSettings, settings.data_parallel_size, 1, _WORKER_STOP_SECONDS),
        ("gateway", GatewaySettings, settings.gateway_processes, 0, gateway_seconds),
    )
    specs = []
    for kind, cls, count, stop_order, stop_seconds in sides:
        for index in range(count):
            own = dataclasses.replace(settings, worker_index=index, gateway_index=index)
            argv = (*python_module(kind), *config.settings_to_argv(cls, own))
            child_env = config.settings_to_environment(cls, own, inherited)
            specs.append(ChildSpec(f"{kind}-{index}", argv, child_env, stop_order, stop_seconds))
    return specs


def python_module(name: str) -> list[str]:
    """Return the command that runs one of Pelton's packages.

    -P: a folder `worker` in the current directory must not be found.
    """
    return [sys.executable, "-P", "-m", name]


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigurationError(f"--host {host}: {error.strerror}") from error


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory. Raise ConfigurationError if another `pelton serve` has it."""
    try:
        file = open(directory / "serve.lock", "w")  # noqa: SIM115 - the next line closes it
    except OSError as error:
        raise ConfigurationError(f"runtime_dir {directory} cannot be written to: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another pelton serve is running in {directory}; choose another --port, and another --runtime-dir "
                "if you gave one"
            ) from error
        yield


def announce_when_ready(
    settings: ServeSettings, stopped: threading.Event, listening: Callable[[], bool] = lambda: True
) -> None:
    """Poll /ready until it answers 200, then print the URL and a curl command. Return early when `stopped` is set.

    Args:
        settings: Settings of the server.
        stopped: Event that ends the polling.
        listening: Function that tells whether our own gateway holds the port; before that, another server might
            answer.
    """
    while not stopped.wait(_POLL_SECONDS):
        if listening() and _get(settings, "/ready", {}) is not None:
            print(greeting(settings, _model_name(settings)), flush=True)
            notify.ready(f"serving on {base_url(settings)}")
            return


def base_url(settings: ServeSettings) -> str:
    """Return the base_url for an OpenAI SDK on this machine."""
    host = _reachable_host(settings)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}/v1"


def greeting(settings: ServeSettings, model: str) -> str:
    """Return the lines to print, which never contain keys."""
    question = {"role": "user", "content": "Tell me a joke."}
    # At the API's default temperature, 1, the first answer of a small model would be nonsense.
    body = json.dumps({"model": model, "messages": [question], "stream": True, "max_tokens": 64, "temperature": 0.7})
    command = ["curl", "-N", f"{base_url(settings)}/chat/completions", "-H", "Content-Type: application/json"]
    key = ' -H "Authorization: Bearer $PELTON_API_KEY"' if settings.api_key or settings.api_key_file else ""
    return (
        f"\nPelton serves {model} at {base_url(settings)}\n"
        f"A page for chat and status is at {base_url(settings).removesuffix('v1')}\n"
        f"Try it:\n\n  {shlex.join(command)}{key} \\\n    -d {shlex.quote(body)}\n"
    )


def _model_name(settings: ServeSettings) -> str:
    if settings.served_model_name:
        return settings.served_model_name[0]
    key = settings.api_key[0] if settings.api_key else _first_key(settings.api_key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        name = json.loads(_get(settings, "/v1/models", headers) or b"")["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        return "default"
    return str(name)


def _first_key(path: str) -> str:
    """Return the first key of --api-key-file that may request /v1/models, or nothing.

    The gateway reports a bad file.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines() if path else []
    except (OSError, UnicodeDecodeError):
        return ""
    words = (line.split() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return next((first for first, *rest in words if "scope=admin" not in rest), "")


def _reachable_host(settings: ServeSettings) -> str:
    return _ANY_ADDRESS.get(settings.host, settings.host)


def _get(settings: ServeSettings, path: str, headers: Mapping[str, str]) -> bytes | None:
    """Return the body of a 200 response, else None."""
    connection = http.client.HTTPConnection(_reachable_host(settings), settings.port, timeout=_REQUEST_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        if response.status == 200:
            return response.read()
    return None
