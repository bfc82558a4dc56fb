"""Who we are at a registry: the files of `docker login` and `podman login`, and their helper programs.

In: a registry. Out: a user with a password, an identity token, or nothing. Passwords come from helpers through
pipes only, and get into no message. Blocking: for threads. Source: docker's config.json, containers-auth.json(5).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bootseer.errors import ConfigError
from bootseer.storage.oci_options import Place
from bootseer.storage.oci_reference import DOCKER_HUB

HELPER_TIMEOUT_S = 30.0
MOST_FILE_BYTES = 1 << 20
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_USER = "<token>"  # what helpers call the owner of an identity token


class Credentials(NamedTuple):
    """A user and a password, or an identity token that is exchanged for others. Never shown."""

    user: str
    password: str
    identity_token: str
    source: str  # the file or helper that they are from, for messages

    @property
    def basic(self) -> str:
        """For an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")

    def __repr__(self) -> str:
        return f"Credentials(from {self.source})"


def find_credentials(place: Place, files: Sequence[str]) -> Credentials | None:
    """Those of the first file that knows the registry; None when nobody does.

    Raises: ConfigError for a file that cannot be read or understood, and for a helper that fails.
    """
    for path in files:
        config = _read(path)
        if config is not None and (found := _of_file(place, config, path)) is not None:
            return found
    return None


def _of_file(place: Place, config: dict[str, Any], path: str) -> Credentials | None:
    keys = list(_keys(place))
    auths, helpers = _mapping(config, "auths", path), _mapping(config, "credHelpers", path)
    for key in keys:
        if key in helpers:
            return _ask_helper(str(helpers[key]), key, path)
    entries = [(key, auths[key]) for key in keys if isinstance(auths.get(key), dict) and auths[key]]
    for key, entry in entries:
        if (found := _of_entry(entry, key, path)) is not None:
            return found
    store = config.get("credsStore")
    if isinstance(store, str) and store:
        # The helper of all registries is asked by the name that `docker login` has noted, if it has.
        noted = [key for key in keys if key in auths]
        return _ask_helper(store, (noted or [_server_key(place)])[0], path)
    return None


def _keys(place: Place) -> Iterator[str]:
    """What the registry is called in such files, the most particular name first."""
    names = []
    parts = place.repository.split("/")
    names = [f"{place.registry}/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)]
    names.append(place.registry)
    if place.registry == DOCKER_HUB:
        names += [_HUB_KEY, "index.docker.io", "registry-1.docker.io"]
    yield from names
    for name in names[:]:  # docker writes what was typed, at times with all of the URL
        if "://" not in name:
            yield from (f"https://{name}", f"http://{name}", f"https://{name}/v1/", f"https://{name}/v2/")


def _server_key(place: Place) -> str:
    return _HUB_KEY if place.registry == DOCKER_HUB else place.registry


def _of_entry(entry: dict[str, Any], key: str, path: str) -> Credentials | None:
    user, password = entry.get("username", ""), entry.get("password", "")
    token, packed = entry.get("identitytoken", ""), entry.get("auth", "")
    if not all(isinstance(each, str) for each in (user, password, token, packed)):
        raise ConfigError(f"{path}: what it has for {key} is not as docker writes it: log in again")
    if packed and not (user and password):
        try:
            user, colon, password = base64.b64decode(packed, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            # Not chained: the error may hold the password.
            raise ConfigError(f"{path}: `auth` of {key} is not USER:PASSWORD in base64: log in again") from None
        if not colon:
            raise ConfigError(f"{path}: `auth` of {key} has no password: log in again")
        password = password.rstrip("\0")
    if not (token or user or password):
        return None
    return Credentials(user, password, token, path)


def _ask_helper(name: str, key: str, path: str) -> Credentials | None:
    """The answer of `docker-credential-NAME get`; None when it knows nothing of the registry."""
    if not _HELPER.fullmatch(name):
        raise ConfigError(f"{path}: {name[:80]!r} is no name of a credential helper")
    program = f"docker-credential-{name}"
    by_hand = f"try `echo {key} | {program} get`"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=HELPER_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: wants {program} for {key}, which is not installed (PATH)") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program}: no answer about {key} within {HELPER_TIMEOUT_S:g} s: {by_hand}") from None
    except OSError as error:
        raise ConfigError(f"{program}: cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        # Its own words, the same in all helpers (docker-credential-helpers, credentials/error.go).
        if b"credentials not found" in done.stdout:
            return None
        raise ConfigError(f"{program}: failed for {key} with exit status {done.returncode}: {by_hand}")
    try:
        answer = json.loads(done.stdout)
        user, secret = answer["Username"], answer["Secret"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{program}: its answer about {key} is not understood: {by_hand}") from None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise ConfigError(f"{program}: its answer about {key} is not understood: {by_hand}")
    if user == _NO_USER:
        return Credentials("", "", secret, program)
    return Credentials(user, secret, "", program) if user or secret else None


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: passwords of registries cannot be read ({error.strerror})") from error
    try:
        config = json.loads(data) if len(data) <= MOST_FILE_BYTES else None
    except (ValueError, RecursionError):
        config = None  # the error would show what is in the file
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is no JSON object of registries' passwords: log in again")
    return config


def _mapping(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} is no object")
    return found


def shown_files(files: Sequence[str]) -> str:
    """For messages: where was looked."""
    there = [path for path in files if os.path.exists(path)]
    return " and ".join(there or files)
