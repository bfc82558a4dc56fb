"""The head of a tree (tree.json), which names the index of a tree; and names of trees.

In: the payload of a trusted envelope (bootseer.trust), and URLs from users. Out: a Head with bounded fields, or
one error. docs/reference/formats.md describes the format.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote_from_bytes

import msgspec

from bootseer.errors import ConfigError, IntegrityError
from bootseer.formats import decode_json
from bootseer.storage.paths import is_chained, redact, scheme_of
from bootseer.tree.index import FORMAT, MAX_INDEX_BYTES, digest_of

HEAD_NAME = "tree.json"
PAYLOAD_TYPE = "application/vnd.bootseer.tree.v1+json"
MAX_HEAD_BYTES = 64 << 10  # of the envelope
MAX_NAME_BYTES = 1024
IMAGE, ENV = "image", "env"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIN = re.compile(r"(.+)@sha256:([^@/]*)", re.DOTALL)
_LOCAL = ("", "file", "local")
_REGISTRIES = ("oci", "docker")  # their `@sha256:` is that of a manifest
_WEB = ("http", "https", *_REGISTRIES)  # hosts, which are case-insensitive


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of tree.json."""

    format: str
    name: str  # `canonical_name` of the URL that readers use, or a given name
    digest: str  # of the index object: the tree digest
    index_bytes: int  # of the index object
    kind: str  # IMAGE or ENV


def make_head(index_bytes: bytes, kind: str, url: str, name: str = "") -> Head:
    """Make the head of a stored index, for readers of `url`, or of `name` if given."""
    asked = wanted_name(url, name)
    head = Head(format=FORMAT, name=asked, digest=digest_of(index_bytes), index_bytes=len(index_bytes), kind=kind)
    check(head, "this tree")
    return head


def encode(head: Head) -> bytes:
    """Encode the payload. Raises: IntegrityError for a head that no reader would accept."""
    check(head, "this tree")
    return msgspec.json.encode(head)


def decode(payload: bytes, where: str) -> Head:
    """Decode a payload. Raises: FormatVersion for another or a newer format; IntegrityError for other faults."""
    head = decode_json(payload, Head, FORMAT, where, what="no head of a tree", max_bytes=MAX_HEAD_BYTES)
    check(head, where)
    return head


def check(head: Head, where: str) -> None:
    """Check that all fields are within their bounds. Raises: IntegrityError."""
    if head.format != FORMAT:
        raise IntegrityError(f"{where}: has format {head.format[:80]!r}")
    if not _is_name(head.name):
        raise IntegrityError(f"{where}: {head.name[:80]!r} is not a name of a tree: 1 to {MAX_NAME_BYTES} bytes")
    if not is_digest(head.digest):
        raise IntegrityError(f"{where}: {head.digest[:80]!r} is not a SHA-256 in lower case")
    if not 0 < head.index_bytes <= MAX_INDEX_BYTES:
        raise IntegrityError(f"{where}: an index of {head.index_bytes} bytes; 1 to {MAX_INDEX_BYTES}")
    if head.kind not in (IMAGE, ENV):
        raise IntegrityError(f"{where}: a tree of kind {head.kind[:80]!r}; {IMAGE} or {ENV}")


def is_digest(text: str) -> bool:
    """Return whether it is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(text) is not None


def wanted_name(url: str, name: str = "") -> str:
    """Return the name that a head must have: the given one, else the URL's. A name may be another URL."""
    if not name:
        return canonical_name(split_pin(url)[0])
    return canonical_name(name) if scheme_of(name) or name.startswith("/") else name


def canonical_name(url: str) -> str:
    """Return the URL that names a tree: without user, password, query, fragment and trailing slashes.

    Local paths are absolute, `file:///path`. URLs of registries lose the digest of their manifest.
    Raises: ConfigError for a file: URL of another machine.
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
    """Split a URL into the URL and its tree digest, "" without one: `URL@sha256:<64 hex>`.

    In a registry URL the digest is that of the manifest, so it stays in the URL.
    Raises: ConfigError for an invalid digest.
    """
    if scheme_of(url) in _REGISTRIES:
        return url, ""
    found = _PIN.fullmatch(url)
    if found is None:
        return url, ""
    digest = found[2].lower()
    if not is_digest(digest):
        raise ConfigError(f"{redact(url)}: the part after @sha256: must be 64 hex digits")
    return found[1], digest


def store_url_of(url: str) -> str:
    """Return the URL of the store, without its pin; absolute."""
    bare = split_pin(url)[0]
    return bare if scheme_of(bare) else os.path.abspath(bare)


def _is_name(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= MAX_NAME_BYTES and name.isprintable()
