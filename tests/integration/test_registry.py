"""Trees and images in a real registry with TLS and a password, read and written by us and by skopeo."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.errors import (
    AlreadyExists,
    ConfigError,
    DigestMismatch,
    IntegrityError,
    NotFound,
    PermissionDenied,
    StorageError,
    Unavailable,
)
from bootseer.image import uploads
from bootseer.image.artifacts import pull_tree, push_trace, push_tree, read_tree
from bootseer.image.registry import Registry
from bootseer.storage import RangeReader, RangeRequest, Store, open_store
from bootseer.storage.memory import forget
from bootseer.storage.oci.manifest import EMPTY, MANIFEST, TREE, Descriptor, Manifest, digest_of
from bootseer.storage.oci.reference import Reference, parse_reference
from bootseer.storage.oci.stream import BlobStream
from bootseer.tree.block_codec import unpack_block
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_layers import LayersSource
from bootseer.tree.head import Head
from bootseer.tree.head import encode as encode_head
from bootseer.tree.index import BLOCK_UNITS, UNIT_BYTES
from bootseer.trust import seal
from tests.integration.oci_layouts import make_layout, skopeo
from tests.support import lacking, needs_program, wait_until
from tests.testing.faulty_http import FaultyHttpServer
from tests.testing.registry import RegistryServer, make_certificates, why_not, write_auth_file
from tests.testing.registry_front import FrontFault, FrontKind, RegistryFront
from tests.testing.registry_tokens import TokenServer
from tests.testing.store_suite import pattern, runs
from tests.unit.bootseer.image.trees import SmallTree, make_tree

pytestmark = pytest.mark.system
numbers = itertools.count()
needs_skopeo = needs_program("skopeo")
PIECE = 1 << 20


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield
    aio.close()


def check_installed() -> None:
    if reason := why_not():
        lacking(reason)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    check_installed()
    with RegistryServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def repository() -> str:
    """A new one."""
    return f"tests/number{next(numbers)}"


@pytest.fixture
def source() -> Iterator[Store]:
    name = f"registry-source-{next(numbers)}"
    yield open_store(f"memory://{name}")
    forget(name)


@pytest.fixture
def target() -> Iterator[Store]:
    name = f"registry-target-{next(numbers)}"
    yield open_store(f"memory://{name}")
    forget(name)


@pytest.fixture(scope="module")
def tree() -> SmallTree:
    return make_tree(packs=5, blocks=6)


async def fill(store: Store, tree: SmallTree) -> None:
    for path, data in tree.files.items():
        await store.publish(path, data)


async def files_in(store: Store, directory: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in await store.list(directory):
        path = f"{directory}/{entry.name}" if directory else entry.name
        if entry.is_folder:
            found |= await files_in(store, path)
        else:
            data = bytearray(entry.size)
            await store.read_into(path, 0, memoryview(data))
            found[path] = bytes(data)
    return found


def at(registry: RegistryServer | RegistryFront, repository: str, tag: str = "v1") -> Reference:
    return parse_reference(f"oci://{registry.host}/{repository}" + (f":{tag}" if tag else ""))


def options_for(front: RegistryFront, tmp_path: Path) -> dict[str, object]:
    """The registry's, by the name of what stands in front of it."""
    path = str(tmp_path / "front.json")
    server = front.registry
    write_auth_file(path, {front.host: (server.user, server.password)} if server.password else {})
    return {**server.options(), "auth_file": path}


# ---- trees ---------------------------------------------------------------------------------------------------


@runs()
async def test_a_tree_is_pushed_and_pulled(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store
) -> None:
    await fill(source, tree)
    shown: list[tuple[int, int]] = []
    async with Registry(options=registry.options()) as client:
        reference = at(registry, repository)
        pushed = await push_tree(client, reference, source, progress=lambda *done: shown.append(done))
        assert (pushed.tree, pushed.size, pushed.sent_bytes) == (tree.digest, tree.size, tree.size)
        assert pushed.name == "oci://registry/team/app:v1"
        assert shown[-1] == (tree.size, tree.size)
        assert [done for done, _ in shown] == sorted(done for done, _ in shown)

        again = await push_tree(client, reference, source)
        assert (again.reference, again.sent_bytes) == (pushed.reference, 0), "what is there is not sent"

        shown.clear()
        pulled = await pull_tree(client, reference, target, progress=lambda *done: shown.append(done))
        assert (pulled.tree, pulled.size, pulled.received_bytes) == (tree.digest, tree.size, tree.size)
        assert await files_in(target) == tree.files
        assert shown[-1] == (tree.size, tree.size)
        small = sum(len(data) for path, data in tree.files.items() if not path.startswith("packs/"))
        assert (await pull_tree(client, pushed.reference, target)).received_bytes == small


