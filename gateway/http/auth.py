"""API keys: who asks, and what that key may do."""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multidict import CIMultiDictProxy, MultiMapping

from shared.errors import AuthenticationError, ConfigurationError, PermissionDeniedError
from shared.settings import GatewaySettings

_REFUSAL = "The API key is missing or not known. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."


class Scope(enum.StrEnum):
    """What a route demands and a key grants; admin keys may do what inference keys may."""

    PUBLIC = "public"
    INFERENCE = "inference"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A known key, of which only the SHA-256 is kept."""

    digest: bytes
    name: str
    scope: Scope

    @classmethod
    def of(cls, key: str, scope: Scope, name: str = "") -> ApiKey:
        """Raises ConfigurationError when no HTTP header could carry the key."""
        if not key or not all("!" <= character <= "~" for character in key):
            raise ConfigurationError("an API key must be printable ASCII without spaces")
        digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, name or f"key-{digest.hex()[:12]}", scope)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks.

    Attributes:
        tenant: opaque name for fairness and limits.
        key_hash: SHA-256 of the key, from which the prefix cache's salt is derived; empty on an open server.
    """

    tenant: str
    scope: Scope
    key_hash: bytes


class KeyRing:
    """Decides who a request is from; with no keys at all everyone may use the inference routes."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def empty(self) -> bool:
        """Whether the server is open."""
        return not self._keys

    def authorize(self, scope: Scope, headers: CIMultiDictProxy[str]) -> Identity:
        """Raises AuthenticationError or PermissionDeniedError; decides on headers alone."""
        if scope is Scope.PUBLIC:
            return Identity("", Scope.PUBLIC, b"")
        if self.empty:
            if scope is Scope.ADMIN:
                raise PermissionDeniedError("This route needs an admin key, and the server has none configured.")
            return Identity("", Scope.INFERENCE, b"")
        key = self._find(_sent_key(headers))
        if scope is Scope.ADMIN and key.scope is not Scope.ADMIN:
            raise PermissionDeniedError("This route needs an admin key.")
        return Identity(key.name, key.scope, key.digest)

    def _find(self, token: bytes) -> ApiKey:
        # Every stored digest is compared, as bytes and in constant time: compare_digest raises on non-ASCII text.
        digest = hashlib.sha256(token).digest()
        found: ApiKey | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise AuthenticationError(_REFUSAL)
        return found


def _sent_key(headers: MultiMapping[str]) -> bytes:
    """The one key that a request names. Anthropic's clients send it as `x-api-key`, and some the bearer token besides;
    where there are two they must be the same, since what stands before this server may have looked at either."""
    sent = {_bearer_token(value) for value in headers.getall("Authorization", [])}
    sent |= {value.strip() for value in headers.getall("x-api-key", [])}
    key = sent.pop() if len(sent) == 1 else ""
    if not key or any(len(headers.getall(name, [])) > 1 for name in ("Authorization", "x-api-key")):
        raise AuthenticationError(_REFUSAL)
    return key.encode("utf-8", "surrogateescape")


def _bearer_token(value: str) -> str:
    """Empty where there is none."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def load_keys(settings: GatewaySettings) -> list[ApiKey]:
    """Keys from flags, environment and key file. Raises ConfigurationError; messages never hold a key."""
    keys = [ApiKey.of(key, Scope.INFERENCE) for key in settings.api_key]
    keys += [ApiKey.of(key, Scope.ADMIN) for key in settings.admin_api_key]
    if settings.api_key_file:
        from_file = list(_read_key_file(Path(settings.api_key_file)))
        if not from_file:
            # Without any key the server would be open, which nobody who names a file wants.
            raise ConfigurationError(f"--api-key-file {settings.api_key_file} has no keys")
        keys += from_file
    return list(_without_conflicts(keys))


def _read_key_file(path: Path) -> Iterable[ApiKey]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            yield _parse_key_line(words)
        except ConfigurationError as error:
            raise ConfigurationError(f"--api-key-file {path}, line {number}: {error}") from None


def _parse_key_line(words: list[str]) -> ApiKey:
    options = {"name": "", "scope": Scope.INFERENCE.value}
    for word in words[1:]:
        option, equals, value = word.partition("=")
        if not equals or option not in options:
            raise ConfigurationError("expected `KEY [name=NAME] [scope=inference|admin]`")
        options[option] = value
    if options["scope"] not in (Scope.INFERENCE, Scope.ADMIN):
        raise ConfigurationError("scope must be inference or admin")
    return ApiKey.of(words[0], Scope(options["scope"]), options["name"])


def _without_conflicts(keys: Iterable[ApiKey]) -> Iterable[ApiKey]:
    seen: dict[bytes, ApiKey] = {}
    for key in keys:
        earlier = seen.setdefault(key.digest, key)
        if earlier.scope is not key.scope:
            raise ConfigurationError(f"the same key is given with two scopes ({earlier.name} and {key.name})")
    return seen.values()
