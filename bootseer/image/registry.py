"""Images and artifacts in registries: reads, pushes, and references. For trees see bootseer.image.artifacts.

No library has all that is needed here: ranges of blobs, tokens that expire meanwhile, referrers, mirrors, waits
that a registry requests, and credentials that stay with their host. So this uses bootseer.storage.oci.client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from bootseer.errors import IntegrityError, NotFound, StorageError
from bootseer.image.uploads import Fill, Sent, Uploads, from_memory
from bootseer.jitter import jitter
from bootseer.storage.oci.auth import push_scope
from bootseer.storage.oci.client import RETRIES, RegistryClient
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import (
    INDEX,
    INDEXES,
    MAX_CONFIG_BYTES,
    TREE_DIGEST,
    WORKLOAD,
    Descriptor,
    Document,
    Manifest,
    ManifestIndex,
    digest_of,
    encode,
    parse_index,
    parse_manifest,
)
from bootseer.storage.oci.options import origin_of, read_options
from bootseer.storage.oci.reference import Reference, referrers_tag
from bootseer.storage.oci.referrers import find_referrers
from bootseer.storage.oci.store import OciStore
from bootseer.storage.oci.stream import BlobStream
from bootseer.tree.builder.image_config import choose

MAX_NESTED = 4  # indexes in indexes
REFERRERS_TRIES = 5  # of writing the stand-in tag while others write it too
_NONE: Mapping[str, object] = {}


class RegistryImage(NamedTuple):
    """An image as its layers, the lowest first: a source of layers for building a tree."""

    reference: Reference  # by digest
    manifest: Manifest
    config: bytes  # JSON, with its digest verified
    client: RegistryClient

    @property
    def layers(self) -> list[Descriptor]:
        """Media type, digest of the stored bytes, size."""
        return self.manifest.layers

    def open(self, layer: Descriptor) -> BinaryIO:
        """Open its stored bytes, as many as in the manifest; the reader verifies their digest. Blocking."""
        return cast(BinaryIO, BlobStream(self.client, self.reference, layer))


class Registry:
    """Access to any number of registries, with the options and the environment of bootseer.storage.oci.options."""

    def __init__(self, *, options: Mapping[str, object] = _NONE, timeout_s: float = 30.0) -> None:
        self.client = RegistryClient(read_options(options), timeout_s=timeout_s)
        self._locks: dict[str, asyncio.Lock] = {}  # of stand-in tags, by their names

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.client.close()

    def statistics(self) -> dict[str, int]:
        return self.client.counts.to_dict()

    def store(self, reference: Reference) -> OciStore:
        """Return the tree of that name as a store, which shares connections and tokens."""
        return OciStore(str(reference), client=self.client)

    # ---- reading -------------------------------------------------------------------------------------------

    async def document(self, reference: Reference) -> Document:
        """Read the manifest or index of that name, at most 4 MiB, with its digest verified."""
        return await self.client.ask(partial(self.client.read_document, reference))

    async def find(self, reference: Reference) -> Document | None:
        """Read the document from the registry itself, for writers: a mirror may be behind. None if it has none."""
        place = origin_of(reference)

        def read(call: RegistryCall) -> Document | None:
            try:
                return self.client.read_at(place, reference.version, call)
            except NotFound:
                return None

        return await self.client.ask(read)

    async def image(self, reference: Reference, platform: str) -> RegistryImage:
        """Return the image for `os/architecture[/variant]`, a source of layers.

        Raises: NotFound; ConfigError if there is none for the platform; IntegrityError.
        """
        where = str(reference)
        document = await self.document(reference)
        for _ in range(MAX_NESTED):
            if document.media_type not in INDEXES:
                break
            chosen = choose(parse_index(document, where), platform, where)
            document = await self.document(reference.at(chosen.digest))
        manifest = parse_manifest(document, where)
        if manifest.config.size > MAX_CONFIG_BYTES:
            raise IntegrityError(
                f"{where}: has a config of {manifest.config.size} bytes; at most {MAX_CONFIG_BYTES}"
            )
        pinned = reference.at(document.digest)
        config = await self.read_blob(pinned, manifest.config)
        return RegistryImage(pinned, manifest, config, self.client)

    async def read_blob(self, reference: Reference, blob: Descriptor) -> bytes:
        """Read a small blob as a whole, with its digest verified."""
        return await self.client.ask(lambda call: self.client.read_blob(reference, blob, call))

    async def referrers(self, reference: Reference, digest: str, artifact_type: str) -> list[Descriptor]:
        """Return the artifacts of this type that refer to the manifest `digest` in the repository."""
        return await self.client.ask(
            lambda call: find_referrers(self.client, reference, digest, artifact_type, call)
        )

    # ---- pushing -------------------------------------------------------------------------------------------

    def uploads(self, reference: Reference, *, mount_from: str = "") -> Uploads:
        """Return an uploader of many blobs to one repository."""
        return Uploads(self.client, reference, mount_from=mount_from)

    async def push_blob(
        self, reference: Reference, blob: Descriptor, fill: Fill, sent: Sent = lambda _: None
    ) -> None:
        """Push one blob, unless it is present already."""
        await self.uploads(reference).push(blob, fill, sent)

    async def push_bytes(self, reference: Reference, data: bytes, media_type: str) -> Descriptor:
        """Push a small blob from memory."""
        blob = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        await self.push_blob(reference, blob, from_memory(data))
        return blob

    async def push_manifest(self, reference: Reference, manifest: Manifest | ManifestIndex) -> Descriptor:
        """Push under the reference's tag, or under its digest alone if it has none.

        Add it to the list of referrers of its `subject`, if the registry does not do so itself.

        Raises: IntegrityError if it is too large; StorageError.
        """
        data = encode(manifest, str(reference))
        digest = digest_of(data)
        knows_subjects = await self._put(reference, reference.tag or digest, data, manifest.media_type or INDEX)
        made = Descriptor(media_type=manifest.media_type, digest=digest, size=len(data))
        if isinstance(manifest, Manifest) and manifest.subject is not None and not knows_subjects:
            tag = Reference(reference.registry, reference.repository, referrers_tag(manifest.subject.digest))
            async with self._locks.setdefault(str(tag), asyncio.Lock()):
                await self._add_referrer(tag, _listed(made, manifest))
        return made

    async def point(self, reference: Reference, tag: str, manifest: Manifest) -> None:
        """Add a further tag to a pushed manifest; nothing is sent if the tag is right already."""
        data = encode(manifest, str(reference))
        named = Reference(reference.registry, reference.repository, tag)
        found = await self.find(named)
        if found is None or found.digest != digest_of(data):
            await self._put(named, tag, data, manifest.media_type or INDEX)

    async def _put(self, reference: Reference, version: str, data: bytes, media_type: str) -> bool:
        """Put a manifest; return whether the registry supports subjects."""
        place = origin_of(reference)

        def put(call: RegistryCall) -> bool:
            url = f"{self.client.base_url(place, call)}/manifests/{version}"
            exchange = self.client.send(
                place, "PUT", url, {"Content-Type": media_type}, call, push_scope(reference.repository), data
            )
            if exchange.status not in (200, 201, 202):
                raise self.client.refusal(exchange, place, f"{reference.name}: {version}", call)
            exchange.finish()
            return bool(exchange.headers.get("OCI-Subject", "").strip())

        return await self.client.ask(put)

    # ---- the stand-in for the referrers API ------------------------------------------------------------------

    async def _add_referrer(self, tag: Reference, descriptor: Descriptor) -> None:
        """Add to the list and check: others may write it too, and registries have no compare-and-swap."""
        where = str(tag)
        for attempt in range(REFERRERS_TRIES):
            found = await self.find(tag)
            if found is not None and any(
                each.digest == descriptor.digest for each in parse_index(found, where).manifests
            ):
                return
            # Not decoded into records: fields of other writers stay as they are.
            fields: dict[str, Any] = msgspec.json.decode(found.data) if found is not None else _empty_index()
            fields["manifests"] = [
                *_kept(fields.get("manifests") or [], descriptor),
                msgspec.to_builtins(descriptor),
            ]
            await self._put(tag, tag.tag, msgspec.json.encode(fields), INDEX)
            if attempt:
                await asyncio.sleep(RETRIES.wait_s(attempt + 1, jitter()))
        raise StorageError(
            f"{where}: cannot add {descriptor.digest}: other writers changed the tag each time; try again"
        )


def _listed(made: Descriptor, manifest: Manifest) -> Descriptor:
    return Descriptor(
        media_type=made.media_type,
        digest=made.digest,
        size=made.size,
        artifact_type=manifest.kind,
        annotations=manifest.annotations,
    )


def _empty_index() -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}


def _kept(listed: list[dict[str, Any]], new: Descriptor) -> list[dict[str, Any]]:
    """Return the list without the entry that the new one replaces: the older trace of its workload and tree."""
    if WORKLOAD not in new.annotations:
        return listed
    key = (new.artifact_type, new.annotations.get(TREE_DIGEST), new.annotations[WORKLOAD])

    def key_of(entry: dict[str, Any]) -> tuple[Any, Any, Any]:
        annotations = entry.get("annotations") or {}
        return entry.get("artifactType"), annotations.get(TREE_DIGEST), annotations.get(WORKLOAD)

    return [each for each in listed if key_of(each) != key]
