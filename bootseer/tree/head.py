"""The head of a tree, tree.json: which index a name means. And the names themselves.

In: the payload of an envelope that is believed (bootseer.trust), and URLs as people write them. Out: a Head whose
fields are bounded, or one error. docs/formats.md is the format.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote_from_bytes

import msgspec

from bootseer.errors import ConfigError, IntegrityError
from bootseer.formats import decode_json
from bootseer.storage.paths import is_chained, redact, scheme_of
from bootseer.tree.index import FORMAT, MOST_INDEX_BYTES, digest_of

HEAD_NAME = "tree.json"
PAYLOAD_TYPE = "application/vnd.bootseer.tree.v1+json"
MOST_HEAD_BYTES = 64 << 10  # of the envelope
MOST_NAME_BYTES = 1024
IMAGE, ENV = "image", "env"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIN = re.compile(r"(.+)@sha256:([^@/]*)", re.DOTALL)
_LOCAL = ("", "file", "local")
_REGISTRIES = ("oci", "docker")  # their `@sha256:` is that of a manifest
_WEB = ("http", "https", *_REGISTRIES)  # hosts, which are the same in small letters


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What tree.json says."""

    format: str
    name: str  # `canonical_name` of the URL that readers ask for, or a name that was given
    digest: str  # of the index object: the tree digest
    index_bytes: int  # of the index object
    kind: str  # IMAGE or ENV


def make_head(index_bytes: bytes, kind: str, url: str, name: str = "") -> Head:
    """Of an index as it is stored, for readers who ask for `url`, or for `name` if one is given."""
    asked = asked_name(url, name)
    head = Head(format=FORMAT, name=asked, digest=digest_of(index_bytes), index_bytes=len(index_bytes), kind=kind)
    check(head, "this tree")
    return head


def encode(head: Head) -> bytes:
    """The payload; raises IntegrityError for what no reader would take."""
    check(head, "this tree")
    return msgspec.json.encode(head)


def decode(payload: bytes, where: str) -> Head:
    """Raises: FormatVersion for another format or a newer version of it; IntegrityError for everything else."""
    head = decode_json(payload, Head, FORMAT, where, what="no head of a tree", most_bytes=MOST_HEAD_BYTES)
    check(head, where)
    return head


def check(head: Head, where: str) -> None:
    """Raises IntegrityError unless all fields are within their bounds."""
    if head.format != FORMAT:
        raise IntegrityError(f"{where}: has format {head.format[:80]!r}")
    if not _is_name(head.name):
        raise IntegrityError(f"{where}: {head.name[:80]!r} is no name of a tree: 1 to {MOST_NAME_BYTES} bytes")
    if not is_digest(head.digest):
        raise IntegrityError(f"{where}: {head.digest[:80]!r} is no SHA-256 in small letters")
    if not 0 < head.index_bytes <= MOST_INDEX_BYTES:
        raise IntegrityError(f"{where}: an index of {head.index_bytes} bytes; 1 to {MOST_INDEX_BYTES}")
    if head.kind not in (IMAGE, ENV):
        raise IntegrityError(f"{where}: a tree of kind {head.kind[:80]!r}; {IMAGE} or {ENV}")


def is_digest(text: str) -> bool:
    """Whether it is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(text) is not None


def asked_name(url: str, name: str = "") -> str:
    """The name that a head has to have: the given one, else the URL's. A name may be another URL."""
    if not name:
        return canonical_name(split_pin(url)[0])
    return canonical_name(name) if scheme_of(name) or name.startswith("/") else name


def canonical_name(url: str) -> str:
    """The URL by which a tree is known: without user, password, query, fragment and slashes at the end.

    Paths of this machine are absolute, `file:///path`. Registries' URLs lose the digest of their manifest.
    Raises: ConfigError for a local URL that names another machine.
    """
    if is_chained(url):
        return "::".join(canonical_name(part) if "://" in part else part for part in url.split("::"))
    scheme = scheme_of(url)
    if scheme in _LOCAL:
        from bootseer.storage.open import local_path

        return "file://" + quote_from_bytes(local_path(url).encode("utf-8", "surrogateescape"))
    rest = url.partition("://")[2].partition("#")[0].partition("?")[0]
    if scheme in _REGISTRIES and (pinned := _PIN.fullmatch(rest)):
        rest = pinned[1]
    server, slash, path = rest.partition("/")
    server = server.rpartition("@")[2]
    if scheme in _WEB:
        server = server.lower()
    return f"{scheme}://{server}{slash}{path}".rstrip("/") if path.strip("/") else f"{scheme}://{server}"


def split_pin(url: str) -> tuple[str, str]:
    """The URL and the tree digest that it asks for, "" without one: `URL@sha256:<64 hex>`.

    In a registry that digest is its own, of the manifest; there it stays in the URL.
    Raises: ConfigError for a digest that is none.
    """
    if scheme_of(url) in _REGISTRIES:
        return url, ""
    found = _PIN.fullmatch(url)
    if found is None:
        return url, ""
    digest = found[2].lower()
    if not is_digest(digest):
        raise ConfigError(f"{redact(url)}: what follows @sha256: has to be 64 hex digits")
    return found[1], digest


def store_url_of(url: str) -> str:
    """Of the store that a URL means, without its pin; absolute."""
    bare = split_pin(url)[0]
    return bare if scheme_of(bare) else os.path.abspath(bare)


def _is_name(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= MOST_NAME_BYTES and name.isprintable()
