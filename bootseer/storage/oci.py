"""Trees in registries as stores: `oci://REGISTRY/REPOSITORY:TAG`, read by ranges. Reading only.

A tree artefact is shown as the folder that docs/formats.md describes: its config is `tree.json`, its layers are
`index/...` and `packs/...`, artefacts that refer to it are `traces/...`. The name may also be that of an image:
then it is the tree that was pushed last for it. What is written goes through bootseer.image.registry.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence

from bootseer.errors import IntegrityError, NotFound, SourceChanged, StorageError, Truncated, Unavailable
from bootseer.storage.http_client import STEP_BYTES, Exchange
from bootseer.storage.landing import Landing
from bootseer.storage.oci_client import RegistryClient
from bootseer.storage.oci_headers import parse_content_range, parse_length
from bootseer.storage.oci_http import Call
from bootseer.storage.oci_manifest import (
    MOST_PACK_BYTES,
    MOST_TREE_INDEX_BYTES,
    TRACE,
    TREE_INDEX,
    TREE_PACK,
    Descriptor,
    TreeFiles,
    newest,
    trace_blob,
    trace_path,
)
from bootseer.storage.oci_options import Place, read_options
from bootseer.storage.oci_reference import parse_reference
from bootseer.storage.oci_referrers import find_referrers, other_trees, read_tree
from bootseer.storage.paths import check_offset, check_path
from bootseer.storage.protocol import Entry, Features, Stat
from bootseer.storage.read_only import ReadOnly

MOST_SKIPPED_BYTES = 32 << 20  # of a blob, read for nothing where a registry does not know ranges: all of any pack
TREE_JSON = "tree.json"
_BY_CONTENT = re.compile(r"(index|packs)/([0-9a-f]{64})")
_KINDS = {"index": (TREE_INDEX, MOST_TREE_INDEX_BYTES), "packs": (TREE_PACK, MOST_PACK_BYTES)}
_NONE: Mapping[str, object] = {}


class OciStore(ReadOnly):
    """Implements `Store`; what writes raises StorageError.

    A blob's etag is its digest, wherever it comes from. `tree.json` follows the tag whenever `stat` looks, and is
    compared with its digest. What is named by its content (index, packs) is found when the tag has moved on, too.
    `client`: of somebody who closes it; then the options are his.
    """

    why_read_only = " here: a registry is only read; push a tree instead"

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
        self._files: dict[str, Descriptor] = {}  # by path, of all versions that were seen
        self._traces: dict[str, Descriptor] = {}  # by path: the blob

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
            raise SourceChanged(f"{self.url}: {path!r} is another version than the one that is being read")
        if offset + len(target) > blob.size:
            raise Truncated(
                f"{self.url}: bytes {offset} to {offset + len(target)} of {path!r}, which has {blob.size}"
            )
        if not target:
            return
        if path == TREE_JSON:  # small; a place that sends another one is passed over
            data = await self.client.run(
                lambda call: self.client.read_blob(self.reference, blob, call, attempt=attempt)
            )
            target[:] = data[offset : offset + len(target)]
            return
        landing = Landing(target)
        try:
            await self.client.run(
                lambda call: self._read(blob, offset, landing, len(target), call, attempt), landing
            )
        finally:
            self._counts.add("read_bytes", landing.have)

    async def list(self, folder: str) -> list[Entry]:
        check_path(self.url, folder, is_folder=True)
        tree = await self._resolve()
        sizes = {path: blob.size for path, blob in tree.files.items()}
        if not folder or folder.partition("/")[0] == "traces":
            for path in await self._list_traces(tree):
                sizes[path] = (
                    (await self._find(path, is_current=False)).size if path.startswith(f"{folder}/") else 0
                )
        prefix = f"{folder}/" if folder else ""
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
        """`skipped_bytes`: read for nothing, as a place does not know ranges."""
        return self._counts.to_dict()

    async def tree(self, *, is_current: bool = True) -> TreeFiles:
        """The tree that the name means: its manifest and files. Raises: NotFound when there is none.

        Args: is_current: now; else when it was looked up last, as for the tree.json that was read before.
        """
        return self._tree if self._tree is not None and not is_current else await self._resolve()

    async def others(self) -> Sequence[OciStore]:
        """Further trees that the name of an image may mean: its first one may be anybody's. Closed with this."""
        tree = await self.tree(is_current=False)
        found = await self.client.ask(
            lambda call: other_trees(self.client, self.reference, tree.manifest.digest, call)
        )
        return [OciStore(str(self.reference.at(each)), client=self.client) for each in found]

    # ---- what there is -------------------------------------------------------------------------------------

    async def _find(self, path: str, *, is_current: bool) -> Descriptor:
        """The blob of a path; `is_current`: as the registry has it now, where that can change."""
        check_path(self.url, path)
        if path.startswith("traces/"):
            if is_current or path not in self._traces:
                await self._find_trace(path)
            blob = self._traces.get(path)
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
        """What the name means now; many who ask at once ask the registry once."""
        known = self._tree

        def resolve(call: Call) -> TreeFiles:
            with self._resolving:
                if self._tree is None or self._tree is known:
                    tree = read_tree(self.client, self.reference, call)
                    self._files = {**self._files, **tree.files}  # before others see that there is a tree
                    self._tree = tree
                return self._tree

        return await self.client.ask(resolve)

    async def _find_blob(self, kind: str, digest: str) -> Descriptor:
        """Of a tree that the name does not mean any more, or not first. Raises: NotFound."""
        media_type, most_bytes = _KINDS[kind]

        def find(place: Place, call: Call) -> Descriptor:
            exchange = self.client.get(place, f"blobs/sha256:{digest}", {}, call, method="HEAD")
            where = f"{self.url}: {kind}/{digest}"
            if exchange.status != 200:
                raise self.client.refusal(exchange, place, where, call)
            size = parse_length(exchange.headers.get("Content-Length", ""))
            exchange.finish()
            if size is None or size > most_bytes:
                raise IntegrityError(f"{where}: {size} bytes; at most {most_bytes}")
            return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=size)

        return await self.client.ask(
            lambda call: self.client.from_any(self.reference, lambda place: find(place, call))
        )

    async def _list_traces(self, tree: TreeFiles) -> Mapping[str, Descriptor]:
        """Newest manifest of each workload, by path."""
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
            return
        reference = self.reference.at(found.digest)
        self._traces[path] = await self.client.ask(
            lambda call: trace_blob(self.client.read_document(reference, call), self.url)
        )

    # ---- one range, in a thread ------------------------------------------------------------------------------

    def _read(
        self, blob: Descriptor, offset: int, landing: Landing, length: int, call: Call, attempt: int
    ) -> None:
        span = {"Range": f"bytes={offset}-{offset + length - 1}"}
        exchange = self.client.begin_blob(self.reference, blob.digest, span, call, attempt=attempt)
        try:
            skipped, expected = _check_answer(exchange, blob, offset, length)
        except BaseException:
            exchange.drop()
            raise
        with exchange.reading():
            self._skip(exchange, skipped, call)
            exchange.land(landing, expected)
        exchange.finish()
        if expected < length:
            raise Unavailable(f"{exchange.shown}: the registry sent {expected} of {length} bytes")

    def _skip(self, exchange: Exchange, count: int, call: Call) -> None:
        rest = memoryview(bytearray(min(count, STEP_BYTES)))
        while count:
            came = exchange.response.readinto(rest[: min(count, len(rest))])
            if not came:
                raise Unavailable(f"{exchange.shown}: the connection ended before the bytes that were asked for")
            count -= came
            self._counts.add("skipped_bytes", came)
            call.touch()


