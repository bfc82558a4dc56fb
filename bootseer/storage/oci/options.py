"""Options for registries: certificates, mirrors, plain HTTP, credential files. Reads the environment.

`read_options` merges options of `open_store` and the environment into a RegistryOptions; options take precedence.

| variable | option | meaning |
|---|---|---|
| `BOOTSEER_REGISTRY_MIRRORS` | `mirrors` | `PREFIX=MIRROR[,PREFIX=MIRROR ...]`: read there first |
| `BOOTSEER_REGISTRY_PLAIN_HTTP` | `plain_http` | `HOST[:PORT][,...]` that may be accessed without TLS |
| `BOOTSEER_REGISTRY_CA` | `ca_file` | certificates to trust beside the system's (SSL_CERT_FILE) |
| `REGISTRY_AUTH_FILE` | `auth_file` | instead of the files of podman and docker (`DOCKER_CONFIG`) |
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.storage.oci.reference import Reference, check_repository, parse_registry

CERTS_DIRECTORIES = ("/etc/containers/certs.d", "/etc/docker/certs.d")
_NONE: Mapping[str, object] = {}
_NAMES = ("auth_file", "ca_file", "certs_folders", "mirrors", "plain_http")


class RegistryPlace(NamedTuple):
    """A registry or mirror from which a repository can be read."""

    host: str  # as in a URL
    registry: str  # its name in credential files and certificate directories
    repository: str
    is_mirror: bool = False

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"


class RegistryOptions(NamedTuple):
    """Settings for registries, made by `read_options`."""

    mirrors: tuple[tuple[str, str], ...] = ()  # prefix of registry/repository, and its replacement
    plain_http: frozenset[str] = frozenset()  # hosts with their ports
    ca_file: str = ""
    auth_files: tuple[str, ...] = ()  # the first one that knows a registry counts
    certs_folders: tuple[str, ...] = CERTS_DIRECTORIES  # of HOST[:PORT]/*.crt, as in docker and podman


def read_options(
    options: Mapping[str, object] = _NONE, *, environ: Mapping[str, str] | None = None
) -> RegistryOptions:
    """Read the options of a store, else the environment.

    Raises: ConfigError for unknown options and invalid values.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(set(options) - set(_NAMES))
    if unknown:
        raise ConfigError(f"registries: unknown options {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    auth_file = _text(options, "auth_file") or environ.get("REGISTRY_AUTH_FILE", "")
    directories = options.get("certs_folders")
    return RegistryOptions(
        mirrors=_mirrors(options.get("mirrors", environ.get("BOOTSEER_REGISTRY_MIRRORS", ""))),
        plain_http=_hosts(options.get("plain_http", environ.get("BOOTSEER_REGISTRY_PLAIN_HTTP", ""))),
        ca_file=_text(options, "ca_file") or environ.get("BOOTSEER_REGISTRY_CA", ""),
        auth_files=(auth_file,) if auth_file else _auth_files(environ),
        certs_folders=_certs_directories(environ)
        if directories is None
        else tuple(_words(directories, "certs_folders")),
    )


def places_of(reference: Reference, options: RegistryOptions) -> list[RegistryPlace]:
    """Return the sources of a repository: its mirrors in order, then the registry itself."""
    found = [_mirror_place(reference, prefix, mirror) for prefix, mirror in _matching(reference, options.mirrors)]
    return [*found, origin_of(reference)]


def origin_of(reference: Reference) -> RegistryPlace:
    """Return the place to which the repository is written."""
    return RegistryPlace(reference.host, reference.registry, reference.repository)


def is_loopback(host: str) -> bool:
    """Return whether HOST or HOST:PORT is this machine, by its name alone."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name in ("localhost", "::1") or name.endswith(".localhost") or _is_ipv4_loopback(name)


def _is_ipv4_loopback(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdigit() and int(part) < 256 for part in parts)


def _matching(reference: Reference, mirrors: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the mirrors of the longest matching prefix."""
    fitting = [each for each in mirrors if f"{reference.name}/".startswith(each[0] + "/")]
    longest = max((len(prefix) for prefix, _ in fitting), default=0)
    return [each for each in fitting if len(each[0]) == longest]


def _mirror_place(reference: Reference, prefix: str, mirror: str) -> RegistryPlace:
    rest = reference.name.removeprefix(prefix).strip("/")
    host, _, below = mirror.partition("/")
    repository = "/".join(filter(None, [below, rest]))
    there = Reference(host, repository)
    return RegistryPlace(there.host, host, repository, is_mirror=True)


def _mirrors(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping):
        pairs = [(str(prefix), mirror) for prefix, each in value.items() for mirror in _words(each, "mirrors")]
    else:
        pairs = []
        for word in _words(value, "mirrors"):
            prefix, mark, mirror = word.partition("=")
            if not mark:
                raise ConfigError(
                    f"registries: mirrors: {word!r} is not PREFIX=MIRROR, such as docker.io=mirror.example"
                )
            pairs.append((prefix, mirror))
    return tuple((_name(prefix), _name(mirror)) for prefix, mirror in pairs)


def _name(text: str) -> str:
    """Return a registry, optionally with the beginning of a repository's name, in its normal form."""
    text = text.strip().rstrip("/")
    host, slash, below = text.partition("/")
    registry = parse_registry(host, text)
    return f"{registry}/{check_repository(below, text)}" if slash else registry


def _hosts(value: object) -> frozenset[str]:
    return frozenset(parse_registry(word) for word in _words(value, "plain_http"))


def _auth_files(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files of podman and skopeo, then docker's; missing ones are ignored."""
    home = environ.get("HOME") or os.path.expanduser("~")
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    files = [os.path.join(runtime, "containers", "auth.json")] if runtime else []
    files.append(os.path.join(config, "containers", "auth.json"))
    files.append(os.path.join(environ.get("DOCKER_CONFIG") or os.path.join(home, ".docker"), "config.json"))
    return tuple(files)


def _certs_directories(environ: Mapping[str, str]) -> tuple[str, ...]:
    home = environ.get("HOME") or os.path.expanduser("~")
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return (os.path.join(config, "containers", "certs.d"), *CERTS_DIRECTORIES)


def _text(options: Mapping[str, object], name: str) -> str:
    value = options.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"registries: {name} is a path")
    return value


def _words(value: object, name: str) -> list[str]:
    """Split a list, or a text with commas."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, Sequence | frozenset | set) and all(isinstance(each, str) for each in value):
        return [str(each) for each in value]
    raise ConfigError(f"registries: {name} is a list of names, or a text with commas between them")
