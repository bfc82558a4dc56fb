"""Answers to registries' challenges: Basic, and Bearer tokens that are fetched, kept and renewed. In threads.

In: what a registry said with its 401. Out: an Authorization header for that registry. Tokens are kept by
repository and scope until shortly before they expire; many requests that are refused at once fetch one new token
together.
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
from bootseer.storage.oci_credentials import Credentials, find_credentials, shown_files
from bootseer.storage.oci_headers import Challenge, parse_challenges, parse_retry_after
from bootseer.storage.oci_http import Call, RegistryHttp
from bootseer.storage.oci_options import Place, RegistryOptions, is_loopback
from bootseer.storage.paths import HIDDEN, redact

MOST_TOKEN_BYTES = 64 << 10
TOKEN_S = 60.0  # how long tokens hold that do not say so
SHARE_USED = 0.9  # of that time they are used
MOST_TURNS = 8  # of one request: without a token, with one that has expired, with others' new ones, with its own
_TOKEN = re.compile(r"[!-~]+")
_CLIENT = "bootseer"


class Scope(NamedTuple):
    """What a request needs to be allowed to do."""

    words: tuple[str, ...]  # repository:NAME:ACTIONS


def pull_scope(repository: str) -> Scope:
    return Scope((f"repository:{repository}:pull",))


def push_scope(repository: str, mount_from: str = "") -> Scope:
    """`mount_from`: a repository whose blobs are to be had without sending them."""
    words = (f"repository:{repository}:pull,push",)
    return Scope((*words, f"repository:{mount_from}:pull") if mount_from else words)


class Answer(NamedTuple):
    """An Authorization header, "" for none."""

    header: str = ""
    turns: int = 0  # that came before it, of the same request
    is_new: bool = False  # it was made for this request

    def __repr__(self) -> str:
        return f"Answer(turns={self.turns}, is_new={self.is_new})"


class _Token(NamedTuple):
    text: str
    until_s: float  # time.monotonic()


class _Registry:
    """What is known of one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.challenge: Challenge | None = None  # the last
        self.credentials: Credentials | None = None
        self.is_looked_up = False
        self.tokens: dict[Scope, _Token] = {}


