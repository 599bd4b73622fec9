"""The supervisor with small programs in place of gateway and worker."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from shared import config, supervisor
from shared.errors import ConfigurationError
from shared.settings import GatewaySettings, ServeSettings, WorkerSettings
from shared.supervisor import Backoff, ChildSpec, child_specs
from tests.architecture.source import ROOT

PATIENCE_SECONDS = 50.0
# Each child appends lines to a file of its own: `start PID`, then what happens to it.
CHILD = """
    import os, signal, sys, time
    from shared import notify
    name, journal = sys.argv[1], sys.argv[2]
    def say(text):
        with open(journal, "a") as file:
            file.write(f"{name} {text}\\n")
    def orphaned():
        say("orphaned"); os._exit(3)
    def terminate(*_):
        say("terminated"); stop.append(1)
    stop = []
    signal.signal(signal.SIGTERM, terminate)
    notify.watch_supervisor(orphaned)
    say(f"start {os.getpid()}")
"""
KEEP_RUNNING = """
    notify.ready("up")
    while not stop:
        time.sleep(0.01)
    time.sleep(0.1)
    say("end")
"""
DIE_WITH_2 = "sys.exit(2)"
REFUSE = "sys.exit(1)"
REFUSE_WITH_LINES = r"notify.give_reason('worker', 'no model a\rREADY=1'); sys.exit(1)"
READY_THEN_1 = "notify.ready('up'); time.sleep(0.05); sys.exit(1)"
READY_THEN_REFUSE = "notify.ready('up'); time.sleep(0.05); sys.exit(78)"
STAY = "notify.ready('up'); time.sleep(100)"

RUNNER = """
    import sys
    from pathlib import Path
    import msgspec
    from shared.supervisor import Backoff, ChildSpec, Supervisor
    specs = msgspec.json.decode(sys.argv[2], type=list[ChildSpec])
    backoff = Backoff(first=0.05, limit=0.2, healthy=60.0)
    sys.exit(Supervisor(specs, Path(sys.argv[1]), backoff=backoff).run())
