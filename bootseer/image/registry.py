"""Images and artefacts in registries: read, pushed, and what refers to what. Of trees: bootseer.image.artifacts.

No library does what is needed here: ranges of blobs, tokens that expire meanwhile, referrers, mirrors, waits that
a registry asks for, and passwords that stay where they belong. So this stands on bootseer.storage.oci_client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from bootseer.errors import IntegrityError, NotFound, StorageError
from bootseer.image.uploads import Fill, Sent, Uploads, from_memory
from bootseer.storage.oci import OciStore
from bootseer.storage.oci_auth import push_scope
from bootseer.storage.oci_client import RETRIES, RegistryClient
from bootseer.storage.oci_http import Call
from bootseer.storage.oci_manifest import (
    INDEX,
    INDEXES,
    MOST_CONFIG_BYTES,
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
from bootseer.storage.oci_options import origin_of, read_options
from bootseer.storage.oci_reference import Reference, referrers_tag
from bootseer.storage.oci_referrers import find_referrers
from bootseer.storage.oci_stream import BlobStream
from bootseer.tree.image_config import choose

MOST_NESTED = 4  # indexes in indexes
REFERRERS_TRIES = 5  # of writing the stand-in tag while others write it too
_NONE: Mapping[str, object] = {}


class RegistryImage(NamedTuple):
    """An image as its layers, the lowest first: a source of layers to build a tree from."""

    reference: Reference  # by digest
    manifest: Manifest
    config: bytes  # JSON, with its digest verified
    client: RegistryClient

    @property
    def layers(self) -> list[Descriptor]:
        """Media type, digest of the stored bytes, size."""
        return self.manifest.layers

    def open(self, layer: Descriptor) -> BinaryIO:
        """Its stored bytes, as many as the manifest says; their digest is the reader's to verify. Blocking."""
        return cast(BinaryIO, BlobStream(self.client, self.reference, layer))


class Registry:
    """Any number of registries, with the options and the environment of bootseer.storage.oci_options."""

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
        """The tree of that name as a store, with the connections and tokens of this one."""
        return OciStore(str(reference), client=self.client)

    # ---- reading -------------------------------------------------------------------------------------------

    async def document(self, reference: Reference) -> Document:
        """The manifest or index of that name, at most 4 MiB, with its digest verified."""
        return await self.client.ask(partial(self.client.read_document, reference))

    async def find(self, reference: Reference) -> Document | None:
        """As the registry itself has it now, for those who write: a mirror may be behind. None if it has none."""
        place = origin_of(reference)

        def read(call: Call) -> Document | None:
            try:
                return self.client.read_at(place, reference.version, call)
            except NotFound:
                return None

        return await self.client.ask(read)

    async def image_manifest(self, reference: Reference, platform: str) -> tuple[Manifest, bytes]:
        """The manifest of the image for `os/architecture[/variant]`, and its config.

        Raises: NotFound; ConfigError when there is none for the platform; IntegrityError.
        """
        image = await self.image(reference, platform)
        return image.manifest, image.config

    async def image(self, reference: Reference, platform: str) -> RegistryImage:
        """The same, as a source of layers."""
        where = str(reference)
        document = await self.document(reference)
        for _ in range(MOST_NESTED):
            if document.media_type not in INDEXES:
                break
            chosen = choose(parse_index(document, where), platform, where)
            document = await self.document(reference.at(chosen.digest))
        manifest = parse_manifest(document, where)
        if manifest.config.size > MOST_CONFIG_BYTES:
            raise IntegrityError(
                f"{where}: has a config of {manifest.config.size} bytes; at most {MOST_CONFIG_BYTES}"
            )
        pinned = reference.at(document.digest)
        config = await self.read_blob(pinned, manifest.config)
        return RegistryImage(pinned, manifest, config, self.client)

    async def read_blob(self, reference: Reference, blob: Descriptor) -> bytes:
        """A small blob as a whole, with its digest verified."""
        return await self.client.ask(lambda call: self.client.read_blob(reference, blob, call))

    def open_blob(self, reference: Reference, blob: Descriptor) -> BlobStream:
        """A large one as a stream for a thread; the digest is the reader's to verify."""
        return BlobStream(self.client, reference, blob)

    async def referrers(self, reference: Reference, digest: str, artifact_type: str) -> list[Descriptor]:
        """What refers to the manifest `digest` in the repository and is of this type."""
        return await self.client.ask(
            lambda call: find_referrers(self.client, reference, digest, artifact_type, call)
        )

    # ---- pushing -------------------------------------------------------------------------------------------

    def uploads(self, reference: Reference, *, mount_from: str = "") -> Uploads:
        """For many blobs to one repository."""
        return Uploads(self.client, reference, mount_from=mount_from)

    async def push_blob(
        self, reference: Reference, blob: Descriptor, fill: Fill, sent: Sent = lambda _: None
    ) -> None:
        """One blob, unless it is there already."""
        await self.uploads(reference).push(blob, fill, sent)

    async def push_bytes(self, reference: Reference, data: bytes, media_type: str) -> Descriptor:
        """A small blob from memory."""
        blob = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        await self.push_blob(reference, blob, from_memory(data))
        return blob

    async def push_manifest(self, reference: Reference, manifest: Manifest | ManifestIndex) -> Descriptor:
        """Under the reference's tag, or under its digest alone when it has none.

        What it refers to (`subject`) gets to know of it, where the registry does not see to that itself.

        Raises: IntegrityError when it is too large; StorageError.
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
        """A further tag of a manifest that was pushed; nothing is sent where it has that already."""
        data = encode(manifest, str(reference))
        named = Reference(reference.registry, reference.repository, tag)
        found = await self.find(named)
        if found is None or found.digest != digest_of(data):
            await self._put(named, tag, data, manifest.media_type or INDEX)

    async def _put(self, reference: Reference, version: str, data: bytes, media_type: str) -> bool:
        """Whether the registry says that it knows subjects."""
        place = origin_of(reference)

        def put(call: Call) -> bool:
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
        """Others may write the same list, and registries cannot compare and swap: look afterwards, and again."""
        where = str(tag)
        for attempt in range(REFERRERS_TRIES):
            found = await self.find(tag)
            if found is not None and any(
                each.digest == descriptor.digest for each in parse_index(found, where).manifests
            ):
                return
            # Not decoded into records: what others have written there stays as it is.
            fields: dict[str, Any] = msgspec.json.decode(found.data) if found is not None else _empty_index()
            fields["manifests"] = [
                *_kept(fields.get("manifests") or [], descriptor),
                msgspec.to_builtins(descriptor),
            ]
            await self._put(tag, tag.tag, msgspec.json.encode(fields), INDEX)
            if attempt:
                await asyncio.sleep(random.random() * RETRIES.base_s * 2.0**attempt)  # noqa: S311
        raise StorageError(
            f"{where}: others write it all the time; {descriptor.digest} could not be added: try again"
        )


def _listed(made: Descriptor, manifest: Manifest) -> Descriptor:
    """As lists of referrers have it."""
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
    """Without what the new one takes the place of: the older trace of the same workload and tree."""
    if WORKLOAD not in new.annotations:
        return listed
    key = (new.artifact_type, new.annotations.get(TREE_DIGEST), new.annotations[WORKLOAD])

    def key_of(entry: dict[str, Any]) -> tuple[Any, Any, Any]:
        annotations = entry.get("annotations") or {}
        return entry.get("artifactType"), annotations.get(TREE_DIGEST), annotations.get(WORKLOAD)

    return [each for each in listed if key_of(each) != key]
