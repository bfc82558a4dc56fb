"""Trees in registries as stores: `oci://REGISTRY/REPOSITORY:TAG`, read by ranges. Read-only.

A tree artefact appears as the directory in docs/reference/formats.md. Its config is `tree.json`, its layers are
`index/...` and `packs/...`, and artefacts that refer to it are `traces/...`. The name may also be that of an
image; then the store shows the last tree pushed for it. bootseer.image.registry writes trees.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.errors import IntegrityError, NotFound, SourceChanged, StorageError, Truncated, Unavailable
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.http.client import HttpResponse
from bootseer.storage.http.headers import parse_content_range, parse_length
from bootseer.storage.oci.client import RegistryClient
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import (
    MAX_PACK_BYTES,
    MAX_TREE_INDEX_BYTES,
    TRACE,
    TREE_INDEX,
    TREE_PACK,
    Descriptor,
    TreeFiles,
    newest,
    trace_blob,
    trace_path,
)
from bootseer.storage.oci.options import RegistryPlace, read_options
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.oci.referrers import find_referrers, other_trees, read_tree
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnlyStore

MAX_SKIPPED_BYTES = 32 << 20  # of a blob, read in vain where a registry does not support ranges: all of any pack
TRACE_READS = 8  # of their manifests at once
TREE_JSON = "tree.json"
_BY_CONTENT = re.compile(r"(index|packs)/([0-9a-f]{64})")
_KINDS = {"index": (TREE_INDEX, MAX_TREE_INDEX_BYTES), "packs": (TREE_PACK, MAX_PACK_BYTES)}
_NONE: Mapping[str, object] = {}


class _KnownTrace(NamedTuple):
    manifest: str  # digest
    blob: Descriptor


class OciStore(ReadOnlyStore):
    """A `Store` whose writes raise StorageError.

    A blob's etag is its digest, from any source. `stat` makes `tree.json` follow the tag, and it is verified by
    its digest. Files named by content (index, packs) are found even after the tag has moved. `client`: closed by
    its owner; the options are then the owner's.
    """

    why_read_only = " here: a registry is read-only; push a tree instead"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        options: Mapping[str, object] = _NONE,
        client: RegistryClient | None = None,
    ) -> None:
        self.reference = parse_reference(url)
        self.url = str(self.reference)
        self._is_owner = client is None
        self.client = RegistryClient(read_options(options), timeout_s=timeout_s) if client is None else client
        self._counts = self.client.counts
        self.features = Features(
            creates_if_absent=False,
            concatenates=False,
            has_replicas=len(self.client.places(self.reference)) > 1,
        )
        self._resolving = threading.Lock()
        self._tree: TreeFiles | None = None
        self._files: dict[str, Descriptor] = {}  # by path, of all versions seen
        self._traces: dict[str, _KnownTrace] = {}  # by path

    async def stat(self, path: str) -> Stat:
        descriptor = await self._find(path, is_current=True)
        return Stat(descriptor.size, descriptor.digest)

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        check_path(self.url, path)
        check_offset(self.url, path, offset)
        blob = await self._find(path, is_current=False)
        if etag and etag != blob.digest:
            raise SourceChanged(f"{self.url}: {path!r} has changed since the read began")
        if offset + len(target) > blob.size:
            raise Truncated(
                f"{self.url}: bytes {offset} to {offset + len(target)} of {path!r}, which has {blob.size}"
            )
        if not target:
            return
        if path == TREE_JSON:  # small; the client skips a place that sends other content
            data = await self.client.run(
                lambda call: self.client.read_blob(self.reference, blob, call, attempt=attempt)
            )
            target[:] = data[offset : offset + len(target)]
            return
        landing = RevocableBuffer(target)
        try:
            await self.client.run(
                lambda call: self._read(blob, offset, landing, len(target), call, attempt), landing
            )
        finally:
            self._counts.add("read_bytes", landing.have)

    async def list(self, directory: str) -> list[Entry]:
        check_path(self.url, directory, is_folder=True)
        tree = await self._resolve()
        sizes = {path: blob.size for path, blob in tree.files.items()}
        if not directory or directory.partition("/")[0] == "traces":
            found_traces = await self._list_traces(tree)
            inside = [path for path in found_traces if path.startswith(f"{directory}/")]
            blobs = await aio.map_bounded(
                lambda path: self._read_trace(path, found_traces[path]), inside, width=TRACE_READS
            )
            sizes |= dict.fromkeys(found_traces, 0)
            sizes |= {path: blob.size for path, blob in zip(inside, blobs, strict=True)}
        prefix = f"{directory}/" if directory else ""
        found: dict[str, Entry] = {}
        for path, size in sizes.items():
            if path.startswith(prefix):
                name, slash, _ = path[len(prefix) :].partition("/")
                found[name] = Entry(name, 0 if slash else size, bool(slash), 0.0)
        return sorted(found.values())

    async def aclose(self) -> None:
        if self._is_owner:
            self.client.close()

    def statistics(self) -> dict[str, int]:
        """Return counts. `skipped_bytes`: read in vain from places without ranges."""
        return self._counts.to_dict()

    async def tree(self, *, is_current: bool = True) -> TreeFiles:
        """Return the tree of the name: its manifest and files. Raises: NotFound when there is none.

        Args: is_current: resolve the name now; else use the last result, as for the tree.json read before.
        """
        return self._tree if self._tree is not None and not is_current else await self._resolve()

    async def others(self) -> Sequence[OciStore]:
        """Return other trees of an image name: anyone may have pushed the first. They close with this store."""
        tree = await self.tree(is_current=False)
        found = await self.client.ask(
            lambda call: other_trees(self.client, self.reference, tree.manifest.digest, call)
        )
        return [OciStore(str(self.reference.at(each)), client=self.client) for each in found]

    # ---- contents ------------------------------------------------------------------------------------------

    async def _find(self, path: str, *, is_current: bool) -> Descriptor:
        """Return the blob of a path. `is_current`: as the registry has it now, where it can change."""
        check_path(self.url, path)
        if path.startswith("traces/"):
            if is_current or path not in self._traces:
                await self._find_trace(path)
            blob = self._traces[path].blob if path in self._traces else None
        else:
            if self._tree is None or (is_current and path == TREE_JSON):
                await self._resolve()
            blob = self._files.get(path)
            if blob is None and (named := _BY_CONTENT.fullmatch(path)) is not None:
                blob = self._files[path] = await self._find_blob(named[1], named[2])
        if blob is None:
            raise NotFound(f"{self.url}: there is no file {path!r}")
        return blob

    async def _resolve(self) -> TreeFiles:
        """Resolve the name; concurrent callers share one request."""
        known = self._tree

        def resolve(call: RegistryCall) -> TreeFiles:
            with self._resolving:
                if self._tree is None or self._tree is known:
                    tree = read_tree(self.client, self.reference, call)
                    self._files = {**self._files, **tree.files}  # before other threads see that there is a tree
                    self._tree = tree
                return self._tree

        return await self.client.ask(resolve)

    async def _find_blob(self, kind: str, digest: str) -> Descriptor:
        """Find a blob of a tree that the name no longer means, or not first. Raises: NotFound."""
        media_type, max_bytes = _KINDS[kind]

        def find(place: RegistryPlace, call: RegistryCall) -> Descriptor:
            exchange = self.client.get(place, f"blobs/sha256:{digest}", {}, call, method="HEAD")
            where = f"{self.url}: {kind}/{digest}"
            if exchange.status != 200:
                raise self.client.refusal(exchange, place, where, call)
            size = parse_length(exchange.headers.get("Content-Length", ""))
            exchange.finish()
            if size is None or size > max_bytes:
                raise IntegrityError(f"{where}: {size} bytes; at most {max_bytes}")
            return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=size)

        return await self.client.ask(
            lambda call: self.client.from_any(self.reference, lambda place: find(place, call))
        )

    async def _list_traces(self, tree: TreeFiles) -> Mapping[str, Descriptor]:
        """Return the newest manifest of each workload, by path."""
        found = await self.client.ask(
            lambda call: find_referrers(self.client, self.reference, tree.manifest.digest, TRACE, call)
        )
        by_path: dict[str, list[Descriptor]] = {}
        for each in found:
            by_path.setdefault(trace_path(each), []).append(each)
        by_path.pop("", None)
        return {path: max_of for path, each in by_path.items() if (max_of := newest(each)) is not None}

    async def _find_trace(self, path: str) -> None:
        tree = self._tree or await self._resolve()
        found = (await self._list_traces(tree)).get(path)
        if found is None:
            self._traces.pop(path, None)
        else:
            await self._read_trace(path, found)

    async def _read_trace(self, path: str, manifest: Descriptor) -> Descriptor:
        """Return the blob of a trace; read its manifest unless it is known."""
        known = self._traces.get(path)
        if known is None or known.manifest != manifest.digest:
            reference = self.reference.at(manifest.digest)
            blob = await self.client.ask(
                lambda call: trace_blob(self.client.read_document(reference, call), self.url)
            )
            known = self._traces[path] = _KnownTrace(manifest.digest, blob)
        return known.blob

    # ---- one range, in a thread ------------------------------------------------------------------------------

    def _read(
        self,
        blob: Descriptor,
        offset: int,
        landing: RevocableBuffer,
        length: int,
        call: RegistryCall,
        attempt: int,
    ) -> None:
        span = {"Range": f"bytes={offset}-{offset + length - 1}"}
        exchange = self.client.begin_blob(self.reference, blob.digest, span, call, attempt=attempt)
        try:
            skipped, expected = _check_answer(exchange, blob, offset, length)
        except BaseException:
            exchange.drop()
            raise

        def on_skipped(count: int) -> None:
            self._counts.add("skipped_bytes", count)
            call.touch()

        with exchange.reading():
            exchange.skip(skipped, on_skipped)
            exchange.land(landing, expected)
        exchange.finish()
        if expected < length:
            raise Unavailable(f"{exchange.shown}: the registry sent {expected} of {length} bytes")


def _check_answer(exchange: HttpResponse, blob: Descriptor, offset: int, length: int) -> tuple[int, int]:
    """Return how many bytes precede the requested ones, and how many of those follow. Raises for other answers."""
    encoding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(f"{exchange.shown}: the registry sends it as {encoding}, which allows no ranges")
    sent = parse_length(exchange.headers.get("Content-Length", ""))
    asked = f"bytes {offset}-{offset + length - 1} of {blob.size}"
    if exchange.status == 416:
        raise Unavailable(f"{exchange.shown}: the registry does not have {asked}, which its manifest names")
    if exchange.status == 206:
        found = parse_content_range(exchange.headers.get("Content-Range", ""))
        if found is None:
            raise Unavailable(f"{exchange.shown}: the registry does not report which bytes it sent for {asked}")
        count = found.last - found.first + 1
        is_ours = found.first == offset and count <= length and found.total in (None, blob.size)
        if not is_ours or sent not in (None, count):
            raise Unavailable(
                f"{exchange.shown}: requested {asked}, the registry sent {found.first}-{found.last} of"
                f" {found.total} in {sent} bytes"
            )
        return 0, count
    if sent not in (None, blob.size):
        raise Unavailable(f"{exchange.shown}: the registry sends {sent} bytes, its manifest names {blob.size}")
    if offset > MAX_SKIPPED_BYTES:
        raise StorageError(
            f"{exchange.shown}: the registry does not support ranges, and {asked} are too far from the start: use"
            " another"
        )
    return offset, length
