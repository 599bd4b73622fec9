"""Permissions of the runtime directory, endpoints, and socket options."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time

import pytest
import zmq

from shared import sockets
from shared.errors import ConfigurationError
from shared.messages import MAX_MESSAGE_BYTES


class Plane:
    """Factory of Pelton's sockets that closes them after the test."""

    def __init__(self):
        self.context = zmq.Context()
        self._open = []

    def router(self, endpoint):
        self._open.append(sockets.make_router(self.context, endpoint))
        return self._open[-1]

    def dealer(self, endpoint, identity):
        self._open.append(sockets.make_dealer(self.context, endpoint, identity))
        return self._open[-1]

    def close(self):
        for one in self._open:
            one.close()
        self.context.term()


@pytest.fixture
def endpoint(tmp_path):
    return sockets.worker_endpoint(tmp_path, 0, "0123abcd")


@pytest.fixture
def plane():
    plane = Plane()
    yield plane
    plane.close()


def test_runtime_dir_is_made_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = sockets.runtime_dir(str(tmp_path / "a"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert sockets.runtime_dir(str(path)) == path


def test_default_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.runtime_dir() == tmp_path / "pelton"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(sockets._default_runtime_dir()) == f"/tmp/pelton-{os.getuid()}"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777, 0o500])
def test_directory_that_is_not_its_owners_alone_is_refused(tmp_path, mode):
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}"):
        sockets.runtime_dir(str(path))


def test_directory_that_cannot_be_private_is_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    # The last path is too long for a socket and must not be made.
    for name, words in (("link", "not a directory"), ("file", "cannot be made"), ("x" * 100, "too long")):
        with pytest.raises(ConfigurationError, match=words):
            sockets.runtime_dir(str(tmp_path / name))
    assert not (tmp_path / ("x" * 100)).exists()
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="belongs to user"):
        sockets.runtime_dir(str(tmp_path / "real"))


def test_endpoints_are_listed_oldest_first_and_others_ignored(tmp_path):
    endpoints = [sockets.worker_endpoint(tmp_path, index, "0123abcd") for index in (3, 1)]
    held = []
    for age, endpoint in enumerate(endpoints):
        path = endpoint.removeprefix("ipc://")
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].bind(path)
        os.utime(path, (age, age))
    (tmp_path / "worker-1-00000000.sock").touch()
    (tmp_path / "other.sock").touch()
    assert sockets.list_worker_endpoints(tmp_path) == endpoints
    assert [sockets.parse_endpoint(endpoint) for endpoint in endpoints] == [(3, "0123abcd"), (1, "0123abcd")]
    assert sockets.parse_endpoint("tcp://127.0.0.1:5555") is None
    assert sockets.remove_stale(tmp_path, 3) == ["worker-3-0123abcd.sock"]
    assert sockets.list_worker_endpoints(tmp_path) == endpoints[1:]
    assert sockets.list_worker_endpoints(tmp_path / "nowhere") == []
    for one in held:
        one.close()


@pytest.mark.parametrize(("index", "epoch"), [(0, "../../xy"), (0, "0123ABCD"), (-1, "0123abcd"), (0, "0123abc")])
def test_names_that_are_not_ours_are_refused(tmp_path, index, epoch):
    with pytest.raises(ConfigurationError):
        sockets.worker_endpoint(tmp_path, index, epoch)


def test_router_and_dealer_talk_with_the_agreed_options(endpoint, plane):
    router = plane.router(endpoint)
    dealer = plane.dealer(endpoint, b"gateway-1")
    dealer.send(b"hello", zmq.NOBLOCK)
    assert router.poll(5000)
    assert router.recv_multipart() == [b"gateway-1", b"hello"]
    router.send_multipart([b"gateway-1", b"welcome"], zmq.NOBLOCK)
    assert dealer.poll(5000)
    assert dealer.recv_multipart() == [b"welcome"]
    for one in (router, dealer):
        assert one.getsockopt(zmq.LINGER) == 0
        assert one.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
        assert one.getsockopt(zmq.SNDHWM) == one.getsockopt(zmq.RCVHWM) == sockets.HIGH_WATER_MARK
        assert one.getsockopt(zmq.IPV6) == 0


def test_sending_to_a_peer_that_is_not_there_is_an_error(endpoint, plane):
    router = plane.router(endpoint)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == errno.EHOSTUNREACH


def test_a_gateway_that_comes_again_takes_its_name_over(endpoint, plane):
    router = plane.router(endpoint)
    for word in (b"first", b"second"):
        dealer = plane.dealer(endpoint, b"gateway-1")
        dealer.send(word)
        assert router.poll(5000)
        assert router.recv_multipart() == [b"gateway-1", word]
    router.send_multipart([b"gateway-1", b"answer"], zmq.NOBLOCK)
    assert dealer.poll(5000)


def test_message_over_the_limit_ends_the_connection_not_the_worker(endpoint, plane, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    router = plane.router(endpoint)
    bad, good = (plane.dealer(endpoint, name) for name in (b"bad", b"good"))
    bad.send(b"x" * 1001)
    time.sleep(0.05)
    good.send(b"fine")
    assert router.poll(5000)
    assert router.recv_multipart() == [b"good", b"fine"]


def test_bad_endpoints_are_configuration_errors(plane):
    with pytest.raises(ConfigurationError, match="cannot be bound"):
        plane.router("ipc:///nowhere/at/all.sock")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        plane.dealer("carrier-pigeon://here", b"g")