def _check_answer(exchange: Exchange, blob: Descriptor, offset: int, length: int) -> tuple[int, int]:
    """How many bytes come before those that were asked for, and how many of those. Raises for other answers."""
    encoding = exchange.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(f"{exchange.shown}: the registry sends it as {encoding}, of which no range can be used")
    sent = parse_length(exchange.headers.get("Content-Length", ""))
    asked = f"bytes {offset}-{offset + length - 1} of {blob.size}"
    if exchange.status == 416:
        raise Unavailable(f"{exchange.shown}: the registry does not have {asked}, which its manifest names")
    if exchange.status == 206:
        found = parse_content_range(exchange.headers.get("Content-Range", ""))
        if found is None:
            raise Unavailable(f"{exchange.shown}: the registry does not say which bytes it sent for {asked}")
        count = found.last - found.first + 1
        is_ours = found.first == offset and count <= length and found.total in (None, blob.size)
        if not is_ours or sent not in (None, count):
            raise Unavailable(
                f"{exchange.shown}: asked for {asked}, the registry sent {found.first}-{found.last} of"
                f" {found.total} in {sent} bytes"
            )
        return 0, count
    if sent not in (None, blob.size):
        raise Unavailable(f"{exchange.shown}: the registry sends {sent} bytes, its manifest says {blob.size}")
    if offset > MOST_SKIPPED_BYTES:
        raise StorageError(
            f"{exchange.shown}: the registry does not know ranges, and {asked} are too far from the start: use"
            " another"
        )
    return offset, length