@runs()
async def test_a_tree_is_read_by_ranges(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store
) -> None:
    await fill(source, tree)
    async with Registry(options=registry.options()) as client:
        await push_tree(client, at(registry, repository), source)
    store = open_store(f"oci://{registry.host}/{repository}:v1", options=registry.options())
    assert await files_in(store) == tree.files
    reader = RangeReader(store, piece_bytes=64 << 10)
    requests, expected = [], []
    for number, path in enumerate(tree.packs * 20):
        offset, length = number * 1237, 20_000 + number
        requests.append(RangeRequest(path, offset, memoryview(bytearray(length))))
        expected.append(tree.files[path][offset : offset + length])
    await reader.read(requests)
    assert [bytes(request.target) for request in requests] == expected
    await store.aclose()


@needs_skopeo
@runs()
async def test_others_can_read_what_we_push(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store, tmp_path: Path
) -> None:
    await fill(source, tree)
    async with Registry(options=registry.options()) as client:
        pushed = await push_tree(client, at(registry, repository), source)
    manifest = skopeo(registry, tmp_path, "inspect", "--raw", f"docker://REGISTRY/{repository}:v1")
    assert digest_of(manifest.encode()) == pushed.reference.digest
    assert json.loads(manifest)["artifactType"] == TREE
    skopeo(registry, tmp_path, "copy", f"docker://REGISTRY/{repository}:v1", f"dir:{tmp_path}/copied")
    for data in tree.files.values():
        assert (tmp_path / "copied" / hashlib.sha256(data).hexdigest()).read_bytes() == data


@pytest.mark.parametrize("has_api", [True, False])
@needs_skopeo
@runs()
async def test_a_tree_belongs_to_an_image_that_stays_as_it_is(
    has_api: bool, registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store,
    tmp_path: Path,
) -> None:  # fmt: skip
    make_layout(tmp_path / "layout", {"amd64": [{"a": b"1"}], "arm64": [{"a": b"2"}]})
    skopeo(registry, tmp_path, "copy", "--all", f"oci:{tmp_path}/layout:v1", f"docker://REGISTRY/{repository}:v1")
    await fill(source, tree)
    with RegistryFront(registry, has_referrers=has_api) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            image = at(front, repository)
            before = await client.document(image)
            with pytest.raises(AlreadyExists, match="is already an image"):
                await push_tree(client, image, source)
            pushed = await push_tree(client, at(front, repository, ""), source, subject=image)
            assert await client.document(image) == before
            (found,) = await client.referrers(image, before.digest, TREE)
            assert found.digest == pushed.reference.digest
            assert await client.referrers(image, before.digest, "application/spdx+json") == []
            stands_in = await client.find(at(front, repository, before.digest.replace(":", "-")))
            assert (stands_in is None) == has_api

            tagged = await push_tree(client, at(front, repository, "tree"), source, subject=before.descriptor)
            assert tagged.reference == pushed.reference, "the same tree, the same manifest"
            assert len(await client.referrers(image, before.digest, TREE)) == 1

            pulled = await pull_tree(client, image, target)
            assert pulled.tree == tree.digest
            assert await files_in(target) == tree.files

            # Which is the newest is not left to digests: the one that was pushed last.
            for seed in (1, 2, 3):
                newer = make_tree(packs=1, blocks=1, seed=seed)
                await fill(source, newer)
                await push_tree(client, at(front, repository, ""), source, subject=image)
                assert (await read_tree(client.store(image))).head.digest == newer.digest
            await fill(source, tree)
            again = await push_tree(client, at(front, repository, ""), source, subject=image)
            assert (again.reference, again.sent_bytes) == (pushed.reference, 0)
            assert (await read_tree(client.store(image))).head.digest == tree.digest
            assert len(await client.referrers(image, before.digest, TREE)) == 4
            config = (await client.image(image, "linux/arm64")).config
            assert json.loads(config)["architecture"] == "arm64", "the image is still that"


@runs()
async def test_a_tree_needs_a_name(
    registry: RegistryServer, repository: str, source: Store, tree: SmallTree
) -> None:
    await fill(source, tree)
    async with Registry(options=registry.options()) as client:
        for reference in (at(registry, repository, ""), at(registry, repository).at(digest_of(b""))):
            with pytest.raises(ConfigError, match="tag"):
                await push_tree(client, reference, source)
        with pytest.raises(NotFound):
            await push_tree(client, at(registry, repository, ""), source, subject=at(registry, repository, "none"))
        with pytest.raises(ConfigError, match="same repository"):
            await push_tree(client, at(registry, repository), source, subject=at(registry, f"{repository}/other"))


