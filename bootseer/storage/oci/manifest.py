"""Manifests of registries as records, with their validation. Pure.

In: bytes of a registry. Out: descriptors whose digests, sizes and number are bounded, or one error. Unknown fields
are ignored. Source: github.com/opencontainers/image-spec, manifest.md and image-index.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bootseer.errors import DigestMismatch, IntegrityError
from bootseer.storage.oci.reference import is_digest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS = (MANIFEST, DOCKER_MANIFEST)
INDEXES = (INDEX, DOCKER_INDEX)
EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY_CONFIG = b"{}"

TREE = "application/vnd.bootseer.tree.v1+json"  # of the artefact, and of tree.json, its config
TREE_INDEX = "application/vnd.bootseer.index.v1"
TREE_PACK = "application/vnd.bootseer.pack.v1"
TRACE = "application/vnd.bootseer.trace.v1+json"  # of the artefact, and of its one layer
TREE_DIGEST = "vnd.bootseer.tree"  # annotation: the tree digest
WORKLOAD = "vnd.bootseer.workload"  # annotation: the workload of a trace
CREATED = "org.opencontainers.image.created"

MAX_MANIFEST_BYTES = 4 << 20  # the limit of registries
MAX_CONFIG_BYTES = 8 << 20  # of images; some have long histories
MAX_BLOB_BYTES = 1 << 50
MAX_TREE_JSON_BYTES = 64 << 10  # these and the next as in docs/reference/formats.md
MAX_TREE_INDEX_BYTES = 256 << 20
MAX_TRACE_BYTES = 16 << 20
MAX_PACK_BYTES = (1 << 32) - 1
_HEX = re.compile(r"[0-9a-f]{64}")
_WORKLOAD = re.compile(r"[0-9a-f]{16}")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*")


class Platform(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A reference to a blob or manifest by its content."""

    media_type: str
    digest: str
    size: int  # bytes
    artifact_type: str = ""
    annotations: dict[str, str] = {}
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A manifest of an image or an artefact."""

    schema_version: int
    media_type: str = ""
    artifact_type: str = ""
    config: Descriptor
    layers: list[Descriptor] = []
    subject: Descriptor | None = None
    annotations: dict[str, str] = {}

    @property
    def kind(self) -> str:
        """The artefact's type; older artefacts have it as the type of their config."""
        return self.artifact_type or self.config.media_type


class ManifestIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A list of manifests: of an image's platforms, or of the referrers of a manifest."""

    schema_version: int
    media_type: str = ""
    manifests: list[Descriptor] = []
    annotations: dict[str, str] = {}


class Document(NamedTuple):
    """A manifest or an index as received."""

    data: bytes
    media_type: str
    digest: str

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.data))


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest in the form of registries."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(data: bytes, digest: str, where: str) -> None:
    """Verify a digest. Raises: DigestMismatch."""
    if digest_of(data) != digest:
        raise DigestMismatch(f"{where}: the registry sent other bytes than those of {digest}")


def to_document(data: bytes, content_type: str, where: str) -> Document:
    """Return a document with its type, from its own mediaType and the registry's Content-Type.

    Raises: IntegrityError when the two differ, or when it can be read as both a manifest and an index.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_understood(where, error) from error
    own = fields.get("mediaType") or ""
    said = content_type.partition(";")[0].strip().lower()
    if said not in (*MANIFESTS, *INDEXES):
        said = ""
    if not isinstance(own, str) or (own and said and own != said):
        raise IntegrityError(f"{where}: the registry calls it {said}, it calls itself {str(own)[:100]!r}")
    # Readers that disagree on a document's type could read two contents under one digest (CVE-2021-41190).
    if "manifests" in fields and ("layers" in fields or "config" in fields):
        raise IntegrityError(f"{where}: is a manifest and an index at once, so its meaning is ambiguous")
    media_type = own or said or (INDEX if "manifests" in fields else MANIFEST)
    return Document(data, media_type, digest_of(data))


def parse_manifest(document: Document, where: str) -> Manifest:
    """Parse a manifest of an image or artefact. Raises: IntegrityError for anything else."""
    if document.media_type not in MANIFESTS:
        raise IntegrityError(f"{where}: is of type {document.media_type[:100]}, not a manifest")
    manifest: Manifest = _decode(document.data, Manifest, where)
    if manifest.schema_version != 2:
        raise IntegrityError(f"{where}: has schema version {manifest.schema_version}, not 2")
    for descriptor in (manifest.config, *manifest.layers, *filter(None, [manifest.subject])):
        check_descriptor(descriptor, where)
    return manifest


def parse_index(document: Document, where: str) -> ManifestIndex:
    """Parse an index. Raises: IntegrityError for anything else."""
    if document.media_type not in INDEXES:
        raise IntegrityError(f"{where}: is of type {document.media_type[:100]}, not an index")
    index: ManifestIndex = _decode(document.data, ManifestIndex, where)
    for descriptor in index.manifests:
        check_descriptor(descriptor, where)
    return index


def check_document(document: Document, where: str) -> None:
    """Check that a document is valid for its type. Raises: IntegrityError."""
    if document.media_type in MANIFESTS:
        parse_manifest(document, where)
    elif document.media_type in INDEXES:
        parse_index(document, where)


def check_descriptor(descriptor: Descriptor, where: str) -> None:
    """Check the digest, size and type of a descriptor. Raises: IntegrityError."""
    if not is_digest(descriptor.digest):
        raise IntegrityError(f"{where}: {descriptor.digest[:100]!r} is not a sha256 digest")
    if not 0 <= descriptor.size <= MAX_BLOB_BYTES:
        raise IntegrityError(f"{where}: {descriptor.digest} has {descriptor.size} bytes")
    if not _MEDIA_TYPE.fullmatch(descriptor.media_type) or len(descriptor.media_type) > 255:
        raise IntegrityError(f"{where}: {descriptor.media_type[:100]!r} is not a media type")


def encode(record: Manifest | ManifestIndex, where: str) -> bytes:
    """Encode a record to push; equal records give equal bytes. Raises: IntegrityError if it is too large."""
    data = msgspec.json.encode(record)
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{where}: a manifest of {len(data)} bytes; registries take {MAX_MANIFEST_BYTES}")
    return data


# ---- trees ---------------------------------------------------------------------------------------------------


class TreeFiles(NamedTuple):
    """A tree artefact as the files of its directory."""

    manifest: Descriptor
    files: Mapping[str, Descriptor]  # by path: tree.json, index/HEX, packs/HEX


def is_tree(document: Document, where: str) -> bool:
    return document.media_type in MANIFESTS and parse_manifest(document, where).kind == TREE


def tree_files(document: Document, where: str) -> TreeFiles:
    """Return the files of a tree artefact. Raises: IntegrityError for an invalid one."""
    manifest = parse_manifest(document, where)
    files = {"tree.json": _bounded(manifest.config, TREE, MAX_TREE_JSON_BYTES, where)}
    indexes = 0
    for layer in manifest.layers:
        if layer.media_type == TREE_INDEX:
            indexes += 1
            files[f"index/{_hex(layer)}"] = _bounded(layer, TREE_INDEX, MAX_TREE_INDEX_BYTES, where)
        else:
            files[f"packs/{_hex(layer)}"] = _bounded(layer, TREE_PACK, MAX_PACK_BYTES, where)
    if indexes != 1:
        raise IntegrityError(f"{where}: is a tree with {indexes} indexes")
    return TreeFiles(document.descriptor, files)


def to_tree_manifest(
    head: Descriptor, index: Descriptor, packs: Sequence[Descriptor], *, subject: Descriptor | None
) -> Manifest:
    """Make a tree's manifest: tree.json, index, packs in order. It has no times, so a tree has one digest."""
    return Manifest(
        schema_version=2,
        media_type=MANIFEST,
        artifact_type=TREE,
        config=head,
        layers=[index, *packs],
        subject=_plain(subject),
        annotations={TREE_DIGEST: _hex(index)},
    )