class RegistryAuth:
    """Thread-safe."""

    def __init__(self, http: RegistryHttp, options: RegistryOptions, *, timeout_s: float) -> None:
        self._http = http
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._registries: dict[tuple[str, str], _Registry] = {}

    def header(self, place: Place, scope: Scope, call: Call) -> str:
        """What to send at once, by what the registry wanted before; "" as long as it wanted nothing.

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

    def answer(self, place: Place, scope: Scope, text: str, refused: Answer, call: Call) -> Answer:
        """What to send instead of `refused`, to which the registry said 401 with the challenges `text`.

        Raises: PermissionDenied when nothing else is left; ConfigError, StorageError.
        """
        registry = self._registry(place)
        challenge = _choose(parse_challenges(text))
        if challenge is None:
            raise PermissionDenied(f"{place.name}: {place.host} says 401 and not how it wants to be asked")
        with self._held(registry, place):
            registry.challenge = challenge
            current = self._current(registry, scope)
            if current and current != refused.header and refused.turns < MOST_TURNS:
                return Answer(current, refused.turns + 1, False)  # somebody else was faster
            registry.tokens.pop(scope, None)
            if refused.is_new or (refused.header and challenge.scheme == "basic"):
                before, registry.is_looked_up = registry.credentials, False  # helpers' passwords expire too
                if refused.turns >= MOST_TURNS or self._look_up(registry, place) == before:
                    raise self._denied(registry, place)
            return Answer(self._make(registry, place, scope, challenge, call), refused.turns + 1, True)

    def denied(self, place: Place) -> str:
        """For the message of a refusal: who we were."""
        registry = self._registry(place)
        if registry.credentials is not None:
            return f"the password of {registry.credentials.source} does not allow it"
        return f"no password for {place.registry} in {shown_files(self._options.auth_files)}: docker login?"

    def hide(self, text: str) -> str:
        """The text without any secret that we know, should somebody repeat one."""
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

    def _make(self, registry: _Registry, place: Place, scope: Scope, challenge: Challenge, call: Call) -> str:
        credentials = self._look_up(registry, place)
        if challenge.scheme == "basic":
            if credentials is None or not (credentials.user or credentials.password):
                raise self._denied(registry, place)
            return credentials.basic
        token = self._fetch(registry, place, scope, challenge, credentials, call)
        registry.tokens[scope] = token
        return f"Bearer {token.text}"

    def _look_up(self, registry: _Registry, place: Place) -> Credentials | None:
        if not registry.is_looked_up:
            registry.credentials = find_credentials(place, self._options.auth_files)
            registry.is_looked_up = True
        return registry.credentials

    def _denied(self, registry: _Registry, place: Place) -> PermissionDenied:
        if registry.credentials is None:
            return PermissionDenied(
                f"{place.name}: {place.host} wants a password, or there is no such repository; none for"
                f" {place.registry} in {shown_files(self._options.auth_files)}: `docker login {place.registry}`"
            )
        return PermissionDenied(
            f"{place.name}: {place.host} refuses the password of {registry.credentials.source}, or there is no"
            f" such repository: `docker login {place.registry}`"
        )

    def _fetch(
        self,
        registry: _Registry,
        place: Place,
        scope: Scope,
        challenge: Challenge,
        credentials: Credentials | None,
        call: Call,
    ) -> _Token:
        realm, service = challenge.params.get("realm", ""), challenge.params.get("service", "")
        shown = self._check_realm(realm, place)
        # The registry's word on what is needed for this request, and ours for the ones to come.
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
        answer = self._http.read(exchange, MOST_TOKEN_BYTES * 2, call)
        if exchange.status in (400, 401, 403, 404):
            raise self._denied(registry, place)
        if exchange.status != 200:
            wait_s = parse_retry_after(exchange.headers.get("Retry-After", ""), time.time())
            if exchange.status == 429 or exchange.status >= 500:
                raise Unavailable(f"{shown}: gives no token, it says {exchange.status}", retry_after_s=wait_s)
            raise StorageError(f"{shown}: gives no token for {place.name}, it says {exchange.status}")
        return _parse_token(answer, shown)

    def _check_realm(self, realm: str, place: Place) -> str:
        """The realm as it may be shown. Raises: StorageError for one that a password must not be sent to."""
        try:
            parts = urlsplit(realm)
            parts.port  # noqa: B018  (is a number)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise StorageError(f"{place.name}: {place.host} wants a token from {redact(realm)[:200]!r}, no URL")
        if (
            parts.scheme == "http"
            and not is_loopback(parts.netloc)
            and parts.netloc not in self._options.plain_http
        ):
            raise StorageError(f"{place.name}: {place.host} wants a password sent to {redact(realm)} unencrypted")
        return redact(realm)

    # ---- locks ---------------------------------------------------------------------------------------------

    def _registry(self, place: Place) -> _Registry:
        # Passwords may differ between repositories of one registry, so tokens do as well.
        with self._lock:
            return self._registries.setdefault((place.registry, place.repository), _Registry())

    @contextmanager
    def _held(self, registry: _Registry, place: Place) -> Iterator[None]:
        """One at a time asks for a token; it has deadlines of its own."""
        if not registry.lock.acquire(timeout=4 * self._timeout_s):
            raise StorageTimeout(f"{place.name}: no token for {place.host} within {4 * self._timeout_s:g} s")
        try:
            yield
        finally:
            registry.lock.release()


def _choose(challenges: list[Challenge]) -> Challenge | None:
    """A token rather than the password each time."""
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
    if not isinstance(text, str) or len(text) > MOST_TOKEN_BYTES or not _TOKEN.fullmatch(text):
        raise StorageError(f"{shown}: its answer has no token")
    return _Token(text, time.monotonic() + max(0.0, min(lasts_s, 86400.0)) * SHARE_USED)


def _unique(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))