@runs()
async def test_what_others_list_stays(registry: RegistryServer, repository: str) -> None:
    """The stand-in for the referrers API is one list for all."""
    async with Registry(options=registry.options()) as client:
        reference = at(registry, repository)
        config = await client.push_bytes(reference, b"{}", EMPTY)
        plain = Manifest(schema_version=2, media_type=MANIFEST, config=config, artifact_type="a/image")
        subject = await client.push_manifest(reference, plain)

        async def refer(number: int) -> Descriptor:
            manifest = Manifest(
                schema_version=2, media_type=MANIFEST, config=config, artifact_type="a/note", subject=subject,
                annotations={"number": str(number)},
            )  # fmt: skip
            return await client.push_manifest(at(registry, repository, ""), manifest)

        first = await refer(0)
        tag = at(registry, repository, subject.digest.replace(":", "-"))
        document = await client.find(tag)
        assert document is not None
        fields = json.loads(document.data)
        fields["manifests"][0]["foreign"] = {"kept": True}
        fields["annotations"] = {"of": "others"}
        await client._put(tag, tag.tag, json.dumps(fields).encode(), document.media_type)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(refer(number)) for number in range(1, 6)]
        found = await client.referrers(reference, subject.digest, "a/note")
        assert {each.digest for each in found} == {first.digest, *(task.result().digest for task in tasks)}
        assert found[0].digest == first.digest
        document = await client.find(tag)
        assert document is not None
        fields = json.loads(document.data)
        assert fields["manifests"][0]["foreign"] == {"kept": True}
        assert fields["annotations"] == {"of": "others"}


@pytest.mark.parametrize("has_api", [True, False])
@runs()
async def test_traces(
    has_api: bool, registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store,
    tmp_path: Path,
) -> None:  # fmt: skip
    await fill(source, tree)
    other = "f" * 16
    with RegistryFront(registry, has_referrers=has_api, page_size=2) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            reference = at(front, repository)
            await push_tree(client, reference, source)
            for trace in (tree.trace(runs=1), tree.trace(other), tree.trace(runs=2), tree.trace(runs=3)):
                await push_trace(client, reference, trace)
            store = client.store(reference)
            names = [entry.name for entry in await store.list(f"traces/{tree.digest}")]
            assert names == ["0123456789abcdef.json", f"{other}.json"]
            assert (await pull_tree(client, reference, target)).traces == 2
            found = await files_in(target, f"traces/{tree.digest}")
            assert found == {
                f"traces/{tree.digest}/0123456789abcdef.json": tree.trace(runs=3),
                f"traces/{tree.digest}/{other}.json": tree.trace(other),
            }
            if not has_api:
                (listed,) = [each for each in front.requests if each.method == "PUT" and "sha256-" in each.path][
                    -1:
                ]
                document = await client.document(at(front, repository, listed.path.rpartition("/")[2]))
                assert len(json.loads(document.data)["manifests"]) == 2, "an older one gives way"
            for bad in (tree.trace(tree="ab" * 32), tree.trace("../../x"), b"no envelope"):
                with pytest.raises(IntegrityError):
                    await push_trace(client, reference, bad)
            with pytest.raises(NotFound):
                await push_trace(client, at(front, f"{repository}/none"), tree.trace())


@runs()
async def test_packs_of_another_repository_are_taken_over(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store, tmp_path: Path
) -> None:
    await fill(source, tree)
    with RegistryFront(registry) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            await push_tree(client, at(front, repository), source)
            before = client.statistics()["written_bytes"]
            elsewhere = at(front, f"{repository}-copy")
            pushed = await push_tree(client, elsewhere, client.store(at(front, repository)))
            assert pushed.sent_bytes == 0
            assert client.statistics()["written_bytes"] == before
            assert front.count("POST", f"/v2/{elsewhere.repository}/blobs/uploads/") == len(tree.files)
            assert await files_in(client.store(elsewhere)) == tree.files


# ---- what goes wrong with trees ------------------------------------------------------------------------------


