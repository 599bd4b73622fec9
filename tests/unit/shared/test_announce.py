"""What `pelton serve` prints when it answers."""

from __future__ import annotations

import http.server
import json
import shlex
import threading

import pytest

from shared import supervisor
from shared.settings import ServeSettings


class _Server(http.server.BaseHTTPRequestHandler):
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_greets_once_ready_answers_200(port, capsys):
    _Server.num_refusals = 2
    supervisor.announce_when_ready(ServeSettings(port=port, host="0.0.0.0"), threading.Event())
    shown = capsys.readouterr().out
    assert _Server.num_refusals == 0
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
    _Server.num_refusals = 0
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
