"""Answers to registries' challenges: Basic, and Bearer tokens that are fetched, kept and renewed. In threads.

In: the challenges of a 401. Out: an Authorization header for that registry. Tokens are kept by repository and
scope until shortly before they expire. Concurrent refused requests share one new token.
Source: distribution.github.io/distribution/spec/auth, token.md and oauth.md.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from bootseer.errors import PermissionDenied, StorageError, StorageTimeout, Unavailable
from bootseer.storage.http.headers import parse_retry_after
from bootseer.storage.oci.credentials import Credentials, find_credentials, shown_files
from bootseer.storage.oci.headers import Challenge, parse_challenges
from bootseer.storage.oci.http import RegistryCall, RegistryHttp
from bootseer.storage.oci.options import RegistryOptions, RegistryPlace, is_loopback
from bootseer.storage.paths import HIDDEN, redact

MAX_TOKEN_BYTES = 64 << 10
TOKEN_S = 60.0  # lifetime of tokens without one
SHARE_USED = 0.9  # share of the lifetime in which a token is used
MAX_ATTEMPTS = 8  # of one request: no token, an expired one, new ones of other requests, its own
_TOKEN = re.compile(r"[!-~]+")
_CLIENT = "bootseer"


class Scope(NamedTuple):
    """The permissions that a request needs."""

    words: tuple[str, ...]  # repository:NAME:ACTIONS


def pull_scope(repository: str) -> Scope:
    return Scope((f"repository:{repository}:pull",))


def push_scope(repository: str, mount_from: str = "") -> Scope:
    """Return the scope of a push. `mount_from`: a repository whose blobs can be mounted instead of sent."""
    words = (f"repository:{repository}:pull,push",)
    return Scope((*words, f"repository:{mount_from}:pull") if mount_from else words)


class AuthAnswer(NamedTuple):
    """An Authorization header, "" for none."""

    header: str = ""
    turns: int = 0  # earlier ones of the same request
    is_new: bool = False  # made for this request

    def __repr__(self) -> str:
        return f"Answer(turns={self.turns}, is_new={self.is_new})"


class _Token(NamedTuple):
    text: str
    until_s: float  # time.monotonic()


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.challenge: Challenge | None = None  # the last
        self.credentials: Credentials | None = None
        self.is_looked_up = False
        self.tokens: dict[Scope, _Token] = {}


class RegistryAuth:
    """Authentication at registries. Thread-safe."""

    def __init__(self, http: RegistryHttp, options: RegistryOptions, *, timeout_s: float) -> None:
        self._http = http
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._registries: dict[tuple[str, str], _Registry] = {}

    def header(self, place: RegistryPlace, scope: Scope, call: RegistryCall) -> str:
        """Return the header to send at once, by the registry's last challenge; "" if there was none.

        Raises: PermissionDenied, ConfigError, StorageError.
        """
        registry = self._registry(place)
        challenge = registry.challenge
        if challenge is None:
            return ""
        with self._held(registry, place):
            found = self._current(registry, scope)
            if found or challenge.scheme == "basic":
                return found
            return self._make(registry, place, scope, challenge, call)

    def answer(
        self, place: RegistryPlace, scope: Scope, text: str, refused: AuthAnswer, call: RegistryCall
    ) -> AuthAnswer:
        """Return the answer to a 401 for `refused`, with the challenges `text`.

        Raises: PermissionDenied when no option is left; ConfigError, StorageError.
        """
        registry = self._registry(place)
        challenge = _choose(parse_challenges(text))
        if challenge is None:
            raise PermissionDenied(f"{place.name}: {place.host} answered 401 without a known challenge")
        with self._held(registry, place):
            registry.challenge = challenge
            current = self._current(registry, scope)
            if current and current != refused.header and refused.turns < MAX_ATTEMPTS:
                return AuthAnswer(current, refused.turns + 1, False)  # another thread was faster
            registry.tokens.pop(scope, None)
            if refused.is_new or (refused.header and challenge.scheme == "basic"):
                before, registry.is_looked_up = registry.credentials, False  # passwords of helpers expire too
                if refused.turns >= MAX_ATTEMPTS or self._look_up(registry, place) == before:
                    raise self._denied(registry, place)
            return AuthAnswer(self._make(registry, place, scope, challenge, call), refused.turns + 1, True)

    def denied(self, place: RegistryPlace) -> str:
        """Describe the credentials used, for the message of a refusal."""
        registry = self._registry(place)
        if registry.credentials is not None:
            return f"the password of {registry.credentials.source} does not allow it"
        return f"no password for {place.registry} in {shown_files(self._options.auth_files)}: docker login?"

    def hide(self, text: str) -> str:
        """Hide all known secrets in a text, in case a server repeats one."""
        with self._lock:
            registries = list(self._registries.values())
        for registry in registries:
            secrets = [token.text for token in registry.tokens.values()]
            if registry.credentials is not None:
                secrets += [registry.credentials.password, registry.credentials.identity_token]
            for secret in filter(None, secrets):
                text = text.replace(secret, HIDDEN)
        return text

    # ---- with the registry's lock held ---------------------------------------------------------------------

    def _current(self, registry: _Registry, scope: Scope) -> str:
        assert registry.challenge is not None
        if registry.challenge.scheme == "basic":
            return registry.credentials.basic if registry.credentials is not None else ""
        token = registry.tokens.get(scope)
        return f"Bearer {token.text}" if token is not None and time.monotonic() < token.until_s else ""

    def _make(
        self, registry: _Registry, place: RegistryPlace, scope: Scope, challenge: Challenge, call: RegistryCall
    ) -> str:
        credentials = self._look_up(registry, place)
        if challenge.scheme == "basic":
            if credentials is None or not (credentials.user or credentials.password):
                raise self._denied(registry, place)
            return credentials.basic
        token = self._fetch(registry, place, scope, challenge, credentials, call)
        registry.tokens[scope] = token
        return f"Bearer {token.text}"

    def _look_up(self, registry: _Registry, place: RegistryPlace) -> Credentials | None:
        if not registry.is_looked_up:
            registry.credentials = find_credentials(place, self._options.auth_files)
            registry.is_looked_up = True
        return registry.credentials

    def _denied(self, registry: _Registry, place: RegistryPlace) -> PermissionDenied:
        if registry.credentials is None:
            return PermissionDenied(
                f"{place.name}: {place.host} requires a password, or there is no such repository; none for"
                f" {place.registry} in {shown_files(self._options.auth_files)}: `docker login {place.registry}`"
            )
        return PermissionDenied(
            f"{place.name}: {place.host} refuses the password of {registry.credentials.source}, or there is no"
            f" such repository: `docker login {place.registry}`"
        )

    def _fetch(
        self,
        registry: _Registry,
        place: RegistryPlace,
        scope: Scope,
        challenge: Challenge,
        credentials: Credentials | None,
        call: RegistryCall,
    ) -> _Token:
        realm, service = challenge.params.get("realm", ""), challenge.params.get("service", "")
        shown = self._check_realm(realm, place)
        # The scope that the registry requests for this request, and Bootseer's own for later ones.
        wanted = [*scope.words, *(word for word in challenge.params.get("scope", "").split() if word)]
        fields = [("service", service)] if service else []
        if credentials is not None and credentials.identity_token:
            fields += [
                ("client_id", _CLIENT),
                ("grant_type", "refresh_token"),
                ("scope", " ".join(_unique(wanted))),
            ]
            body = urlencode([*fields, ("refresh_token", credentials.identity_token)]).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            exchange = self._http.send("POST", realm, headers, call, body)
        else:
            fields += [("scope", word) for word in _unique(wanted)]
            private = {"Authorization": credentials.basic} if credentials is not None else {}
            url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(fields)}"
            exchange = self._http.get("GET", url, {}, call, private=private).exchange
        answer = self._http.read(exchange, MAX_TOKEN_BYTES * 2, call)
        if exchange.status in (400, 401, 403, 404):
            raise self._denied(registry, place)
        if exchange.status != 200:
            wait_s = parse_retry_after(exchange.headers.get("Retry-After", ""), time.time())
            if exchange.status == 429 or exchange.status >= 500:
                raise Unavailable(f"{shown}: returned no token: status {exchange.status}", retry_after_s=wait_s)
            raise StorageError(f"{shown}: returned no token for {place.name}: status {exchange.status}")
        return _parse_token(answer, shown)

    def _check_realm(self, realm: str, place: RegistryPlace) -> str:
        """Return the realm for messages. Raises: StorageError for a realm that must not receive a password."""
        try:
            parts = urlsplit(realm)
            parts.port  # noqa: B018  (is a number)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise StorageError(f"{place.name}: {place.host} needs a token from {redact(realm)[:200]!r}, not a URL")
        if (
            parts.scheme == "http"
            and not is_loopback(parts.netloc)
            and parts.netloc not in self._options.plain_http
        ):
            raise StorageError(f"{place.name}: {place.host} needs a password sent to {redact(realm)} unencrypted")
        return redact(realm)

    # ---- locks ---------------------------------------------------------------------------------------------

    def _registry(self, place: RegistryPlace) -> _Registry:
        # Passwords may differ between repositories of one registry, so tokens do as well.
        with self._lock:
            return self._registries.setdefault((place.registry, place.repository), _Registry())

    @contextmanager
    def _held(self, registry: _Registry, place: RegistryPlace) -> Iterator[None]:
        """Let one thread at a time request a token; it has deadlines of its own."""
        if not registry.lock.acquire(timeout=4 * self._timeout_s):
            raise StorageTimeout(f"{place.name}: no token for {place.host} within {4 * self._timeout_s:g} s")
        try:
            yield
        finally:
            registry.lock.release()


def _choose(challenges: list[Challenge]) -> Challenge | None:
    """Prefer a token to sending the password each time."""
    for challenge in challenges:
        if challenge.scheme == "bearer" and challenge.params.get("realm"):
            return challenge
    return next((each for each in challenges if each.scheme == "basic"), None)


def _parse_token(body: bytes, shown: str) -> _Token:
    try:
        answer: Any = json.loads(body)
        text = answer.get("token") or answer.get("access_token")
        lasts_s = float(answer.get("expires_in") or TOKEN_S)
    except (ValueError, TypeError, AttributeError, RecursionError):
        text, lasts_s = None, 0.0
    if not isinstance(text, str) or len(text) > MAX_TOKEN_BYTES or not _TOKEN.fullmatch(text):
        raise StorageError(f"{shown}: its answer has no token")
    return _Token(text, time.monotonic() + max(0.0, min(lasts_s, 86400.0)) * SHARE_USED)


def _unique(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))
