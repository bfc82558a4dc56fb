"""Trees in registries as stores: what lies about ranges and digests, tags that move, referrers, mirrors, TLS."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    BootseerError,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    NotFound,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
    Untrusted,
)
from bootseer.image.artifacts import pull_tree
from bootseer.image.registry import Registry
from bootseer.storage import RangeReader, RangeRequest, open_store
from bootseer.storage.memory import forget
from bootseer.storage.oci import store as oci_module
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import (
    CREATED,
    EMPTY,
    INDEX,
    MANIFEST,
    TRACE,
    TREE,
    TREE_DIGEST,
    WORKLOAD,
    digest_of,
)
from bootseer.storage.oci.reference import parse_reference, tree_tag
from bootseer.storage.oci.store import OciStore
from bootseer.tree.opening import open_tree, read_head
from bootseer.trust import SigningKey, Trust
from bootseer.trust.keys import PublicKey, TrustedKey
from tests.contract.servers import serve
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.testing.registry import Certificates, make_certificates
from tests.testing.store_suite import read, runs
from tests.unit.bootseer.image.small_registry import SmallRegistry
from tests.unit.bootseer.image.trees import WORKLOAD as ONE_WORKLOAD
from tests.unit.bootseer.image.trees import SmallTree, make_tree
from tests.unit.bootseer.storage.http.test_store import Proxy

REPOSITORY = "team/app"
TREE_OF = make_tree()
PACK = TREE_OF.packs[0]
DATA = TREE_OF.files[PACK]
MIDDLE, LENGTH = 100_000, 200_000
KEPT = 50_000
IMAGE = json.dumps(
    {
        "schemaVersion": 2, "mediaType": MANIFEST, "layers": [],
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(b"{}"), "size": 2},
    }
).encode()  # fmt: skip


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def options(**more: Any) -> dict[str, object]:
    return {"auth_file": "/nowhere", "certs_folders": [], "mirrors": "", "plain_http": "", **more}


def store_of(host: str, version: str = ":v1", *, timeout_s: float = 5.0, **more: Any) -> OciStore:
    store = open_store(f"oci://{host}/{REPOSITORY}{version}", timeout_s=timeout_s, options=options(**more))
    assert isinstance(store, OciStore)
    return store


def files_of(tree: SmallTree, manifest: bytes | None = None) -> dict[str, bytes]:
    """As a plain web server has them."""
    manifest = manifest or tree.manifest()
    files = {f"v2/{REPOSITORY}/blobs/{digest_of(data)}": data for data in tree.files.values()}
    return files | {f"v2/{REPOSITORY}/manifests/{name}": manifest for name in ("v1", digest_of(manifest))}


def add_tree(small: SmallRegistry, tree: SmallTree, *tags: str) -> str:
    for data in tree.files.values():
        small.add_blob(data)
    return small.add_document(REPOSITORY, tree.manifest(), *tags)


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer(files_of(TREE_OF)) as server:
        yield server


@pytest.fixture
def small() -> Iterator[SmallRegistry]:
    registry = SmallRegistry()
    with registry.serve():
        yield registry


def host_of(server: FaultyHttpServer) -> str:
    return server.url.removeprefix("http://")


BLOB = f"v2/{REPOSITORY}/blobs/{digest_of(DATA)}"


def fault(kind: HttpKind, **more: Any) -> HttpFault:
    return HttpFault(kind, **{"path": BLOB, "keep_bytes": KEPT, **more})


# ---- a tree --------------------------------------------------------------------------------------------------


@runs()
async def test_a_tree_is_a_directory(server: FaultyHttpServer) -> None:
    store = store_of(host_of(server))
    assert store.url == f"oci://{host_of(server)}/{REPOSITORY}:v1"
    for path, data in TREE_OF.files.items():
        found = await store.stat(path)
        assert (found.size, found.etag) == (len(data), digest_of(data))
        assert await read(store, path, 0, len(data), etag=found.etag) == data
    assert [entry.name for entry in await store.list("")] == ["index", "packs", "tree.json"]
    assert [entry[:3] for entry in await store.list("packs")] == sorted(
        (path.removeprefix("packs/"), len(TREE_OF.files[path]), False) for path in TREE_OF.packs
    )
    assert await store.list("traces") == []
    for path in (
        "packs/" + "0" * 64,
        "traces/x",
        f"traces/{TREE_OF.digest}/{ONE_WORKLOAD}.json",
        "tree.jso",
        "packs",
    ):
        with pytest.raises(NotFound):
            await store.stat(path)
    await store.aclose()


@runs()
async def test_many_ranges_at_once(server: FaultyHttpServer) -> None:
    store = store_of(host_of(server))
    reader = RangeReader(store, piece_bytes=64 << 10)
    targets = {path: bytearray(len(data)) for path, data in TREE_OF.files.items()}
    await reader.read([RangeRequest(path, 0, memoryview(target)) for path, target in targets.items()])
    assert {path: bytes(target) for path, target in targets.items()} == TREE_OF.files
    assert server.connections < 30, "connections are kept"
    await store.aclose()


@runs()
async def test_many_who_ask_at_once_ask_once(server: FaultyHttpServer) -> None:
    store = store_of(host_of(server))
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(read(store, PACK, number, 10))
    assert server.count(path="*/manifests/*") == 1
    await store.aclose()


# ---- what lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "kept", "match"),
    [
        (HttpKind.SHORT, Unavailable, KEPT, "ended after|connection"),
        (HttpKind.RESET, Unavailable, KEPT, "connection"),
        (HttpKind.STALL, StorageTimeout, KEPT, f"{digest_of(DATA)}: no"),
        (HttpKind.SILENCE, StorageTimeout, 0, f"{digest_of(DATA)}: no"),
        (HttpKind.LESS, Unavailable, KEPT, "50000 of 200000"),
        (HttpKind.OTHER_RANGE, Unavailable, 0, "requested bytes 100000-299999 .*sent 100001-300000"),
        (HttpKind.LYING_RANGE, Unavailable, 0, "does not report which bytes"),
    ],
)
@runs(limit_s=30.0)
async def test_wrong_answers(
    server: FaultyHttpServer, kind: HttpKind, error: type[BootseerError], kept: int, match: str
) -> None:
    store = store_of(host_of(server), timeout_s=0.4)
    await store.stat(PACK)
    server.plan.append(fault(kind))
    memory = memoryview(bytearray(LENGTH))
    with pytest.raises(StorageError, match=match) as caught:
        await store.read_into(PACK, MIDDLE, memory)
    assert type(caught.value) is error
    assert caught.value.read_bytes <= kept
    assert memory[: caught.value.read_bytes] == DATA[MIDDLE : MIDDLE + caught.value.read_bytes]
    server.plan = [fault(kind, requests={0})]
    target = bytearray(LENGTH)
    await RangeReader(store, jitter=lambda: 0.1).read([RangeRequest(PACK, MIDDLE, memoryview(target))])
    assert target == DATA[MIDDLE : MIDDLE + LENGTH], "another try brings the rest"
    await store.aclose()


@pytest.mark.parametrize("offset", [0, 1, MIDDLE, len(DATA) - LENGTH])
@runs()
async def test_a_registry_that_does_not_know_ranges(server: FaultyHttpServer, offset: int) -> None:
    store = store_of(host_of(server))
    server.plan.append(fault(HttpKind.FULL))
    assert await read(store, PACK, offset, LENGTH) == DATA[offset : offset + LENGTH]
    assert store.statistics()["skipped_bytes"] == offset
    assert store.statistics()["read_bytes"] >= LENGTH
    await store.aclose()


@runs()
async def test_what_is_read_for_nothing_is_bounded(
    server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci_module, "MAX_SKIPPED_BYTES", MIDDLE - 1)
    store = store_of(host_of(server))
    server.plan.append(fault(HttpKind.FULL))
    with pytest.raises(StorageError, match="does not support ranges") as caught:
        await read(store, PACK, MIDDLE, LENGTH)
    assert not caught.value.retryable
    await store.aclose()


@pytest.mark.parametrize("more", [1, -1, 1_000_000])
@pytest.mark.parametrize("kind", [None, HttpKind.FULL])
@runs()
async def test_a_blob_of_another_size(more: int, kind: HttpKind | None) -> None:
    manifest = json.loads(TREE_OF.manifest())
    manifest["layers"][1]["size"] += more
    with FaultyHttpServer(files_of(TREE_OF, json.dumps(manifest).encode())) as server:
        server.plan += [fault(kind)] if kind else []
        store = store_of(host_of(server))
        with pytest.raises(Unavailable, match=r"manifest|requested"):
            await read(store, PACK, MIDDLE, LENGTH)
        await store.aclose()


@runs()
async def test_offsets_past_the_end_are_not_asked_for(server: FaultyHttpServer) -> None:
    store = store_of(host_of(server))
    await store.stat(PACK)
    before = len(server.requests)
    with pytest.raises(Truncated):
        await read(store, PACK, len(DATA) - 1, 2)
    assert len(server.requests) == before
    await store.aclose()


@runs()
async def test_a_registry_that_asks_to_wait(server: FaultyHttpServer) -> None:
    store = store_of(host_of(server))
    server.plan.append(fault(HttpKind.STATUS, status=429, retry_after_s=1, requests={0}))
    target = bytearray(LENGTH)
    started_s = time.monotonic()
    await RangeReader(store).read([RangeRequest(PACK, MIDDLE, memoryview(target))])
    assert target == DATA[MIDDLE : MIDDLE + LENGTH]
    assert time.monotonic() - started_s >= 1.0
    await store.aclose()


@runs()
async def test_answers_that_are_encoded(small: SmallRegistry) -> None:
    add_tree(small, TREE_OF, "v1")
    store = store_of(small.host)
    await store.stat(PACK)
    small.statuses = [(206, {"Content-Encoding": "gzip", "Content-Range": f"bytes 0-9/{len(DATA)}"}, DATA[:10])]
    with pytest.raises(StorageError, match="gzip"):
        await read(store, PACK, 0, 10)
    small.statuses = [(416, {"Content-Range": f"bytes */{len(DATA)}"}, b"")]
    with pytest.raises(Unavailable, match="manifest"):
        await read(store, PACK, 0, 10)
    await store.aclose()


# ---- manifests that lie --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "headers", "error", "match"),
    [
        (b"no JSON", {}, IntegrityError, "not a manifest"),
        (b"{}", {}, IntegrityError, "not a manifest"),
        (TREE_OF.manifest(), {"Docker-Content-Digest": digest_of(b"other")}, DigestMismatch, "other bytes"),
        (TREE_OF.manifest(), {"Content-Type": INDEX}, IntegrityError, "calls"),
        (b" " * (5 << 20), {}, StorageError, "larger than"),
        (IMAGE, {}, NotFound, "bootseer image build"),
        (b'{"schemaVersion": 2, "manifests": [], "layers": []}', {}, IntegrityError, "at once"),
    ],
)
@runs()
async def test_manifests_that_lie(
    document: bytes, headers: dict[str, str], error: type[BootseerError], match: str, small: SmallRegistry
) -> None:
    small.statuses = [(200, {"Content-Type": MANIFEST, **headers}, document)]
    store = store_of(small.host)
    with pytest.raises(error, match=match) as caught:
        await store.stat("tree.json")
    assert REPOSITORY in str(caught.value)
    await store.aclose()


@runs()
async def test_a_pinned_manifest_is_that_one_or_an_error(small: SmallRegistry) -> None:
    digest = add_tree(small, TREE_OF, "v1")
    store = store_of(small.host, f"@{digest}")
    assert await read(store, PACK, 5, 10) == DATA[5:15]
    small.documents[f"{REPOSITORY}/manifests/{digest}"] = (make_tree(seed=1).manifest(), MANIFEST)
    other = store_of(small.host, f":v1@{digest}")
    with pytest.raises(DigestMismatch):
        await other.stat("tree.json")
    await store.aclose()
    await other.aclose()


@runs()
async def test_what_there_is_not(small: SmallRegistry) -> None:
    store = store_of(small.host)
    with pytest.raises(NotFound, match=r"team/app:v1.*nowhere \(NOT_FOUND\)"):
        await store.stat("tree.json")
    await store.aclose()


@runs()
async def test_a_tag_that_moves(small: SmallRegistry) -> None:
    add_tree(small, TREE_OF, "v1")
    store = store_of(small.host)
    before = await store.stat("tree.json")
    other = make_tree(seed=1)
    add_tree(small, other, "v1")
    assert await read(store, "tree.json", 0, before.size, etag=before.etag) == TREE_OF.files["tree.json"]
    after = await store.stat("tree.json")
    assert after.etag == digest_of(other.files["tree.json"])
    with pytest.raises(SourceChanged):
        await read(store, "tree.json", 0, before.size, etag=before.etag)
    for tree in (TREE_OF, other):  # whoever opened the old one goes on reading it
        path = tree.packs[0]
        assert await read(store, path, 7, 10) == tree.files[path][7:17]
    await store.aclose()


# ---- what refers to what -------------------------------------------------------------------------------------


def listed(digest: str, size: int, kind: str, **annotations: str) -> dict[str, Any]:
    return {
        "mediaType": MANIFEST, "digest": digest, "size": size, "artifactType": kind, "annotations": annotations,
    }  # fmt: skip


def in_tag(small: SmallRegistry, digest: str, entries: Sequence[dict[str, Any]]) -> None:
    body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    small.add_document(REPOSITORY, json.dumps(body).encode(), digest.replace(":", "-"), media_type=INDEX)


@pytest.mark.parametrize("has_api", [True, False])
@runs()
async def test_the_tree_of_an_image(has_api: bool, small: SmallRegistry) -> None:
    image = small.add_document(REPOSITORY, IMAGE, "v1")
    others = [make_tree(seed=seed, packs=1) for seed in (1, 2)]
    entries = [listed(digest_of(b"sbom"), 4, "application/spdx+json", **{CREATED: "2027"})]
    for tree, created in zip((TREE_OF, *others), ("2026-03-01", "2026-01-01", "2026-02-01"), strict=True):
        entries.append(listed(add_tree(small, tree), len(tree.manifest()), TREE, **{CREATED: created}))
    if has_api:
        small.referrers = {image: [entries[:2], entries[2:]]}
    else:
        in_tag(small, image, entries)
    store = store_of(small.host)
    assert await read(store, PACK, 5, 10) == DATA[5:15], "the newest"
    (page, *_) = [each for each in small.seen if "/referrers/" in each.path]
    assert page.query["artifactType"] == [TREE]
    await store.stat("tree.json")
    assert small.count("GET .*/referrers/.*") == (4 if has_api else 1), (
        "what it does not know it is not asked again"
    )
    await store.aclose()


def add_trace(small: SmallRegistry, workload: str, created: str, *, runs: int) -> dict[str, Any]:
    """Store a trace with its manifest; return its entry in a list of referrers."""
    data = TREE_OF.trace(workload, runs=runs)
    manifest = json.dumps(
        {
            "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": TRACE,
            "config": {"mediaType": EMPTY, "digest": digest_of(b"{}"), "size": 2},
            "layers": [{"mediaType": TRACE, "digest": small.add_blob(data), "size": len(data)}],
        }
    ).encode()  # fmt: skip
    digest = small.add_document(REPOSITORY, manifest)
    words = {TREE_DIGEST: TREE_OF.digest, WORKLOAD: workload, CREATED: created}
    return listed(digest, len(manifest), TRACE, **words)


@pytest.mark.parametrize("has_api", [True, False])
@runs()
async def test_traces(has_api: bool, small: SmallRegistry) -> None:
    subject = add_tree(small, TREE_OF, "v1")
    entries = []
    for run, (workload, created) in enumerate(
        ((ONE_WORKLOAD, "2026-01"), (ONE_WORKLOAD, "2026-02"), ("f" * 16, "2026"))
    ):
        entries.append(add_trace(small, workload, created, runs=run + 1))
    entries.append(listed(digest_of(b"x"), 1, TRACE, **{TREE_DIGEST: "../..", WORKLOAD: ONE_WORKLOAD}))
    if has_api:
        small.referrers = {subject: [entries]}
    else:
        in_tag(small, subject, entries)
    store = store_of(small.host)
    path = f"traces/{TREE_OF.digest}/{ONE_WORKLOAD}.json"
    newest = TREE_OF.trace(ONE_WORKLOAD, runs=2)
    found = await store.stat(path)
    assert (found.size, found.etag) == (len(newest), digest_of(newest))
    assert await read(store, path, 0, found.size, etag=found.etag) == newest
    assert [entry.name for entry in await store.list("")] == ["index", "packs", "traces", "tree.json"]
    assert [entry[:3] for entry in await store.list("traces")] == [(TREE_OF.digest, 0, True)]
    names = [(entry.name, entry.size) for entry in await store.list(f"traces/{TREE_OF.digest}")]
    assert names == [(f"{ONE_WORKLOAD}.json", len(newest)), (f"{'f' * 16}.json", len(newest))]
    await store.aclose()


@runs()
async def test_many_traces_cost_one_list_and_a_request_each(small: SmallRegistry) -> None:
    count = 40
    subject = add_tree(small, TREE_OF, "v1")
    entries = [add_trace(small, f"{number:016x}", "2026", runs=1) for number in range(count)]
    small.referrers = {subject: [entries]}
    store = store_of(small.host)
    await store.tree()
    before = len(small.seen)
    found = await store.list(f"traces/{TREE_OF.digest}")
    assert [entry.name for entry in found] == [f"{number:016x}.json" for number in range(count)]
    assert all(entry.size for entry in found)
    requests = [each.path for each in small.seen[before:]]
    assert sum("/referrers/" in path for path in requests) == 1
    assert sum("/manifests/sha256:" in path for path in requests) == count
    await store.aclose()


@runs()
async def test_pages_of_another_server_are_not_asked_for(small: SmallRegistry) -> None:
    small.add_document(REPOSITORY, IMAGE, "v1")
    store = store_of(small.host)
    await store.client.run(lambda call: store.client.read_document(store.reference, call))
    body = b'{"schemaVersion": 2, "manifests": []}'
    answer = (200, {"Content-Type": INDEX, "Link": '<http://127.0.0.1:1/x>; rel="next"'}, body)
    small.statuses = [(200, {"Content-Type": MANIFEST}, IMAGE), (404, {}, b""), answer]
    with pytest.raises(IntegrityError, match="another server"):
        await store.stat("tree.json")
    await store.aclose()


# ---- mirrors -------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror() -> Iterator[SmallRegistry]:
    registry = SmallRegistry()
    with registry.serve():
        yield registry


def mirrored(small: SmallRegistry, mirror: SmallRegistry, **more: Any) -> OciStore:
    return store_of(small.host, mirrors={f"{small.host}/team": f"{mirror.host}/cached"}, **more)


def in_mirror(small: SmallRegistry, mirror: SmallRegistry) -> None:
    mirror.blobs = dict(small.blobs)
    mirror.documents = {name.replace("team/", "cached/", 1): each for name, each in small.documents.items()}


@runs()
async def test_a_mirror_is_asked_first(small: SmallRegistry, mirror: SmallRegistry) -> None:
    add_tree(small, TREE_OF, "v1")
    in_mirror(small, mirror)
    store = mirrored(small, mirror)
    assert await read(store, PACK, 5, 10) == DATA[5:15]
    assert [each.path for each in small.seen if each.path != "/v2/"] == []
    assert mirror.count("GET /v2/cached/app/.*") == 2
    assert store.features.has_replicas
    assert await read(store, PACK, 5, 10, attempt=1) == DATA[5:15], "another way is the registry itself"
    assert small.count("GET /v2/team/app/blobs/.*") == 1
    assert not store_of(small.host).features.has_replicas
    await store.aclose()


@pytest.mark.parametrize("trouble", ["gone", "empty", "password", "other", "busy"])
@runs()
async def test_a_mirror_that_is_of_no_use(trouble: str, small: SmallRegistry, mirror: SmallRegistry) -> None:
    add_tree(small, TREE_OF, "v1")
    in_mirror(small, mirror)
    match trouble:
        case "empty":
            mirror.documents.clear()
        case "password":
            mirror.auth = "basic"
        case "other":
            mirror.documents = dict.fromkeys(mirror.documents, (b"{}", MANIFEST))
        case "busy":
            mirror.statuses = [(429, {"Retry-After": "100"}, b"")] * 9
    gone = {small.host: "127.0.0.1:1"}
    store = store_of(small.host, mirrors=gone) if trouble == "gone" else mirrored(small, mirror)
    for _ in range(3):
        assert await read(store, PACK, 5, 10) == DATA[5:15]
    assert len([each for each in mirror.seen if each.path != "/v2/"]) <= 1, "it rests for a while"
    await store.aclose()


@runs()
async def test_a_mirror_whose_password_is_not_to_be_had(
    small: SmallRegistry, mirror: SmallRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_tree(small, TREE_OF, "v1")
    in_mirror(small, mirror)
    mirror.auth = "basic"
    (tmp_path / "auth.json").write_text(json.dumps({"credHelpers": {mirror.host: "not-here"}}))
    store = mirrored(small, mirror, auth_file=os.fspath(tmp_path / "auth.json"))
    for attempt in range(4):
        assert await read(store, PACK, 5, 10, attempt=attempt) == DATA[5:15]
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"the mirror {mirror.host}/cached/app is not used" in told
    assert "docker-credential-not-here" in told and "not installed" in told
    await store.aclose()
    small.auth = "basic"
    (tmp_path / "auth.json").write_text(json.dumps({"credHelpers": {small.host: "not-here"}}))
    store = store_of(small.host, auth_file=os.fspath(tmp_path / "auth.json"))
    with pytest.raises(ConfigError, match="not installed"):
        await store.stat("tree.json")
    await store.aclose()


@runs()
async def test_a_head_that_is_not_what_it_is_called(small: SmallRegistry, mirror: SmallRegistry) -> None:
    """A place may send a good one first and another one then."""
    add_tree(small, TREE_OF, "v1")
    in_mirror(small, mirror)
    head = TREE_OF.files["tree.json"]
    mirror.blobs[digest_of(head)] = head[::-1]
    store = mirrored(small, mirror)
    assert await read(store, "tree.json", 3, 20) == head[3:23], "from the registry itself"
    await store.aclose()
    small.blobs[digest_of(head)] = head[::-1]
    store = store_of(small.host)
    for offset, length in ((0, len(head)), (3, 20)):
        with pytest.raises(DigestMismatch, match="other bytes"):
            await read(store, "tree.json", offset, length)
    await store.aclose()


# ---- the tree of an image ------------------------------------------------------------------------------------


def refers(tree: SmallTree, image: str, **annotations: str) -> tuple[bytes, dict[str, object]]:
    """A tree's manifest that refers to an image, and how it is listed."""
    fields = json.loads(tree.manifest())
    fields["subject"] = {"mediaType": MANIFEST, "digest": image, "size": len(IMAGE)}
    fields["annotations"] = {TREE_DIGEST: tree.digest, **annotations}
    data = json.dumps(fields).encode()
    listed = {"mediaType": MANIFEST, "digest": digest_of(data), "size": len(data), "artifactType": TREE}
    return data, {**listed, "annotations": fields["annotations"]}


