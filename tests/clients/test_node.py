"""Clients on Node: OpenAI's, Anthropic's and the Vercel AI SDK. Their tests are in the folder `node`."""

from __future__ import annotations

import json

import pytest

from tests.clients.answers import ANSWERS, HELLO, KEY, PERSON, WEATHER, pace
from tests.clients.conftest import NODE_FOLDER
from tests.fakes.prepared_server import MODEL, PreparedServer

EXPECTED = {"MODEL": MODEL, "HELLO": HELLO, "WEATHER": json.dumps(WEATHER), "PERSON": json.dumps(PERSON)}

# The first test may install Node's packages.
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("name", ["openai", "responses", "anthropic", "ai_sdk", "ai_anthropic", "ai_responses"])
def test_client(node, server, name):
    node(f"{name}.test.mjs", SERVER=server.url, KEY=KEY, **EXPECTED)


def test_retries(node):
    with PreparedServer(ANSWERS, flags=("--max-waiting-requests", "1"), max_num_seqs=1, pace=pace) as busy:
        node("retries.test.mjs", SERVER=busy.url, **EXPECTED)


def test_every_package_is_pinned():
    """The lock file has no download addresses, so that each machine uses its own registry."""
    wanted = json.loads((NODE_FOLDER / "package.json").read_text("utf-8"))["dependencies"]
    packages = json.loads((NODE_FOLDER / "package-lock.json").read_text("utf-8"))["packages"]
    for name, version in wanted.items():
        assert packages[f"node_modules/{name}"]["version"] == version
    for name, package in packages.items():
        assert "resolved" not in package and (not name or package["integrity"].startswith("sha512-"))
