"""One server for all clients of this folder, OpenAI's client, and Node's packages if Node is installed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.clients.answers import ANSWERS, KEY, pace
from tests.fakes.prepared_server import PreparedServer

NODE_FOLDER = Path(__file__).parent / "node"
MIN_NODE = 20


@pytest.fixture(scope="package")
def server() -> Iterator[PreparedServer]:
    """Run a server with the answers of tests.clients.answers; it requires KEY."""
    with PreparedServer(ANSWERS, flags=("--api-key", KEY), pace=pace) as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=30) as one:
        yield one


@pytest.fixture(scope="session")
def node() -> Callable[..., None]:
    """Return a function that runs a test file of the folder `node` with its arguments as environment variables."""
    executable, npm = shutil.which("node"), shutil.which("npm")
    if executable is None or npm is None:
        pytest.skip("node and npm are not on this machine")
    version = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)\.", version)
    if found is None or int(found[1]) < MIN_NODE:
        pytest.skip(f"node {MIN_NODE} or later is needed; this machine has {version.strip()}")
    _install(npm)

    def run(name: str, **environment: str) -> None:
        done = subprocess.run(
            [executable, "--test", "--test-reporter=spec", name],
            cwd=NODE_FOLDER,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, done.stdout.rpartition("failing tests:")[2] + done.stderr
        # A file without tests would also pass.
        assert re.search(r"^. pass [1-9]", done.stdout, re.MULTILINE), done.stdout

    return run


def _install(npm: str) -> None:
    """Run `npm ci` once per state of the lock file; a lock excludes concurrent test runs."""
    want = hashlib.sha256((NODE_FOLDER / "package-lock.json").read_bytes()).hexdigest()
    stamp = NODE_FOLDER / "node_modules" / "pelton-stamp"
    with (NODE_FOLDER / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != want:
            done = subprocess.run([npm, "ci"], cwd=NODE_FOLDER, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            stamp.write_text(want)
