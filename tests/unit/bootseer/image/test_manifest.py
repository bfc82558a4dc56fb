"""Manifests: what is believed of them, that the same tree has the same one, platforms, traces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, DigestMismatch, IntegrityError
from bootseer.storage.oci.manifest import (
    CREATED,
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    INDEX,
    MANIFEST,
    TRACE,
    TREE,
    TREE_DIGEST,
    TREE_INDEX,
    TREE_PACK,
    WORKLOAD,
    Descriptor,
    Document,
    Manifest,
    check_digest,
    digest_of,
    encode,
    is_tree,
    newest,
    parse_index,
    parse_manifest,
    to_document,
    to_trace_manifest,
    to_tree_manifest,
    trace_blob,
    trace_path,
    tree_files,
)


def blob(text: str, media_type: str = "text/plain", size: int | None = None) -> Descriptor:
    data = text.encode()
    return Descriptor(media_type=media_type, digest=digest_of(data), size=len(data) if size is None else size)


def document_of(fields: Any, content_type: str = "") -> Document:
    return to_document(json.dumps(fields).encode(), content_type, "here")


def fields_of(descriptor: Descriptor) -> dict[str, Any]:
    return {"mediaType": descriptor.media_type, "digest": descriptor.digest, "size": descriptor.size}


def image(**more: Any) -> dict[str, Any]:
    config = fields_of(blob("config", "application/vnd.oci.image.config.v1+json"))
    return {"schemaVersion": 2, "config": config, "layers": [fields_of(blob("layer"))], **more}


def tree(**more: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": TREE,
        "config": fields_of(blob("head", TREE)),
        "layers": [fields_of(blob("index", TREE_INDEX)), fields_of(blob("pack", TREE_PACK))],
        **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "content_type", "media_type"),
    [
        (image(mediaType=MANIFEST), MANIFEST, MANIFEST),
        (image(mediaType=MANIFEST), "", MANIFEST),
        (image(mediaType=MANIFEST), "application/json; charset=utf-8", MANIFEST),
        (image(), MANIFEST, MANIFEST),
        (image(), DOCKER_MANIFEST, DOCKER_MANIFEST),
        (image(), "", MANIFEST),
        ({"schemaVersion": 2, "manifests": []}, "", INDEX),
        ({"schemaVersion": 2, "manifests": None, "mediaType": DOCKER_INDEX}, "", DOCKER_INDEX),
    ],
)
def test_kinds_of_documents(fields: Any, content_type: str, media_type: str) -> None:
    document = document_of(fields, content_type)
    assert document.media_type == media_type
    assert document.descriptor == Descriptor(
        media_type=media_type, digest=digest_of(document.data), size=len(document.data)
    )
    parse_index(document, "here") if "manifests" in fields else parse_manifest(document, "here")


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"", MANIFEST),
        (b"[]", MANIFEST),
        (b"{", MANIFEST),
        (b"\xff\xfe", MANIFEST),
        (b"[" * 100_000, MANIFEST),
        (json.dumps(image(mediaType=MANIFEST)).encode(), INDEX),
        (json.dumps(image(mediaType=7)).encode(), ""),
        (json.dumps({**image(), "manifests": []}).encode(), MANIFEST),
        (json.dumps({"manifests": [], "config": {}}).encode(), INDEX),
    ],
)
def test_documents_that_are_none(data: bytes, content_type: str) -> None:
    with pytest.raises(IntegrityError, match="here"):
        to_document(data, content_type, "here")


@pytest.mark.parametrize(
    "fields",
    [
        image(schemaVersion=1),
        image(layers=[{"mediaType": "text/plain", "digest": "sha256:12", "size": 1}]),
        image(layers=[{"mediaType": "text/plain", "digest": "sha512:" + "0" * 128, "size": 1}]),
        image(layers=[{**fields_of(blob("x")), "size": -1}]),
        image(layers=[{**fields_of(blob("x")), "size": 1 << 60}]),
        image(layers=[{**fields_of(blob("x")), "size": "1"}]),
        image(layers=[{**fields_of(blob("x")), "mediaType": "text"}]),
        image(layers=[{**fields_of(blob("x")), "mediaType": "text/" + "x" * 300}]),
        image(layers=7),
        image(subject={"mediaType": MANIFEST, "digest": "../../etc/passwd", "size": 1}),
        {"schemaVersion": 2, "layers": []},
        image(mediaType="application/vnd.docker.distribution.manifest.v1+json"),
    ],
)
def test_manifests_that_are_none(fields: Any) -> None:
    with pytest.raises(IntegrityError, match="here"):
        parse_manifest(document_of(fields), "here")


def test_foreign_fields_and_nulls_are_allowed() -> None:
    fields = image(mediaType=MANIFEST, annotations=None, subject=None, other={"deep": [None]}, layers=None)
    manifest = parse_manifest(document_of(fields), "here")
    assert (manifest.layers, manifest.subject, manifest.annotations) == ([], None, {})
    index = parse_index(document_of({"schemaVersion": 2, "manifests": None}), "here")
    assert index.manifests == []


names = st.sampled_from(["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner),
    max_leaves=12,
)


@given(st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_understood_or_one_error(data: bytes) -> None:
    try:
        document = to_document(data, "", "here")
        parse = parse_index if document.media_type == INDEX else parse_manifest
        parse(document, "here")
    except BootseerError as error:
        assert "\n" not in str(error)


def test_digests() -> None:
    check_digest(b"abc", digest_of(b"abc"), "here")
    with pytest.raises(DigestMismatch, match="here"):
        check_digest(b"abd", digest_of(b"abc"), "here")


# ---- trees and traces ------------------------------------------------------------------------------------------


def test_a_tree_as_files() -> None:
    found = tree_files(document_of(tree()), "here")
    index, pack = (digest_of(text).removeprefix("sha256:") for text in (b"index", b"pack"))
    assert {path: each.size for path, each in found.files.items()} == {
        "tree.json": 4, f"index/{index}": 5, f"packs/{pack}": 4,
    }  # fmt: skip
    assert found.manifest.digest == document_of(tree()).digest


@pytest.mark.parametrize(
    "more",
    [
        {"config": fields_of(blob("head", "application/json"))},
        {"config": fields_of(blob("head", TREE, size=70_000))},
        {"layers": []},
        {"layers": [fields_of(blob("pack", TREE_PACK))]},
        {"layers": [fields_of(blob("a", TREE_INDEX)), fields_of(blob("b", TREE_INDEX))]},
        {"layers": [fields_of(blob("a", TREE_INDEX, size=300 << 20))]},
        {"layers": [fields_of(blob("a", TREE_INDEX)), fields_of(blob("b", TREE_PACK, size=1 << 33))]},
        {"layers": [fields_of(blob("a", TREE_INDEX)), fields_of(blob("b", "text/plain"))]},
    ],
)
def test_trees_that_are_none(more: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="here"):
        tree_files(document_of(tree(**more)), "here")


def test_what_is_a_tree() -> None:
    assert is_tree(document_of(tree()), "here")
    assert is_tree(document_of({k: v for k, v in tree().items() if k != "artifactType"}), "here")
    assert not is_tree(document_of(image()), "here")
    assert not is_tree(document_of({"schemaVersion": 2, "manifests": [fields_of(blob("m", MANIFEST))]}), "here")


def test_the_same_tree_has_the_same_manifest() -> None:
    subject = Descriptor(media_type=MANIFEST, digest=digest_of(b"s"), size=3, annotations={"a": "b"})

    def make() -> bytes:
        packs = [blob("p1", TREE_PACK), blob("p2", TREE_PACK)]
        return encode(
            to_tree_manifest(blob("h", TREE), blob("i", TREE_INDEX), packs, subject=subject),
            "here",
        )

    assert make() == make()
    document = to_document(make(), MANIFEST, "here")
    manifest = parse_manifest(document, "here")
    assert manifest.subject == Descriptor(media_type=MANIFEST, digest=digest_of(b"s"), size=3)
    assert [each.digest for each in manifest.layers] == [digest_of(text) for text in (b"i", b"p1", b"p2")]
    assert len(tree_files(document, "here").files) == 4


def test_a_manifest_may_not_be_too_large() -> None:
    packs = [blob(str(number), TREE_PACK) for number in range(40_000)]
    with pytest.raises(IntegrityError, match="registries take"):
        encode(to_tree_manifest(blob("h", TREE), blob("i", TREE_INDEX), packs, subject=None), "here")


def test_traces() -> None:
    manifest = to_trace_manifest(
        blob("trace", TRACE), blob("tree", MANIFEST), tree="ab" * 32, workload="01" * 8, created="2026"
    )
    document = to_document(encode(manifest, "here"), MANIFEST, "here")
    assert trace_blob(document, "here") == blob("trace", TRACE)
    listed = Descriptor(
        media_type=MANIFEST, digest=document.digest, size=1, artifact_type=TRACE, annotations=manifest.annotations
    )
    assert trace_path(listed) == f"traces/{'ab' * 32}/{'01' * 8}.json"


@pytest.mark.parametrize(
    ("artifact_type", "tree_digest", "workload"),
    [(TREE, "ab" * 32, "01" * 8), (TRACE, "../x", "01" * 8), (TRACE, "ab" * 32, "../../x"), (TRACE, "", "")],
)
def test_traces_that_are_none(artifact_type: str, tree_digest: str, workload: str) -> None:
    listed = Descriptor(
        media_type=MANIFEST, digest=digest_of(b""), size=1, artifact_type=artifact_type,
        annotations={TREE_DIGEST: tree_digest, WORKLOAD: workload},
    )  # fmt: skip
    assert trace_path(listed) == ""
    with pytest.raises(IntegrityError):
        trace_blob(document_of(tree()), "here")
    large = Manifest(
        schema_version=2, artifact_type=TRACE, config=blob("c"), layers=[blob("t", TRACE, size=1 << 25)]
    )
    with pytest.raises(IntegrityError, match="at most"):
        trace_blob(to_document(encode(large, "here"), MANIFEST, "here"), "here")


def test_the_newest() -> None:
    old, new, other = (
        Descriptor(media_type=MANIFEST, digest=digest_of(text), size=1, annotations={CREATED: created})
        for text, created in ((b"a", "2026-01-01"), (b"b", "2026-02-01"), (b"c", "2026-02-01"))
    )
    assert newest([]) is None
    assert newest([old, new]) == newest([new, old]) == new
    assert newest([new, other]) == newest([other, new]), "everybody chooses the same"
