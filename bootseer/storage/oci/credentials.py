"""Credentials for registries: the files of `docker login` and `podman login`, and credential helpers.

In: a registry. Out: a user with a password, an identity token, or None. Helpers send passwords through pipes only;
no message contains one. Blocking: for threads. Source: docker's config.json, containers-auth.json(5).
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
from bootseer.linux.child_processes import run_limited
from bootseer.storage.oci.options import RegistryPlace
from bootseer.storage.oci.reference import DOCKER_HUB

HELPER_TIMEOUT_S = 30.0
MAX_FILE_BYTES = 1 << 20
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_USER = "<token>"  # the user name that helpers return for an identity token


class Credentials(NamedTuple):
    """A user and a password, or an identity token that is exchanged for others. Never logged."""

    user: str
    password: str
    identity_token: str
    source: str  # their file or helper, for messages

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")

    def __repr__(self) -> str:
        return f"Credentials(from {self.source})"


def find_credentials(place: RegistryPlace, files: Sequence[str]) -> Credentials | None:
    """Return the credentials of the first file that knows the registry; None if there are none.

    Raises: ConfigError for an unreadable or invalid file, and for a helper that fails.
    """
    for path in files:
        config = _read(path)
        if config is not None and (found := _of_file(place, config, path)) is not None:
            return found
    return None


def _of_file(place: RegistryPlace, config: dict[str, Any], path: str) -> Credentials | None:
    keys = list(_keys(place))
    auths, helpers = _mapping(config, "auths", path), _mapping(config, "credHelpers", path)
    for key in keys:
        if key in helpers:
            return _run_helper(str(helpers[key]), key, path)
    entries = [(key, auths[key]) for key in keys if isinstance(auths.get(key), dict) and auths[key]]
    for key, entry in entries:
        if (found := _of_entry(entry, key, path)) is not None:
            return found
    store = config.get("credsStore")
    if isinstance(store, str) and store:
        # The helper of all registries expects the name that `docker login` has stored, if any.
        noted = [key for key in keys if key in auths]
        return _run_helper(store, (noted or [_server_key(place)])[0], path)
    return None


def _keys(place: RegistryPlace) -> Iterator[str]:
    """Yield the registry's names in such files, most specific first."""
    names = []
    parts = place.repository.split("/")
    names = [f"{place.registry}/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)]
    names.append(place.registry)
    if place.registry == DOCKER_HUB:
        names += [_HUB_KEY, "index.docker.io", "registry-1.docker.io"]
    yield from names
    for name in names[:]:  # docker stores the name as it was typed, at times as a whole URL
        if "://" not in name:
            yield from (f"https://{name}", f"http://{name}", f"https://{name}/v1/", f"https://{name}/v2/")


def _server_key(place: RegistryPlace) -> str:
    return _HUB_KEY if place.registry == DOCKER_HUB else place.registry


def _of_entry(entry: dict[str, Any], key: str, path: str) -> Credentials | None:
    user, password = entry.get("username", ""), entry.get("password", "")
    token, packed = entry.get("identitytoken", ""), entry.get("auth", "")
    if not all(isinstance(each, str) for each in (user, password, token, packed)):
        raise ConfigError(f"{path}: the entry of {key} is not as docker writes it: log in again")
    if packed and not (user and password):
        try:
            user, colon, password = base64.b64decode(packed, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            # Not chained: the error may contain the password.
            raise ConfigError(f"{path}: `auth` of {key} is not USER:PASSWORD in base64: log in again") from None
        if not colon:
            raise ConfigError(f"{path}: `auth` of {key} has no password: log in again")
        password = password.rstrip("\0")
    if not (token or user or password):
        return None
    return Credentials(user, password, token, path)


def _run_helper(name: str, key: str, path: str) -> Credentials | None:
    """Return the answer of `docker-credential-NAME get`; None when it has no credentials for the registry."""
    if not _HELPER.fullmatch(name):
        raise ConfigError(f"{path}: {name[:80]!r} is not a name of a credential helper")
    program = f"docker-credential-{name}"
    by_hand = f"try `echo {key} | {program} get`"
    try:
        done = run_limited([program, "get"], timeout_s=HELPER_TIMEOUT_S, data=key.encode())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: needs {program} for {key}, which is not installed (PATH)") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program}: no answer about {key} within {HELPER_TIMEOUT_S:g} s: {by_hand}") from None
    except OSError as error:
        raise ConfigError(f"{program}: cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        # The helpers' common text (docker-credential-helpers, credentials/error.go).
        if b"credentials not found" in done.stdout:
            return None
        raise ConfigError(f"{program}: failed for {key} with exit status {done.returncode}: {by_hand}")
    try:
        answer = json.loads(done.stdout)
        user, secret = answer["Username"], answer["Secret"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{program}: invalid answer for {key}: {by_hand}") from None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise ConfigError(f"{program}: invalid answer for {key}: {by_hand}")
    if user == _NO_USER:
        return Credentials("", "", secret, program)
    return Credentials(user, secret, "", program) if user or secret else None


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: passwords of registries cannot be read ({error.strerror})") from error
    try:
        config = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        config = None  # the error would show the contents of the file
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is not a JSON object of registry credentials: log in again")
    return config


def _mapping(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} is not an object")
    return found


def shown_files(files: Sequence[str]) -> str:
    """Return the files that were searched, for messages."""
    there = [path for path in files if os.path.exists(path)]
    return " and ".join(there or files)