@runs()
async def test_the_tree_that_was_pushed_last_has_a_tag(small: SmallRegistry) -> None:
    image = small.add_document(REPOSITORY, IMAGE, "v1")
    tag = tree_tag(image)
    assert tag == image.replace(":", "-") + ".bootseer"
    trees = [make_tree(packs=1, blocks=1, seed=seed) for seed in range(4)]
    made = [refers(tree, image) for tree in trees[:3]]
    made.append(refers(trees[3], image, **{CREATED: "9999"}))  # anybody's, who may push there
    for tree, (data, _) in zip(trees, made, strict=True):
        add_tree(small, tree)
        small.add_document(REPOSITORY, data)
    small.referrers = {image: [[listed for _, listed in made]]}
    for number in range(3):
        small.add_document(REPOSITORY, made[number][0], tag)
        store = store_of(small.host)
        assert [entry.name for entry in await store.list("index")] == [trees[number].digest]
        others = await store.others()
        assert others[0].reference.digest == made[3][1]["digest"]
        assert {each.reference.digest for each in others} == {
            str(listed["digest"]) for _, listed in made if listed is not made[number][1]
        }
        await store.aclose()
    for wrong in (IMAGE, TREE_OF.manifest(), b"{}"):
        small.add_document(REPOSITORY, wrong, tag)
        store = store_of(small.host)
        assert [entry.name for entry in await store.list("index")] == [trees[3].digest], "as without the tag"
        await store.aclose()