# ---- traces --------------------------------------------------------------------------------------------------


def to_trace_manifest(
    trace: Descriptor, subject: Descriptor, *, tree: str, workload: str, created: str
) -> Manifest:
    """Make the manifest of the trace of one workload; it refers to the tree's manifest."""
    return Manifest(
        schema_version=2,
        media_type=MANIFEST,
        artifact_type=TRACE,
        config=Descriptor(media_type=EMPTY, digest=digest_of(EMPTY_CONFIG), size=len(EMPTY_CONFIG)),
        layers=[trace],
        subject=_plain(subject),
        annotations={TREE_DIGEST: tree, WORKLOAD: workload, CREATED: created},
    )


def is_workload(text: str) -> bool:
    """Return whether it is valid in a trace's path."""
    return _WORKLOAD.fullmatch(text) is not None


def trace_path(descriptor: Descriptor) -> str:
    """Return the path of a trace in the tree's directory; "" for another referrer."""
    tree, workload = descriptor.annotations.get(TREE_DIGEST, ""), descriptor.annotations.get(WORKLOAD, "")
    if descriptor.artifact_type != TRACE or not _HEX.fullmatch(tree) or not is_workload(workload):
        return ""
    return f"traces/{tree}/{workload}.json"


def trace_blob(document: Document, where: str) -> Descriptor:
    """Return the descriptor of the trace itself. Raises: IntegrityError."""
    manifest = parse_manifest(document, where)
    if manifest.kind != TRACE or len(manifest.layers) != 1:
        raise IntegrityError(f"{where}: is not a trace")
    return _bounded(manifest.layers[0], TRACE, MAX_TRACE_BYTES, where)


def newest(descriptors: Sequence[Descriptor]) -> Descriptor | None:
    """Return the one with the newest creation time in its annotations; every reader chooses the same."""
    return max(descriptors, key=lambda each: (each.annotations.get(CREATED, ""), each.digest), default=None)


def _bounded(descriptor: Descriptor, media_type: str, max_bytes: int, where: str) -> Descriptor:
    if descriptor.media_type != media_type:
        raise IntegrityError(f"{where}: {descriptor.digest} is of type {descriptor.media_type}, not {media_type}")
    if descriptor.size > max_bytes:
        raise IntegrityError(f"{where}: {descriptor.digest} has {descriptor.size} bytes; at most {max_bytes}")
    return descriptor


def _plain(descriptor: Descriptor | None) -> Descriptor | None:
    """Drop annotations, which belong to the list that contains the descriptor."""
    if descriptor is None:
        return None
    return Descriptor(media_type=descriptor.media_type, digest=descriptor.digest, size=descriptor.size)


def _hex(descriptor: Descriptor) -> str:
    return descriptor.digest.removeprefix("sha256:")


def _decode(data: bytes, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(_without_nulls(msgspec.json.decode(data)), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_understood(where, error) from error


def _not_understood(where: str, error: Exception) -> IntegrityError:
    return IntegrityError(f"{where}: is not a manifest: {error}")


def _without_nulls(value: Any) -> Any:
    """Drop nulls, which registries in Go write for empty lists and maps."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