@runs()
async def test_a_source_that_is_damaged(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store
) -> None:
    await fill(source, tree)
    await source.publish(tree.packs[2], tree.files[tree.packs[2]][:-1] + b"?")
    async with Registry(options=registry.options()) as client:
        with pytest.raises(DigestMismatch, match=tree.packs[2].removeprefix("packs/")):
            await push_tree(client, at(registry, repository), source)
        assert await client.find(at(registry, repository)) is None
        await source.publish(tree.packs[2], tree.files[tree.packs[2]])
        await source.publish(f"index/{tree.digest}", b"?" * len(tree.files[f"index/{tree.digest}"]))
        with pytest.raises(IntegrityError):
            await push_tree(client, at(registry, repository), source)


@runs()
async def test_a_registry_that_sends_other_bytes(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store, tmp_path: Path
) -> None:
    """Ranges with the right headers and the wrong bytes are found by whoever knows the digests."""
    await fill(source, tree)
    pack = tree.packs[3]
    blob = f"/v2/{repository}/blobs/{digest_of(tree.files[pack])}"
    with RegistryFront(registry) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            await push_tree(client, at(front, repository), source)
            front.plan = [FrontFault(FrontKind.REPLACED, "GET", blob, body=b"\0" * len(tree.files[pack]))]
            with pytest.raises(DigestMismatch, match=pack):
                await pull_tree(client, at(front, repository), target)
            there = await files_in(target)
            assert "tree.json" not in there
            assert pack not in there
            front.plan.clear()
            missing = tree.size - sum(len(data) for path, data in there.items())
            small = sum(len(tree.files[path]) for path in ("tree.json", f"index/{tree.digest}") if path in there)
            assert (await pull_tree(client, at(front, repository), target)).received_bytes == missing + small
            assert await files_in(target) == tree.files


@pytest.mark.parametrize(
    "fault",
    [
        FrontFault(FrontKind.OTHER_RANGE, "GET", "*/blobs/*", requests={1, 4}),
        FrontFault(FrontKind.SHORT, "GET", "*/blobs/*", requests={1, 2, 5}, keep_bytes=100_000),
        FrontFault(FrontKind.WHOLE, "GET", "*/blobs/*"),
        FrontFault(FrontKind.STATUS, "GET", "*/blobs/*", requests={0, 3}, status=503),
        FrontFault(FrontKind.STATUS, "GET", "*", requests={0, 1, 6}, status=429, retry_after_s=1),
        FrontFault(FrontKind.LOST, "GET", "*", requests={0, 2, 7}),
    ],
    ids=["other range", "short", "no ranges", "503", "429", "lost"],
)
@runs()
async def test_a_registry_in_trouble(
    fault: FrontFault, registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store,
    tmp_path: Path,
) -> None:  # fmt: skip
    await fill(source, tree)
    with RegistryFront(registry) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            await push_tree(client, at(front, repository), source)
            front.plan = [fault]
            await pull_tree(client, at(front, repository), target)
            assert await files_in(target) == tree.files


@runs()
async def test_a_pull_that_ends_in_the_middle(
    registry: RegistryServer, repository: str, tree: SmallTree, source: Store, target: Store
) -> None:
    await fill(source, tree)
    async with Registry(options=registry.options()) as client:
        await push_tree(client, at(registry, repository), source)

        def stop(done: int, total: int) -> None:
            if done > total / 2:
                raise KeyError("the disk is full, say")

        with pytest.raises(KeyError):
            await pull_tree(client, at(registry, repository), target, progress=stop)
        there = await files_in(target)
        assert "tree.json" not in there
        assert all(tree.files[path] == data for path, data in there.items())
        await target.publish(tree.packs[0], b"of another size")
        with pytest.raises(IntegrityError, match="remove it"):
            await pull_tree(client, at(registry, repository), target)


