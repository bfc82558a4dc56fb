"""Manifests of registries as records, and what of them we believe. Pure.

In: bytes that a registry sent. Out: descriptors whose digests, sizes and number are bounded, or one error. Foreign
fields are allowed and ignored. Source: github.com/opencontainers/image-spec, manifest.md and image-index.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bootseer.errors import DigestMismatch, IntegrityError
from bootseer.storage.oci_reference import is_digest

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
WORKLOAD = "vnd.bootseer.workload"  # annotation: what a trace was recorded of
CREATED = "org.opencontainers.image.created"

MOST_MANIFEST_BYTES = 4 << 20  # what registries take
MOST_CONFIG_BYTES = 8 << 20  # of images; some have long histories
MOST_BLOB_BYTES = 1 << 50
MOST_TREE_JSON_BYTES = 64 << 10  # these and the next as in docs/formats.md
MOST_TREE_INDEX_BYTES = 256 << 20
MOST_TRACE_BYTES = 16 << 20
MOST_PACK_BYTES = (1 << 32) - 1
_HEX = re.compile(r"[0-9a-f]{64}")
_WORKLOAD = re.compile(r"[0-9a-f]{16}")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*")


class Platform(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image runs on."""

    os: str = ""
    architecture: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A blob or manifest by its content."""

    media_type: str
    digest: str
    size: int  # bytes
    artifact_type: str = ""
    annotations: dict[str, str] = {}
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Of an image or an artefact."""

    schema_version: int
    media_type: str = ""
    artifact_type: str = ""
    config: Descriptor
    layers: list[Descriptor] = []
    subject: Descriptor | None = None
    annotations: dict[str, str] = {}

    @property
    def kind(self) -> str:
        """What it is an artefact of; older ones say it by the type of their config."""
        return self.artifact_type or self.config.media_type


class ManifestIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A list of manifests: of an image's platforms, or of what refers to a manifest."""

    schema_version: int
    media_type: str = ""
    manifests: list[Descriptor] = []
    annotations: dict[str, str] = {}


class Document(NamedTuple):
    """A manifest or an index as it came."""

    data: bytes
    media_type: str
    digest: str

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.data))


def digest_of(data: bytes | memoryview) -> str:
    """As registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(data: bytes, digest: str, where: str) -> None:
    """Raises: DigestMismatch."""
    if digest_of(data) != digest:
        raise DigestMismatch(f"{where}: the registry sent other bytes than those of {digest}")


def to_document(data: bytes, content_type: str, where: str) -> Document:
    """What kind of manifest this is, by what it says itself and the registry's word.

    Raises: IntegrityError when the two differ, or it could be read as both a manifest and an index.
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
    # Readers that disagree on what a document is can be shown two contents under one digest (CVE-2021-41190).
    if "manifests" in fields and ("layers" in fields or "config" in fields):
        raise IntegrityError(f"{where}: is a manifest and an index at once, so nobody can say what it means")
    media_type = own or said or (INDEX if "manifests" in fields else MANIFEST)
    return Document(data, media_type, digest_of(data))


def parse_manifest(document: Document, where: str) -> Manifest:
    """Raises: IntegrityError for what is no manifest of an image or artefact."""
    if document.media_type not in MANIFESTS:
        raise IntegrityError(f"{where}: is of type {document.media_type[:100]}, not a manifest")
    manifest: Manifest = _decode(document.data, Manifest, where)
    if manifest.schema_version != 2:
        raise IntegrityError(f"{where}: has schema version {manifest.schema_version}, not 2")
    for descriptor in (manifest.config, *manifest.layers, *filter(None, [manifest.subject])):
        check_descriptor(descriptor, where)
    return manifest


def parse_index(document: Document, where: str) -> ManifestIndex:
    """Raises: IntegrityError for what is no index."""
    if document.media_type not in INDEXES:
        raise IntegrityError(f"{where}: is of type {document.media_type[:100]}, not an index")
    index: ManifestIndex = _decode(document.data, ManifestIndex, where)
    for descriptor in index.manifests:
        check_descriptor(descriptor, where)
    return index


def check_document(document: Document, where: str) -> None:
    """Raises: IntegrityError unless it is what it says it is."""
    if document.media_type in MANIFESTS:
        parse_manifest(document, where)
    elif document.media_type in INDEXES:
        parse_index(document, where)


def check_descriptor(descriptor: Descriptor, where: str) -> None:
    """Raises: IntegrityError."""
    if not is_digest(descriptor.digest):
        raise IntegrityError(f"{where}: {descriptor.digest[:100]!r} is no sha256 digest")
    if not 0 <= descriptor.size <= MOST_BLOB_BYTES:
        raise IntegrityError(f"{where}: {descriptor.digest} has {descriptor.size} bytes")
    if not _MEDIA_TYPE.fullmatch(descriptor.media_type) or len(descriptor.media_type) > 255:
        raise IntegrityError(f"{where}: {descriptor.media_type[:100]!r} is no media type")