"""


class Running:
    """Supervisor process and the journal of its children."""

    def __init__(self, process: subprocess.Popen[bytes], journal: Path) -> None:
        self.process = process
        self._journal = journal

    def lines(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[2]) for line in self.lines() if line.startswith(f"{name} start")]

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"did not happen; journal: {self.lines()}")
            time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(stop_seconds: Mapping[str, float] = {}, **bodies: str) -> Running:
        journal = tmp_path / "journal"
        specs = []
        for name, body in bodies.items():
            script = tmp_path / f"{name}.py"
            script.write_text(textwrap.dedent(CHILD) + textwrap.dedent(body))
            argv = (sys.executable, str(script), name, str(journal))
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            patience = stop_seconds.get(name, 2 * PATIENCE_SECONDS)
            specs.append(ChildSpec(name, argv, env, 0 if name.startswith("gateway") else 1, patience))
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RUNNER), str(tmp_path), msgspec.json.encode(specs).decode()],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(Running(process, journal))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_gateway_first_and_ends_with_0(run, tmp_path, number):
    running = run(gateway=KEEP_RUNNING, worker=KEEP_RUNNING)
    running.wait_for(lambda: running.pids("gateway") and running.pids("worker"))
    running.process.send_signal(number)
    assert running.process.wait(PATIENCE_SECONDS) == 0
    ends = [line for line in running.lines() if "start" not in line]
    assert ends == ["gateway terminated", "gateway end", "worker terminated", "worker end"]
    assert not list(tmp_path.glob("*.sock"))


def test_second_sigterm_kills(run):
    running = run(gateway=STAY, worker=KEEP_RUNNING)
    running.wait_for(lambda: running.pids("gateway") and running.pids("worker"))
    running.process.send_signal(signal.SIGTERM)
    # Two pending signals of the same kind count as one: wait until the first one was handled.
    running.wait_for(lambda: "gateway terminated" in running.lines())
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_SECONDS) == 1
    assert not any(_is_alive(pid) for name in ("gateway", "worker") for pid in running.pids(name))


def test_child_that_stays_after_sigterm_is_killed_in_the_end(run):
    running = run(stop_seconds={"gateway": 0.3}, gateway=STAY, worker=KEEP_RUNNING)
    running.wait_for(lambda: running.pids("gateway") and running.pids("worker"))
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_SECONDS) == 0
    assert "worker end" in running.lines()


def test_dead_child_is_started_again_and_the_other_left_alone(run):
    running = run(gateway=KEEP_RUNNING, worker=KEEP_RUNNING)
    running.wait_for(lambda: running.pids("gateway") and running.pids("worker"))
    os.kill(running.pids("worker")[0], signal.SIGKILL)
    running.wait_for(lambda: len(running.pids("worker")) == 2)
    assert len(running.pids("gateway")) == 1
    assert _is_alive(running.pids("worker")[1])


def test_child_that_dies_at_every_start_is_tried_again(run):
    running = run(gateway=KEEP_RUNNING, worker=DIE_WITH_2)
    running.wait_for(lambda: len(running.pids("worker")) >= 4)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize(
    "children",
    [
        {"gateway": KEEP_RUNNING, "worker": REFUSE},
        {"worker": REFUSE_WITH_LINES},  # what a reason quotes is no message of its own
        {"gateway": READY_THEN_REFUSE, "worker": KEEP_RUNNING},
    ],
)
def test_a_configuration_error_ends_everything_with_1(run, children):
    running = run(**children)
    assert running.process.wait(PATIENCE_SECONDS) == 1
    refusing = next(name for name, body in children.items() if body is not KEEP_RUNNING)
    assert len(running.pids(refusing)) == 1
    assert not any(_is_alive(pid) for name in children for pid in running.pids(name))


def test_exit_code_1_after_being_ready_is_a_crash_like_any_other(run):
    running = run(worker=READY_THEN_1)
    running.wait_for(lambda: len(running.pids("worker")) >= 2)
    assert running.process.poll() is None


def test_kill_9_of_the_supervisor_ends_its_children(run):
    running = run(gateway=KEEP_RUNNING, worker=KEEP_RUNNING)
    running.wait_for(lambda: running.pids("gateway") and running.pids("worker"))
    running.process.kill()
    running.process.wait(PATIENCE_SECONDS)
    running.wait_for(lambda: {"gateway orphaned", "worker orphaned"} <= set(running.lines()))
    running.wait_for(lambda: not any(_is_alive(pid) for n in ("gateway", "worker") for pid in running.pids(n)))


def test_processes_that_a_dead_child_left_behind_are_killed(run):
    leave_one = """
        import subprocess
        rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        say(f"rank {rank.pid}")
        sys.exit(2)
    """
    running = run(worker=leave_one)
    running.wait_for(lambda: len(running.pids("worker")) >= 2)
    rank = next(int(line.split()[2]) for line in running.lines() if line.startswith("worker rank"))
    running.wait_for(lambda: not _is_alive(rank))


def test_backoff_doubles_up_to_its_limit():
    backoff = Backoff(first=0.5, limit=10.0)
    assert [backoff.delay(n) for n in (1, 2, 3, 5, 6, 10_000)] == [0.5, 1.0, 2.0, 8.0, 10.0, 10.0]


def test_children_get_their_settings_back_and_no_keys_on_the_command_line():
    settings = ServeSettings(
        model="folder",
        api_key=("sk-a,b", "sk-c"),
        max_num_seqs=7,
        port=1234,
        enable_prefix_caching=False,
        data_parallel_size=2,
    )
    env = {"PELTON_PORT": "1", "PATH": "/bin", "NOTIFY_SOCKET": "/run/x"}
    first, second, gateway = child_specs(settings, env)
    assert not any("sk-" in argument for spec in (first, second, gateway) for argument in spec.argv)
    loaded = config.load_settings(WorkerSettings, second.argv[4:], second.env, prog="worker")
    assert (loaded.model, loaded.max_num_seqs, loaded.worker_index) == ("folder", 7, 1)
    assert loaded.enable_prefix_caching is False
    assert not any(name.startswith("PELTON_") for name in first.env)
    front = config.load_settings(GatewaySettings, gateway.argv[4:], gateway.env, prog="gateway")
    assert (front.port, front.api_key) == (1234, ("sk-a,b", "sk-c"))
    assert gateway.env["PATH"] == "/bin"
    assert "NOTIFY_SOCKET" not in gateway.env
    assert gateway.stop_order < first.stop_order


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "serve.lock").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written to: Is a directory"), supervisor._lock(tmp_path):
        pytest.fail("there is no lock")


def test_second_supervisor_in_the_same_directory_is_refused(tmp_path):
    with supervisor._lock(tmp_path), pytest.raises(ConfigurationError, match="another pelton serve is running in"):
        with supervisor._lock(tmp_path):
            pytest.fail("the lock was given twice")


class _GatewayHandler(http.server.BaseHTTPRequestHandler):
    num_refusals = 2

    def do_GET(self) -> None:
        if self.path == "/ready" and type(self).num_refusals > 0:
            type(self).num_refusals -= 1
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        name = "tiny" if self.headers.get("Authorization") in (None, "Bearer sk-right") else "wrong key"
        self.wfile.write(json.dumps({"data": [{"id": name}]}).encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _GatewayHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_greets_once_ready_answers_200(port, capsys):
    _GatewayHandler.num_refusals = 2
    supervisor.announce_when_ready(ServeSettings(port=port, host="0.0.0.0"), threading.Event())
    shown = capsys.readouterr().out
    assert _GatewayHandler.num_refusals == 0
    assert f"Pelton serves tiny at http://127.0.0.1:{port}/v1" in shown


def test_finds_the_model_with_a_key_of_the_file(port, capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# mine\n\nsk-boss name=boss scope=admin\nsk-right name=me\n")
    supervisor.announce_when_ready(ServeSettings(port=port, api_key_file=str(keys)), threading.Event())
    shown = capsys.readouterr().out
    assert "Pelton serves tiny" in shown
    assert "sk-right" not in shown


def test_says_nothing_when_stopped_first(capsys):
    stopped = threading.Event()
    stopped.set()
    supervisor.announce_when_ready(ServeSettings(port=1), stopped)
    assert capsys.readouterr().out == ""


def test_another_server_on_the_port_is_not_taken_for_ours(port, capsys):
    _GatewayHandler.num_refusals = 0
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    supervisor.announce_when_ready(ServeSettings(port=port), stopped, lambda: False)
    assert capsys.readouterr().out == ""


def test_curl_line_is_a_shell_command_without_keys():
    settings = ServeSettings(port=8000, api_key=("sk-secret",), host="::")
    text = supervisor.greeting(settings, "it's")
    assert "sk-secret" not in text and "page for chat and status is at http://[::1]:8000/\n" in text
    command = shlex.split(text.split("Try it:")[1].replace("\\\n", " "))
    assert command[:3] == ["curl", "-N", "http://[::1]:8000/v1/chat/completions"]
    assert "Authorization: Bearer $PELTON_API_KEY" in command
    assert json.loads(command[-1])["model"] == "it's"