@runs()
async def test_a_tree_that_is_not_trusted_is_passed_over(small: SmallRegistry) -> None:
    image = small.add_document(REPOSITORY, IMAGE, "v1")
    name, key = f"oci://{small.host}/{REPOSITORY}:v1", SigningKey.make(name="tests")
    trees = [make_tree(packs=1, blocks=1, seed=seed, name=name) for seed in range(2)]
    trees[0] = trees[0].signed(key)
    made = [refers(trees[0], image), refers(trees[1], image, **{CREATED: "9999"})]
    for tree, (data, _) in zip(trees, made, strict=True):
        add_tree(small, tree)
        small.add_document(REPOSITORY, data)
    broken = json.dumps({"schemaVersion": 2, "artifactType": TREE, "config": {}}).encode()
    bad = {**made[0][1], "digest": small.add_document(REPOSITORY, broken), "size": len(broken)}
    bad["annotations"] = {CREATED: "99999"}
    small.referrers = {image: [[bad, *(listed for _, listed in made)]]}
    trust = Trust([TrustedKey(PublicKey(key.public, "tests"), "/keys/tests.pub")])
    store = store_of(small.host)
    opened = await open_tree(store, name, trust)
    assert opened.digest == trees[0].digest and opened.because.startswith("signed by tests")
    assert await read(store, trees[0].packs[0], 5, 10) == trees[0].files[trees[0].packs[0]][5:15]
    with pytest.raises(Untrusted, match="is not signed"):
        await read_head(store, name, Trust())
    await store.aclose()


