"""API keys from flags and files, and loopback hosts."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.auth import ApiKey, KeyRing, Scope, load_keys
from gateway.middleware import is_loopback_host
from shared.errors import AuthenticationError, ConfigurationError
from shared.settings import GatewaySettings


def headers(*pairs):
    return CIMultiDictProxy(CIMultiDict(pairs))


def test_a_key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# comment\n\n sk-a \nsk-b name=bob\nsk-c scope=admin name=root\n")
    settings = GatewaySettings(api_key=("sk-d",), admin_api_key=("sk-e",), api_key_file=str(path))
    keys = {key.digest: key for key in load_keys(settings)}
    assert len(keys) == 5
    ring = KeyRing(list(keys.values()))
    assert ring.authorize(Scope.INFERENCE, headers(("Authorization", "Bearer sk-b"))).tenant == "bob"
    for token in ("sk-c", "sk-e"):
        assert ring.authorize(Scope.ADMIN, headers(("authorization", f"bearer {token}"))).scope is Scope.ADMIN
    assert "sk-" not in repr(keys)
    with pytest.raises(ConfigurationError, match="two scopes"):
        load_keys(GatewaySettings(api_key=("sk-a",), admin_api_key=("sk-a",)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((line, "line 2") for line in ("sk-a b", "sk-a name", "sk-a scope=king", "sk-a colour=red", "sk-\u00e9")),
        # A server must not start without keys because its file is empty.
        ("# sk-commented-out\n", "has no keys"),
    ],
)
def test_a_malformed_key_file_is_refused_without_repeating_a_key(tmp_path, line, words):
    path = tmp_path / "keys"
    path.write_text(f"# ok\n{line}\n")
    with pytest.raises(ConfigurationError, match=words) as refused:
        load_keys(GatewaySettings(api_key_file=str(path)))
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer \u00e9", "Bearer \udcff", "Bearer sk-", "Digest sk-a", "sk-a"])
def test_no_header_value_is_an_exception_other_than_401(value):
    ring = KeyRing([ApiKey.of("sk-a", Scope.INFERENCE)])
    with pytest.raises(AuthenticationError):
        ring.authorize(Scope.INFERENCE, headers(("Authorization", value)))
    with pytest.raises(AuthenticationError):
        ring.authorize(Scope.INFERENCE, headers(("Authorization", "Bearer sk-a"), ("Authorization", "Bearer sk-a")))


def test_loopback_hosts():
    for host in ("localhost", "localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:80", "a.localhost"):
        assert is_loopback_host(host)
    for host in (
        *("", "evil", "127.0.0.1.evil.example", "[::2]", "0.0.0.0"),
        *("localhost/x", "localhost?", "::1", "127.0.0.1:x"),
    ):
        assert not is_loopback_host(host)
