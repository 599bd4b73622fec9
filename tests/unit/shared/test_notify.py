"""sd_notify and the supervisor's pipe."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from shared import notify


@pytest.fixture
def receiver(tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield receiver


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: notify.ready("serving on port 8000"), b"READY=1\nSTATUS=serving on port 8000"),
        (lambda: notify.stopping("drains"), b"STOPPING=1\nSTATUS=drains"),
        (lambda: notify.extend_timeout(2.5, "loading"), b"EXTEND_TIMEOUT_USEC=2500000\nSTATUS=loading"),
        (notify.watchdog, b"WATCHDOG=1"),
        # A line break makes no second assignment.
        (lambda: notify.notify(STATUS="a\nREADY=1"), b"STATUS=a READY=1"),
    ],
)
def test_messages(receiver, call, message):
    assert call()
    assert receiver.recv(1000) == message


def test_abstract_address(monkeypatch):
    name = f"pelton-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify.watchdog()
        assert receiver.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", ["", "vsock:1:2", "/nowhere/notify"])
def test_without_a_listener_nothing_happens(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert notify.ready("x") is False


def test_full_receiver_blocks_nobody(receiver):
    results = [notify.watchdog() for _ in range(5000)]
    assert results[0] is True
    assert results[-1] is False


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("x", None, None),
    ],
)
def test_watchdog_interval(monkeypatch, microseconds, pid, seconds):
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert notify.watchdog_interval() == seconds


def test_no_watchdog():
    assert notify.watchdog_interval() is None


def test_pipe_calls_when_the_supervisor_is_gone(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv(notify.SUPERVISOR_FD_VARIABLE, str(read))
    gone = threading.Event()
    thread = notify.watch_supervisor(gone.set)
    assert thread is not None
    os.write(write, b"noise is no end")
    assert not gone.wait(0.05)
    os.close(write)
    assert gone.wait(10)
    thread.join(10)
    os.close(read)


@pytest.mark.parametrize("value", [None, "", "x", "99999"])
def test_without_a_supervisor_there_is_nothing_to_watch(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv(notify.SUPERVISOR_FD_VARIABLE, value)
    assert notify.watch_supervisor(lambda: None) is None


def test_a_supervisor_is_given_the_reason_of_an_end_and_nothing_is_printed(receiver, monkeypatch, capsys):
    monkeypatch.setenv("PELTON_SUPERVISOR_FD", "7")
    notify.give_reason("pelton worker", "no such model\nREADY=1")
    assert receiver.recv(1000) == b"X_PELTON_REASON=no such model READY=1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lost", ["PELTON_SUPERVISOR_FD", "NOTIFY_SOCKET"])
def test_without_a_supervisor_that_listens_the_reason_is_printed(receiver, monkeypatch, capsys, lost):
    monkeypatch.setenv("PELTON_SUPERVISOR_FD", "7")
    monkeypatch.delenv(lost)
    notify.give_reason("pelton worker", "no such model")
    assert capsys.readouterr().err == "pelton worker: no such model\n"
    receiver.setblocking(False)
    with pytest.raises(BlockingIOError):
        receiver.recv(1000)
