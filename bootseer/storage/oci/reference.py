"""Names of images and artefacts in registries: `registry/repository:tag@digest`. Pure.

In: a name, with or without `oci://` or `docker://`. Out: a Reference whose parts are valid in a URL. The grammar
is that of github.com/distribution/reference; the short names are Docker's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bootseer.errors import ConfigError

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"
MAX_NAME_BYTES = 255  # of a repository

_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\])(?::([0-9]{{1,5}}))?")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Reference(NamedTuple):
    """A manifest in a registry. A digest takes precedence over a tag."""

    registry: str  # host, or host:port; docker.io for Docker Hub
    repository: str
    tag: str = ""  # "" if none was named
    digest: str = ""  # sha256:..., "" if none was named

    @property
    def version(self) -> str:
        """The version to request: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def name(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def host(self) -> str:
        """The server for requests."""
        return "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry

    def at(self, digest: str) -> Reference:
        """Return the reference of the manifest with this digest in the same repository."""
        return Reference(self.registry, self.repository, "", digest)

    def __str__(self) -> str:
        """Return an `oci://` URL that `parse_reference` accepts."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"oci://{self.name}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """Parse a name or URL.

    After `oci://` the first part is always a registry. Otherwise a first part without a dot or a port belongs to
    Docker Hub, as in docker itself.

    Raises: ConfigError, whose message never repeats a password.
    """
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else ""
    if scheme not in ("", "oci", "docker"):
        raise ConfigError(f"{_shown(text)}: names of images begin with oci://, docker:// or a registry")
    rest = text[found.end() :] if found else text
    rest = rest.rstrip("/") if scheme else rest
    before, at, digest = rest.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        if "/" in digest:
            raise ConfigError(
                f"{_shown(text)}: no password belongs in a name: `docker login`, `podman login` or a file named"
                " by REGISTRY_AUTH_FILE"
            )
        raise ConfigError(f"{_shown(text)}: the part after @ is not a sha256 digest")
    first, slash, below = before.partition("/")
    if scheme == "oci":
        if not slash:
            raise ConfigError(
                f"{_shown(text)}: name the registry and the repository: oci://REGISTRY/REPOSITORY:TAG"
            )
        registry = first
    elif slash and (any(mark in first for mark in ".:") or first == "localhost" or first != first.lower()):
        registry = first
    else:
        registry, below = DOCKER_HUB, before
    repository, colon, tag = below.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise ConfigError(f"{_shown(text)}: {_cut(tag)!r} is not a tag")
    registry = parse_registry(registry, text)
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    check_repository(repository, text)
    return Reference(registry, repository, tag, digest)


def parse_registry(text: str, named: str = "") -> str:
    """Return the host, and the port if named, in lower case.

    Raises: ConfigError; `named` is the whole name, for the message.
    """
    found = _HOST.fullmatch(text)
    if found is None or len(text) > MAX_NAME_BYTES or (found[1] and not 0 < int(found[1]) < 65536):
        raise ConfigError(f"{_shown(named or text)}: {_shown(text)} is not a registry: HOST or HOST:PORT")
    registry = text.lower()
    return DOCKER_HUB if registry in _HUB_NAMES else registry


def check_repository(repository: str, named: str = "") -> str:
    """Return the repository. Raises: ConfigError for an invalid name; `named` as in `parse_registry`."""
    if not _REPOSITORY.fullmatch(repository) or len(repository) > MAX_NAME_BYTES:
        raise ConfigError(
            f"{_shown(named or repository)}: {_cut(repository)!r} is not a repository: small letters, digits, and"
            " . _ - / between them"
        )
    return repository


def is_digest(text: str) -> bool:
    """Return whether it is a sha256 digest, the kind that all registries support."""
    return _DIGEST.fullmatch(text) is not None


def referrers_tag(digest: str) -> str:
    """Return the tag under which registries without the referrers API list the referrers of a manifest."""
    return digest.replace(":", "-")


def tree_tag(digest: str) -> str:
    """Return the tag of the last tree that was pushed for the image of this digest."""
    return f"{referrers_tag(digest)}.bootseer"


def _shown(text: str) -> str:
    """Return the text for messages, without a possible password."""
    scheme = _SCHEME.match(text)
    start = scheme.end() if scheme else 0
    place = text.rfind("@")
    if place >= 0 and not _DIGEST.fullmatch(text[place + 1 :].rstrip("/")) and "/" in text[place:]:
        text = f"{text[:start]}***{text[place:]}"
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