@runs()
async def test_a_tree_is_pulled_by_the_head_that_was_trusted(small: SmallRegistry) -> None:
    """What the registry says afterwards becomes no tree in a place that is believed without a signature."""
    theirs = make_tree(packs=1, blocks=1, seed=9)
    add_tree(small, theirs)
    add_tree(small, TREE_OF, "v1")
    trusted = TREE_OF.signed(SigningKey.make()).files["tree.json"]
    target = open_store("memory://pulled-by-its-head")
    try:
        async with Registry(options=options()) as client:
            reference = parse_reference(f"oci://{small.host}/{REPOSITORY}:v1")
            pulled = await pull_tree(client, reference, target, head=trusted)
            assert pulled.tree == TREE_OF.digest
            assert await read(target, "tree.json", 0, len(trusted)) == trusted
            await target.delete("tree.json")
            small.add_document(REPOSITORY, theirs.manifest(), "v1")  # after somebody has looked at it
            with pytest.raises(IntegrityError, match="its manifest does not"):
                await pull_tree(client, reference, target, head=trusted)
            with pytest.raises(NotFound):
                await target.stat("tree.json")
    finally:
        forget("pulled-by-its-head")


@runs()
async def test_what_is_named_by_its_content_is_found_when_the_tag_has_moved_on(small: SmallRegistry) -> None:
    """A job that began with a tree goes on with it."""
    before = make_tree(packs=1, blocks=1, seed=7)
    add_tree(small, before, "v1")
    add_tree(small, TREE_OF, "v1")
    store = store_of(small.host)
    opened = await open_tree(store, store.url, Trust(), digest=before.digest)
    assert opened.index_bytes == before.files[f"index/{before.digest}"]
    assert await read(store, before.packs[0], 5, 10) == before.files[before.packs[0]][5:15]
    with pytest.raises(NotFound):
        await store.stat("index/" + "0" * 64)
    await store.aclose()