# ---- uploads -------------------------------------------------------------------------------------------------


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of this file are large."""
    monkeypatch.setattr(uploads, "WHOLE_BYTES", PIECE)
    monkeypatch.setattr(uploads, "CHUNK_BYTES", PIECE)


LARGE = pattern(3 * PIECE + 12345)
SPANS = ["0-1048575", "1048576-2097151", "2097152-3145727", "3145728-3158072"]


async def push_large(
    front: RegistryFront, repository: str, tmp_path: Path, data: bytes = LARGE
) -> tuple[list[str], list[int]]:
    """Which chunks were sent, and what was told of them; the blob is there and right."""
    told: list[int] = []
    async with Registry(options=options_for(front, tmp_path)) as client:
        blob = Descriptor(media_type="text/plain", digest=digest_of(data), size=len(data))
        await client.push_blob(at(front, repository), blob, uploads.from_memory(data), told.append)
        front.plan.clear()
        with BlobStream(client.client, at(front, repository), blob) as stream:
            assert await asyncio.to_thread(stream.read) == data
    return [each.headers["content-range"] for each in front.requests if each.method == "PATCH"], told


@pytest.mark.usefixtures("chunks")
@runs()
async def test_a_large_blob_goes_in_chunks(registry: RegistryServer, repository: str, tmp_path: Path) -> None:
    with RegistryFront(registry) as front:
        sent, told = await push_large(front, repository, tmp_path)
    assert sent == SPANS
    assert told == [PIECE, PIECE, PIECE, 12345]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("fault", "sent"),
    [
        pytest.param(
            FrontFault(FrontKind.CUT, "PATCH", requests={1}, keep_bytes=300_000),
            [*SPANS[:2], *SPANS],
            id="cut within a chunk: docker-registry gives such uploads up",
        ),
        pytest.param(
            FrontFault(FrontKind.CUT, "PATCH", requests={0, 1}, keep_bytes=0),
            [SPANS[0], SPANS[0], *SPANS],
            id="cut before anything came",
        ),
        pytest.param(
            FrontFault(FrontKind.LOST, "PATCH", requests={2}),
            [*SPANS[:3], *SPANS],
            id="the answer to a chunk was lost",
        ),
        pytest.param(
            FrontFault(FrontKind.STATUS, "PATCH", requests={1}, status=503),
            [*SPANS[:2], *SPANS[1:]],
            id="503",
        ),
        pytest.param(
            FrontFault(FrontKind.STATUS, "PATCH", requests={1}, status=404),
            [*SPANS[:2], *SPANS],
            id="the upload is forgotten: from the start",
        ),
        pytest.param(
            FrontFault(FrontKind.STATUS, "PATCH", requests={0}, status=405),
            SPANS[:1],
            id="no chunks: in one piece",
        ),
        pytest.param(FrontFault(FrontKind.LOST, "PUT", requests={0}), SPANS, id="the answer of the end was lost"),
        pytest.param(
            FrontFault(FrontKind.STATUS, "PUT", requests={0}, status=500), [*SPANS, *SPANS], id="the end failed"
        ),
        pytest.param(FrontFault(FrontKind.STATUS, "POST", requests={0}, status=503), SPANS, id="503 at the start"),
        pytest.param(FrontFault(FrontKind.LOST, "HEAD", requests={0}), SPANS, id="first question lost"),
    ],
)
@runs()
async def test_uploads_that_break_off(
    fault: FrontFault, sent: list[str], registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    data = repository.encode() + LARGE  # another for each test: blobs are shared in the registry
    data = data[: len(LARGE)]
    with RegistryFront(registry, [fault]) as front:
        found, told = await push_large(front, repository, tmp_path, data)
    assert found == sent
    assert sum(told) == len(data)


@pytest.mark.parametrize(
    "fault",
    [
        FrontFault(FrontKind.CUT, "PUT", "*/uploads/*", requests={0, 1}, keep_bytes=0),
        FrontFault(FrontKind.LOST, "PUT", "*/uploads/*", requests={0}),
        FrontFault(FrontKind.STATUS, "PUT", "*/uploads/*", requests={0}, status=502),
        FrontFault(FrontKind.STATUS, "P*", "*", requests={0, 1}, status=429, retry_after_s=1),
    ],
    ids=["cut", "lost", "502", "429"],
)
@runs()
async def test_small_blobs_that_break_off(
    fault: FrontFault, registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    data = repository.encode() + pattern(PIECE)
    with RegistryFront(registry, [fault]) as front:
        started_s = time.monotonic()
        await push_large(front, repository, tmp_path, data)
        if fault.kind is FrontKind.LOST:
            assert front.count("PUT", "*/uploads/*") == 1, "it is there: not sent again"
        if fault.retry_after_s:
            assert time.monotonic() - started_s >= 2.0


@pytest.mark.usefixtures("chunks")
@runs()
async def test_blobs_that_are_not_what_they_are_called(
    registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    async with Registry(options=registry.options()) as client:
        for size in (1000, 2 * PIECE + 1):
            data = pattern(size, seed=7)
            blob = Descriptor(media_type="text/plain", digest=digest_of(data), size=size)
            with pytest.raises(DigestMismatch):
                await client.push_blob(at(registry, repository), blob, uploads.from_memory(data[:-1] + b"?"))
            assert not os.path.exists(registry.blob_file(blob.digest))


@runs()
async def test_an_upload_that_is_refused_in_the_middle_says_why(
    registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    said = b'{"errors": [{"code": "TOOBIG", "message": "quota exceeded"}]}'
    plan = [FrontFault(FrontKind.STATUS, "PUT", status=413, body=said)]
    with RegistryFront(registry, plan) as front, pytest.raises(StorageError, match=r"413.*quota exceeded"):
        await push_large(front, repository, tmp_path, repository.encode() + pattern(PIECE))


@runs()
async def test_a_cancelled_push_ends_at_once(registry: RegistryServer, repository: str, tmp_path: Path) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    class Waiting(RegistryFront):
        def find(self, request: Any) -> Any:
            if request.method == "PUT":
                arrived.set()
                go_on.wait(20.0)
            return super().find(request)

    try:
        with Waiting(registry) as front:
            task = asyncio.create_task(push_large(front, repository, tmp_path))
            await asyncio.to_thread(arrived.wait, 10.0)
            started_s = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - started_s < 2.0
            go_on.set()
        await asyncio.to_thread(wait_until, lambda: aio.statistics()["abandoned"] == 0, 10.0)
    finally:
        go_on.set()


# ---- images --------------------------------------------------------------------------------------------------

LAYERS = [
    {"bin": None, "bin/sh": b"a shell", "etc": None, "etc/old": b"old", "data": pattern(2 * PIECE)},
    {"etc": None, "etc/.wh.old": b"", "bin": None, "bin/.wh..wh..opq": b"", "bin/sh": b"another"},
]


@pytest.mark.parametrize("form", ["oci", "v2s2"])
@needs_skopeo
@runs()
async def test_images_that_others_pushed(
    form: str, registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    make_layout(tmp_path / "layout", {"amd64": LAYERS})
    skopeo(
        registry, tmp_path, "copy", "--format", form, f"oci:{tmp_path}/layout:v1", f"docker://REGISTRY/{repository}:v1"
    )  # fmt: skip
    async with Registry(options=registry.options()) as client:
        image = await client.image(at(registry, repository), "linux/amd64")
        assert json.loads(image.config)["config"]["Entrypoint"] == ["/bin/sh"]
        assert len(image.layers) == 2

        def read_all() -> list[bytes]:
            found = []
            for layer in image.layers:
                with image.open(layer) as stream:
                    found.append(stream.read())
            return found

        for layer, data in zip(image.layers, await asyncio.to_thread(read_all), strict=True):
            assert (digest_of(data), len(data)) == (layer.digest, layer.size)


@needs_skopeo
@runs()
async def test_an_image_becomes_a_tree_that_belongs_to_it(
    registry: RegistryServer, repository: str, source: Store, tmp_path: Path
) -> None:
    """Layers as streams from one end, blocks by range at the other; nothing is unpacked between."""
    make_layout(tmp_path / "layout", {"amd64": LAYERS})
    skopeo(registry, tmp_path, "copy", f"oci:{tmp_path}/layout:v1", f"docker://REGISTRY/{repository}:v1")
    reference = at(registry, repository)
    packs: dict[str, bytes] = {}
    async with Registry(options=registry.options()) as client:
        image = await client.image(reference, "linux/amd64")
        built = await asyncio.to_thread(build, LayersSource(image, name=str(reference)), packs.__setitem__)
        head = Head(
            format="bootseer-tree/1", name=str(reference), digest=built.digest, kind="image",
            index_bytes=len(built.index_bytes),
        )  # fmt: skip
        for digest, data in packs.items():
            await source.publish(f"packs/{digest}", data)
        await source.publish(f"index/{built.digest}", built.index_bytes)
        await source.publish("tree.json", seal(encode_head(head), TREE, None))
        await push_tree(client, at(registry, repository, ""), source, subject=image.reference)
        tree = await read_tree(client.store(at(registry, repository).at(image.reference.digest)))
        found = {tree.decoded.path(entry) for entry in range(len(tree.decoded))}
        assert found == {b"", b"bin", b"bin/sh", b"data", b"etc"}
        assert tree.decoded.config.entrypoint == ["/bin/sh"]
        store = client.store(reference)
        data = bytearray()
        (entry,) = [entry for entry in range(len(tree.decoded)) if tree.decoded.path(entry) == b"data"]
        for _, address, length in tree.decoded.pieces(entry):
            block = tree.decoded.block(address // BLOCK_UNITS)
            stored = bytearray(block.stored_bytes)
            await store.read_into(tree.decoded.pack_path(block.pack), block.offset, memoryview(stored))
            raw = unpack_block(stored, block.raw_bytes, "here")
            start = address % BLOCK_UNITS * UNIT_BYTES
            data += raw[start : start + length]
        assert data == LAYERS[0]["data"]


@needs_skopeo
@runs()
async def test_platforms(registry: RegistryServer, repository: str, tmp_path: Path) -> None:
    make_layout(tmp_path / "layout", {"amd64": [{"a": b"1"}], "arm64": [{"a": b"2"}]})
    skopeo(registry, tmp_path, "copy", "--all", f"oci:{tmp_path}/layout:v1", f"docker://REGISTRY/{repository}:v1")
    async with Registry(options=registry.options()) as client:
        for architecture in ("amd64", "arm64"):
            image = await client.image(at(registry, repository), f"linux/{architecture}")
            assert json.loads(image.config)["architecture"] == architecture
        with pytest.raises(ConfigError, match="linux/arm64"):
            await client.image(at(registry, repository), "linux/s390x")


@runs()
async def test_a_stream_goes_on_where_it_broke_off(
    registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    data = pattern(PIECE)
    plan = [
        FrontFault(FrontKind.SHORT, "GET", "*/blobs/*", requests={0}, keep_bytes=400_000),
        FrontFault(FrontKind.SHORT, "GET", "*/blobs/*", requests={0}, keep_bytes=200_000),
        FrontFault(FrontKind.OTHER_RANGE, "GET", "*/blobs/*", requests={0}),
        FrontFault(FrontKind.STATUS, "GET", "*/blobs/*", requests={0}, status=503),
        FrontFault(FrontKind.WHOLE, "GET", "*/blobs/*", requests={0}),
    ]
    with RegistryFront(registry) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            blob = await client.push_bytes(at(front, repository), data, "text/plain")
            front.plan = plan
            with BlobStream(client.client, at(front, repository), blob) as stream:
                found = b""
                while piece := await asyncio.to_thread(stream.read, 100_000):
                    found += piece
            assert found == data
            spans = [
                each.headers.get("range")
                for each in front.requests
                if each.method == "GET" and "blobs" in each.path
            ]
            assert spans == [None, "bytes=400000-", "bytes=600000-", "bytes=600000-", "bytes=600000-"]
            front.plan = [FrontFault(FrontKind.STATUS, "GET", "*/blobs/*", status=404)]
            with BlobStream(client.client, at(front, repository), blob) as stream, pytest.raises(NotFound):
                await asyncio.to_thread(stream.read)


@runs()
async def test_a_stream_is_cancelled_from_elsewhere(
    registry: RegistryServer, repository: str, tmp_path: Path
) -> None:
    plan = [FrontFault(FrontKind.STATUS, "GET", "*/blobs/*", status=503, retry_after_s=60)]
    with RegistryFront(registry, plan) as front:
        async with Registry(options=options_for(front, tmp_path)) as client:
            blob = await client.push_bytes(at(front, repository), b"x", "text/plain")
            with BlobStream(client.client, at(front, repository), blob) as stream:
                reading = asyncio.create_task(asyncio.to_thread(stream.read))
                await asyncio.to_thread(wait_until, lambda: front.count("GET", "*/blobs/*") > 0)
                stream.cancel()
                with pytest.raises(StorageError, match="cancelled"):
                    await reading


# ---- who may -------------------------------------------------------------------------------------------------


@runs()
async def test_a_wrong_password(registry: RegistryServer, repository: str, tmp_path: Path) -> None:
    path = str(tmp_path / "auth.json")
    write_auth_file(path, {registry.host: (registry.user, "wr0ng")})
    async with Registry(options={**registry.options(), "auth_file": path}) as client:
        with pytest.raises(PermissionDenied, match="docker login") as caught:
            await client.document(at(registry, repository))
        with pytest.raises(PermissionDenied):
            await client.push_bytes(at(registry, repository), b"x", "text/plain")
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize("way", ["REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "HOME"])
@needs_skopeo
@runs()
async def test_passwords_are_found_where_others_put_them(
    way: str, registry: RegistryServer, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, value = {
        "REGISTRY_AUTH_FILE": (tmp_path / "any", tmp_path / "any"),
        "DOCKER_CONFIG": (tmp_path / "docker" / "config.json", tmp_path / "docker"),
        "XDG_RUNTIME_DIR": (tmp_path / "run" / "containers" / "auth.json", tmp_path / "run"),
        "HOME": (tmp_path / ".docker" / "config.json", tmp_path),
    }[way]
    path.parent.mkdir(parents=True, exist_ok=True)
    certs = tmp_path / "certs"
    certs.mkdir()
    assert registry.certificates is not None
    (certs / "ca.crt").write_bytes(Path(registry.certificates.ca).read_bytes())
    done = subprocess.run(
        ["skopeo", "login", "--authfile", path, "--cert-dir", certs, "--username", registry.user,
         "--password-stdin", registry.host],
        input=registry.password, text=True, capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("BOOTSEER_REGISTRY_CA", registry.certificates.ca)
    async with Registry() as client:
        with pytest.raises(PermissionDenied, match="docker login"):
            await client.document(at(registry, repository))
    monkeypatch.setenv(way, str(value))
    async with Registry() as client:
        with pytest.raises(NotFound):
            await client.document(at(registry, repository))


@runs()
async def test_an_authority_that_is_not_trusted(registry: RegistryServer, repository: str) -> None:
    async with Registry(options={**registry.options(), "ca_file": ""}) as client:
        with pytest.raises(StorageError, match="certificate is not trusted"):
            await client.document(at(registry, repository))


@runs()
async def test_a_registry_without_tls_and_password(tmp_path: Path, tree: SmallTree, source: Store) -> None:
    check_installed()
    await fill(source, tree)
    with RegistryServer(tmp_path, has_tls=False, has_password=False) as server:
        async with Registry(options=server.options()) as client:
            await push_tree(client, at(server, "a"), source)
            assert await files_in(client.store(at(server, "a"))) == tree.files


@runs()
async def test_blobs_that_are_elsewhere(tmp_path: Path, tree: SmallTree, source: Store) -> None:
    """As in most large registries: the password stays with the registry, and it is not asked twice for a blob."""
    check_installed()
    await fill(source, tree)
    with RegistryServer(tmp_path / "registry", has_tls=False) as server, RegistryFront(server) as front:
        blobs = {f"v2/a/blobs/{digest_of(data)}": data for data in tree.files.values()}
        with FaultyHttpServer(blobs) as elsewhere:
            async with Registry(options=options_for(front, tmp_path)) as client:
                await push_tree(client, at(front, "a"), source)
                front.plan = [FrontFault(FrontKind.REDIRECT, "GET", "*/blobs/*", location=elsewhere.url)]
                before = front.count("GET", "*/blobs/*")
                store = client.store(at(front, "a"))
                for _ in range(3):
                    assert await files_in(store) == tree.files
                assert front.count("GET", "*/blobs/*") == before + len(tree.files)
            assert elsewhere.count() == 3 * len(tree.files)
            assert not any("authorization" in each.headers for each in elsewhere.requests)
            assert any("authorization" in each.headers for each in front.requests)


@runs()
async def test_tokens(tmp_path: Path, tree: SmallTree, source: Store, target: Store) -> None:
    """A registry that believes a server of tokens, as most do; they end all the time."""
    check_installed()
    await fill(source, tree)
    certificates = make_certificates(str(tmp_path))
    with (
        TokenServer(certificates, {"somebody": "word"}) as tokens,
        RegistryServer(tmp_path, certificates=certificates, has_password=False, tokens=tokens.tokens) as server,
        RegistryFront(server, token_uses=10) as front,
    ):
        path = str(tmp_path / "tokens.json")
        write_auth_file(path, {front.host: ("somebody", "word")})
        options = {**server.options(), "auth_file": path}
        async with Registry(options=options) as client:
            await push_tree(client, at(front, "team/app"), source)
            await pull_tree(client, at(front, "team/app"), target)
            assert await files_in(target) == tree.files
            scopes = {scope for given in tokens.given for scope in given}
            assert scopes == {"repository:team/app:pull", "repository:team/app:pull,push"}
            assert len(tokens.given) > 3, "some have ended"
            copied = await push_tree(client, at(front, "team/copy"), client.store(at(front, "team/app")))
            assert copied.sent_bytes == 0
            both = {"repository:team/copy:pull,push", "repository:team/app:pull"}
            assert any(both <= set(given) for given in tokens.given)
        write_auth_file(path, {front.host: ("somebody", "wrong")})
        async with Registry(options=options) as client:
            with pytest.raises(PermissionDenied, match="refuses the password"):
                await client.document(at(front, "team/app"))
        assert tokens.refused == 1
        assert {each.path for each in front.requests if "Basic" in each.headers.get("authorization", "")} == set()


@runs()
async def test_a_registry_that_is_gone(tmp_path: Path, repository: str) -> None:
    check_installed()
    with RegistryServer(tmp_path) as server:
        pass
    async with Registry(options=server.options(), timeout_s=2.0) as client:
        with pytest.raises(Unavailable):
            await client.client.run(lambda call: client.client.read_document(at(server, repository), call))