def encode(record: Manifest | ManifestIndex, where: str) -> bytes:
    """As it is pushed; the same record gives the same bytes. Raises: IntegrityError when it is too large."""
    data = msgspec.json.encode(record)
    if len(data) > MOST_MANIFEST_BYTES:
        raise IntegrityError(f"{where}: a manifest of {len(data)} bytes; registries take {MOST_MANIFEST_BYTES}")
    return data


# ---- trees ---------------------------------------------------------------------------------------------------


class TreeFiles(NamedTuple):
    """A tree artefact as the files of its folder."""

    manifest: Descriptor
    files: Mapping[str, Descriptor]  # by path: tree.json, index/HEX, packs/HEX


def is_tree(document: Document, where: str) -> bool:
    """Whether it is a manifest of a tree."""
    return document.media_type in MANIFESTS and parse_manifest(document, where).kind == TREE


def tree_files(document: Document, where: str) -> TreeFiles:
    """The files of a tree artefact. Raises: IntegrityError when they can be none."""
    manifest = parse_manifest(document, where)
    files = {"tree.json": _bounded(manifest.config, TREE, MOST_TREE_JSON_BYTES, where)}
    indexes = 0
    for layer in manifest.layers:
        if layer.media_type == TREE_INDEX:
            indexes += 1
            files[f"index/{_hex(layer)}"] = _bounded(layer, TREE_INDEX, MOST_TREE_INDEX_BYTES, where)
        else:
            files[f"packs/{_hex(layer)}"] = _bounded(layer, TREE_PACK, MOST_PACK_BYTES, where)
    if indexes != 1:
        raise IntegrityError(f"{where}: is a tree with {indexes} indexes")
    return TreeFiles(document.descriptor, files)


def to_tree_manifest(
    head: Descriptor,
    index: Descriptor,
    packs: Sequence[Descriptor],
    *,
    subject: Descriptor | None,
    annotations: Mapping[str, str],
) -> Manifest:
    """Of a tree: tree.json, the index, the packs in their order. No times in it: the same tree has one digest."""
    return Manifest(
        schema_version=2,
        media_type=MANIFEST,
        artifact_type=TREE,
        config=head,
        layers=[index, *packs],
        subject=_plain(subject),
        annotations={**annotations, TREE_DIGEST: _hex(index)},
    )


# ---- traces --------------------------------------------------------------------------------------------------


def to_trace_manifest(
    trace: Descriptor, subject: Descriptor, *, tree: str, workload: str, created: str
) -> Manifest:
    """Of the trace of one workload; refers to the tree's manifest."""
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
    """Whether it can stand in a trace's path."""
    return _WORKLOAD.fullmatch(text) is not None


def trace_path(descriptor: Descriptor) -> str:
    """The path in the tree's folder of what refers to it; "" for what is no trace."""
    tree, workload = descriptor.annotations.get(TREE_DIGEST, ""), descriptor.annotations.get(WORKLOAD, "")
    if descriptor.artifact_type != TRACE or not _HEX.fullmatch(tree) or not is_workload(workload):
        return ""
    return f"traces/{tree}/{workload}.json"


def trace_blob(document: Document, where: str) -> Descriptor:
    """The trace itself. Raises: IntegrityError."""
    manifest = parse_manifest(document, where)
    if manifest.kind != TRACE or len(manifest.layers) != 1:
        raise IntegrityError(f"{where}: is no trace")
    return _bounded(manifest.layers[0], TRACE, MOST_TRACE_BYTES, where)


def newest(descriptors: Sequence[Descriptor]) -> Descriptor | None:
    """The one created last, by what they say; everybody chooses the same."""
    return max(descriptors, key=lambda each: (each.annotations.get(CREATED, ""), each.digest), default=None)


def _bounded(descriptor: Descriptor, media_type: str, most_bytes: int, where: str) -> Descriptor:
    if descriptor.media_type != media_type:
        raise IntegrityError(f"{where}: {descriptor.digest} is of type {descriptor.media_type}, not {media_type}")
    if descriptor.size > most_bytes:
        raise IntegrityError(f"{where}: {descriptor.digest} has {descriptor.size} bytes; at most {most_bytes}")
    return descriptor


def _plain(descriptor: Descriptor | None) -> Descriptor | None:
    """Without annotations, which belong to the list it was found in."""
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
    return IntegrityError(f"{where}: is no manifest: {error}")


def _without_nulls(value: Any) -> Any:
    """Registries in Go write null for lists and maps that are empty."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