@runs()
async def test_when_all_fail_the_registry_itself_is_named(small: SmallRegistry, mirror: SmallRegistry) -> None:
    small.statuses = [(451, {}, b"")]
    store = mirrored(small, mirror)
    with pytest.raises(StorageError, match=f"{small.host}/team/app:v1: .*451"):
        await store.stat("tree.json")
    await store.aclose()


@runs()
async def test_blobs_that_a_mirror_has_wrong_come_from_elsewhere(
    small: SmallRegistry, mirror: SmallRegistry
) -> None:
    add_tree(small, TREE_OF, "v1")
    in_mirror(small, mirror)
    mirror.blobs[digest_of(DATA)] = b"\0" * len(DATA)
    store = mirrored(small, mirror)
    assert await read(store, PACK, 5, 10) == b"\0" * 10, "a store does not know what blocks should be"
    assert await read(store, PACK, 5, 10, attempt=1) == DATA[5:15], "who does asks for another way"
    await store.aclose()


# ---- TLS, plain HTTP, proxies --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(str(tmp_path_factory.mktemp("tls")))


@runs()
async def test_certificates(certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallRegistry()
    with small.serve(certificates.server_context()):
        add_tree(small, TREE_OF, "v1")
        assert small.url.startswith("https://")
        untrusting = store_of(small.host)
        with pytest.raises(StorageError, match="certificate is not trusted"):
            await read(untrusting, PACK, 5, 10)
        directory = tmp_path / "certs.d"
        (directory / small.host).mkdir(parents=True)
        (directory / small.host / "ca.crt").write_bytes(Path(certificates.ca).read_bytes())
        elsewhere = tmp_path / "elsewhere"
        (elsewhere / "127.0.0.1:1").mkdir(parents=True)
        (elsewhere / "127.0.0.1:1" / "ca.crt").write_bytes(Path(certificates.ca).read_bytes())
        stores = [
            store_of(small.host, ca_file=certificates.ca),
            store_of(small.host, certs_folders=[str(tmp_path / "no"), str(directory)]),
        ]
        for store in stores:
            assert await read(store, PACK, 5, 10) == DATA[5:15]
        another = store_of(small.host, certs_folders=[str(elsewhere)])
        with pytest.raises(StorageError, match="certificate is not trusted"):
            await read(another, PACK, 5, 10)  # those of a host are for that host
        monkeypatch.setenv("SSL_CERT_FILE", certificates.ca)
        system = store_of(small.host)
        assert await read(system, PACK, 5, 10) == DATA[5:15]
        for store in (*stores, untrusting, another, system):
            await store.aclose()


@runs()
async def test_certificates_of_ours(certificates: Certificates, tmp_path: Path) -> None:
    small = SmallRegistry()
    context = certificates.server_context()
    context.load_verify_locations(certificates.ca)
    context.verify_mode = __import__("ssl").CERT_REQUIRED
    directory = tmp_path / "certs.d"
    with small.serve(context):
        add_tree(small, TREE_OF, "v1")
        nobody = store_of(small.host, ca_file=certificates.ca, timeout_s=1.0)
        here = directory / small.host
        here.mkdir(parents=True)
        for name, path in (
            ("ca.crt", certificates.ca),
            ("me.cert", certificates.certificate),
            ("me.key", certificates.key),
        ):
            (here / name).write_bytes(Path(path).read_bytes())
        somebody = store_of(small.host, certs_folders=[str(directory)])
        assert await read(somebody, PACK, 5, 10) == DATA[5:15]
        (here / "me.key").unlink()
        keyless = store_of(small.host, certs_folders=[str(directory)])
        with pytest.raises(ConfigError, match=r"me\.cert"):
            await read(keyless, PACK, 5, 10)
        for store in (nobody, somebody, keyless):
            await store.aclose()


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
@runs()
async def test_files_that_are_no_certificates(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    store = store_of("registry.example", ca_file=str(path))
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        await store.stat("tree.json")
    await store.aclose()


@runs()
async def test_plain_http_is_for_this_machine_or_by_request(
    small: SmallRegistry, certificates: Certificates
) -> None:
    def base_of(host: str, **more: Any) -> str:
        store = store_of(host, **more)
        (place,) = store.client.places(store.reference)
        return store.client.base_url(place, RegistryCall())

    assert await asyncio.to_thread(base_of, "registry.example") == "https://registry.example/v2/team/app"
    assert (
        await asyncio.to_thread(base_of, "registry:80", plain_http="registry:80")
        == "http://registry:80/v2/team/app"
    )
    assert await asyncio.to_thread(base_of, "registry", plain_http="registry:80") == "https://registry/v2/team/app"
    assert await asyncio.to_thread(base_of, small.host) == f"http://{small.host}/v2/team/app"
    assert [each.authorization for each in small.seen] == [""]
    with SmallRegistry().serve(certificates.server_context()) as secure:
        assert await asyncio.to_thread(base_of, secure.host) == f"https://{secure.host}/v2/team/app"
    with pytest.raises(Unavailable):
        await asyncio.to_thread(base_of, "127.0.0.1:1")


@runs()
async def test_proxies(certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = SmallRegistry()
    handler = type("Handler", (Proxy,), {"folder": tmp_path, "targets": [], "credentials": []})
    with small.serve(certificates.server_context()), serve(handler) as proxy:
        add_tree(small, TREE_OF, "v1")
        monkeypatch.setenv("HTTPS_PROXY", proxy.replace("//", "//p:q@"))
        store = store_of(small.host, ca_file=certificates.ca)
        assert await read(store, PACK, 5, 10) == DATA[5:15]
        assert set(handler.targets) == {small.host}
        assert set(handler.credentials) == {"Basic cDpx"}
        await store.aclose()
        async with Registry(options=options(ca_file=certificates.ca)) as registry:
            blob = await registry.push_bytes(parse_reference(f"oci://{small.host}/a"), b"sent", "text/plain")
        assert small.blobs[blob.digest] == b"sent"
        assert set(handler.targets) == {small.host}


# ---- odds and ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("oci://registry", "repository"),
        ("oci://me:pw@registry/a", "no password belongs in a name"),
        ("oci://registry/A", "not a repository"),
    ],
)
def test_urls_that_are_none(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        open_store(url)
    assert "pw" not in str(caught.value).replace("passwords", "")


def test_options_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="unknown options headers"):
        open_store("oci://registry/a", options={"headers": {}})


@runs()
async def test_a_server_that_is_gone(small: SmallRegistry) -> None:
    store = store_of("127.0.0.1:1", timeout_s=2.0)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await store.client.run(lambda call: store.client.read_document(store.reference, call))
    await store.aclose()


def test_a_forked_child_has_connections_of_its_own(small: SmallRegistry) -> None:
    add_tree(small, TREE_OF, "v1")
    store = store_of(small.host)
    assert asyncio.run(read(store, PACK, 5, 10)) == DATA[5:15]
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if asyncio.run(read(store, PACK, 6, 10)) == DATA[6:16] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(read(store, PACK, 7, 10)) == DATA[7:17]
    asyncio.run(store.aclose())
