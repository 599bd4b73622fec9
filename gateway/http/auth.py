"""API keys: authentication and the scope of each key."""

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

_REFUSAL = "The API key is missing or unknown. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."


class Scope(enum.StrEnum):
    """Permission that a route requires and a key grants. Admin keys include the inference scope."""

    PUBLIC = "public"
    INFERENCE = "inference"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Configured key. Only its SHA-256 digest is kept."""

    digest: bytes
    name: str
    scope: Scope

    @classmethod
    def of(cls, key: str, scope: Scope, name: str = "") -> ApiKey:
        """Return the key with a digest of its text.

        Raises:
            ConfigurationError: An HTTP header cannot carry the key.
        """
        if not key or not all("!" <= character <= "~" for character in key):
            raise ConfigurationError("an API key must be printable ASCII without spaces")
        digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, name or f"key-{digest.hex()[:12]}", scope)


@dataclass(frozen=True, slots=True)
class Identity:
    """Authenticated client.

    Attributes:
        tenant: Opaque name for fairness and limits.
        key_hash: SHA-256 of the key, from which the salt of the prefix cache is derived; empty on an open server.
    """

    tenant: str
    scope: Scope
    key_hash: bytes


class KeyRing:
    """All configured keys. Without keys, everyone may use the inference routes."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def empty(self) -> bool:
        """True if the server has no keys and is open."""
        return not self._keys

    def authorize(self, scope: Scope, headers: CIMultiDictProxy[str]) -> Identity:
        """Return the identity of a client from its headers alone.

        Raises:
            AuthenticationError: The key is missing or unknown.
            PermissionDeniedError: The key lacks the scope.
        """
        if scope is Scope.PUBLIC:
            return Identity("", Scope.PUBLIC, b"")
        if self.empty:
            if scope is Scope.ADMIN:
                raise PermissionDeniedError(
                    "This route needs an admin key, and the server has no admin key. Start it with --admin-api-key."
                )
            return Identity("", Scope.INFERENCE, b"")
        key = self._find(_sent_key(headers))
        if scope is Scope.ADMIN and key.scope is not Scope.ADMIN:
            raise PermissionDeniedError(
                "This route needs an admin key; the key of this request has the scope inference."
            )
        return Identity(key.name, key.scope, key.digest)

    def _find(self, token: bytes) -> ApiKey:
        # Compare with every stored digest, as bytes and in constant time. compare_digest raises an error on non-ASCII
        # text.
        digest = hashlib.sha256(token).digest()
        found: ApiKey | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        if found is None:
            raise AuthenticationError(_REFUSAL)
        return found


def _sent_key(headers: MultiMapping[str]) -> bytes:
    """Return the one key that a request names.

    Anthropic's clients send it as `x-api-key`, and some also send a bearer token. Two values must be equal, because a
    proxy in front of this server may have checked either of them.
    """
    sent = {_bearer_token(value) for value in headers.getall("Authorization", [])}
    sent |= {value.strip() for value in headers.getall("x-api-key", [])}
    key = sent.pop() if len(sent) == 1 else ""
    if not key or any(len(headers.getall(name, [])) > 1 for name in ("Authorization", "x-api-key")):
        raise AuthenticationError(_REFUSAL)
    return key.encode("utf-8", "surrogateescape")


def _bearer_token(value: str) -> str:
    """Return the bearer token, or an empty string."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def load_keys(settings: GatewaySettings) -> list[ApiKey]:
    """Load keys from flags, environment and key file.

    Raises:
        ConfigurationError: A key cannot be used. The message never contains a key.
    """
    keys = [ApiKey.of(key, Scope.INFERENCE) for key in settings.api_key]
    keys += [ApiKey.of(key, Scope.ADMIN) for key in settings.admin_api_key]
    if settings.api_key_file:
        from_file = list(_read_key_file(Path(settings.api_key_file)))
        if not from_file:
            # A file without keys would leave the server open, which cannot be intended.
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
            raise ConfigurationError(
                f"the same key has two scopes ({earlier.name} and {key.name}); give each key one scope"
            )
    return seen.values()
