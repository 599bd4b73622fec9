"""`pelton serve` as a process, with small packages in place of `gateway` and `worker`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

GATEWAY = """
    import http.server, json, os, signal, sys, threading
    from shared import notify
    from shared.config import load_settings
    from shared.settings import GatewaySettings
    settings = load_settings(GatewaySettings, sys.argv[1:], os.environ, prog="gateway")
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            right = self.path == "/ready" or self.headers["Authorization"] == "Bearer " + settings.api_key[0]
            self.send_response(200 if right else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "model-in-" + settings.runtime_dir[-4:]}]}).encode())
        def log_message(self, *_):
            pass
    server = http.server.ThreadingHTTPServer((settings.host, settings.port), Handler)
    server.handle_error = lambda *_: None  # a serve that ends hangs up in the middle of an answer
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    notify.watch_supervisor(lambda: os._exit(0))
    notify.ready("listens")
    server.serve_forever(0.01)
"""
WORKER = """
    import os, signal, sys
    from shared import notify
    from shared.config import load_settings
    from shared.settings import WorkerSettings
    settings = load_settings(WorkerSettings, sys.argv[1:], os.environ, prog="worker")
    if settings.model == "missing":
        notify.give_reason("pelton worker", "model missing does not exist")
        sys.exit(1)
    notify.watch_supervisor(lambda: os._exit(0))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    notify.ready("loaded")
    signal.pause()
"""


@pytest.fixture
def serve(tmp_path: Path):
    for name, source in (("gateway", GATEWAY), ("worker", WORKER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "__main__.py").write_text(textwrap.dedent(source))
    (tmp_path / "run").mkdir(mode=0o700)
    started = []

    def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "shared.cli", "serve", "--runtime-dir", str(tmp_path / "run"), "--port", "0"]
        process = subprocess.Popen(
            [*line, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_greeting(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    return "".join(lines)


def test_greets_and_stops_in_order(serve):
    process = serve("--data-parallel-size", "2", PELTON_API_KEY="sk-secret")
    greeting = read_greeting(process)
    # The name of the model shows that the gateway received the runtime directory and the key.
    assert "Pelton serves model-in-/run at http://127.0.0.1:" in greeting
    assert "curl -N" in greeting
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "sk-secret" not in greeting + out + err
    for name in ("worker-0", "worker-1", "gateway-0"):
        assert f'"child":"{name}"' in err


def test_model_that_cannot_be_loaded_ends_serve_with_its_message(serve):
    process = serve("missing")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err.endswith("\npelton serve: model missing does not exist\n") and err.count("missing does not") == 1
    assert "Traceback" not in err


def test_second_serve_in_the_same_directory_is_refused(serve):
    first = serve(PELTON_API_KEY="sk-1")
    read_greeting(first)
    second = serve()
    _, err = second.communicate(timeout=100)
    assert second.returncode == 1
    assert "another pelton serve is running in" in err
    assert first.poll() is None
