"""What may not be loaded: caches of other software or processors, and caches that somebody has changed.

Each try is a start on a fresh node; what counts are the files that it finds in its caches afterwards. The same
start with the right key, and with caches that nobody has touched, has to find them: a node that loads nothing at
all would be safe, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from bench.compile_job import Node, files_of
from bench.image_remote import Remote
from bench.record import BenchError
from bootseer.env.compile_cache.document import PAYLOAD_TYPE, number_of
from bootseer.env.compile_cache.key import CachesDocument, key_of
from bootseer.trust import SigningKey, seal
from bootseer.trust.dsse import parse


class Safe(NamedTuple):
    """What came of changes."""

    wrong: dict[str, int]  # by change: files that were loaded and are not what was signed
    right: int  # files that are loaded when nothing was changed


def other_documents(document: CachesDocument) -> Iterator[tuple[str, CachesDocument]]:
    """PURE: nodes that are another one in one thing each."""

    def changed(**fields: object) -> CachesDocument:
        return msgspec.structs.replace(document, **fields)

    for name, version in document.software.items():
        yield f"software {name}", changed(software=document.software | {name: f"{version}.1"})
    for name, version in document.compilers.items():
        yield f"compiler {name}", changed(compilers=document.compilers | {name: f"{version}.1"})
    for flag in document.cpu[:: max(1, len(document.cpu) // 8)]:
        yield f"cpu without {flag}", changed(cpu=[each for each in document.cpu if each != flag])
    yield "cpu with more", changed(cpu=sorted([*document.cpu, "avx1024"]))
    yield "accelerator", changed(accelerators=[*document.accelerators, "another one"])
    yield "driver", changed(driver=f"{document.driver}.1")
    yield "salt", changed(salt="other")


def try_foreign(directory: str, store: str, keys: str) -> tuple[dict[str, int], dict[str, int]]:
    """Files that nodes of other kinds loaded: from the store as it is, and when ours lie under their key."""
    own = Node(os.path.join(directory, "own"), store, keys)
    own.seed()
    count, key, document = len(digests_of(own)), own.keyed.key, own.keyed.document
    own.close()
    if not count:
        raise BenchError("with the right key nothing was loaded, either")
    copy = os.path.join(directory, "store")
    shutil.copytree(store, copy)
    foreign, replayed = {}, {}
    for number, (name, other) in enumerate(other_documents(document)):
        other_key = key_of(other)
        if other_key == key:
            raise BenchError(f"{name}: has the same key")
        foreign[name] = _loaded(os.path.join(directory, f"a{number}"), store, keys, other_key)
        shutil.copytree(os.path.join(copy, "caches", key), os.path.join(copy, "caches", other_key))
        replayed[name] = _loaded(os.path.join(directory, f"b{number}"), copy, keys, other_key)
        shutil.rmtree(os.path.join(copy, "caches", other_key))
    return foreign, replayed


def try_tampered(directory: str, store: str, keys: str) -> Safe:
    """Changes each file of a store, one at a time; it is served by a web server, which is nobody's own place."""
    data = os.path.join(directory, "data")
    shutil.copytree(store, os.path.join(data, "store"))
    (key,) = os.listdir(os.path.join(data, "store", "caches"))
    caches = os.path.join(data, "store", "caches", key)
    # The last generation alone: an older one is a good answer to a bad one.
    generations = sorted(name for name in os.listdir(caches) if number_of(name))
    for name in generations[:-1]:
        os.remove(os.path.join(caches, name))
    wrong: dict[str, int] = {}
    with Remote(data, os.path.join(directory, "remote.log")) as remote:
        nodes = iter(range(1 << 20))

        def load() -> dict[str, str]:
            node = Node(os.path.join(directory, f"node{next(nodes)}"), remote.url("store"), keys)
            try:
                node.seed()
                return digests_of(node)
            finally:
                node.close()
                shutil.rmtree(node.folder)

        signed = load()
        if not signed:
            raise BenchError("with caches that nobody has touched nothing was loaded, either")
        for name, change, is_envelope in _changes(caches, generations[-1]):
            path = os.path.join(caches, name.partition(": ")[0])
            with open(path, "rb") as file:
                before = file.read()
            replace(path, change(before))
            found = load()
            # Who signs nothing, or with a key that nobody trusts, is not believed whatever he serves.
            wrong[name] = sum(is_envelope or signed.get(each) != digest for each, digest in found.items())
            replace(path, before)
        if load() != signed:
            raise BenchError("the changes were not undone")
    return Safe(wrong, len(signed))


def _changes(caches: str, envelope: str) -> Iterator[tuple[str, Callable[[bytes], bytes], bool]]:
    """File and what is done, how, and whether the envelope is then not believed at all."""
    stranger = SigningKey.make(name="stranger")

    def resealed(data: bytes, key: SigningKey | None) -> bytes:
        return seal(parse(data, PAYLOAD_TYPE, envelope).payload, PAYLOAD_TYPE, key)

    yield f"{envelope}: signed by a stranger", lambda data: resealed(data, stranger), True
    yield f"{envelope}: not signed", lambda data: resealed(data, None), True
    for path in sorted(files_of(caches)):
        is_envelope = path == envelope
        yield f"{path}: a bit", _flipped, is_envelope
        yield f"{path}: half", lambda data: data[: len(data) // 2], is_envelope
        yield f"{path}: empty", lambda _: b"", is_envelope


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def replace(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def digests_of(node: Node) -> dict[str, str]:
    """All files in a node's caches, by kind and path."""
    found = {}
    for place in node.caches.places:
        for path in files_of(place.path):
            with open(os.path.join(place.path, path), "rb") as file:
                found[f"{place.kind.name}/{path}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _loaded(directory: str, store: str, keys: str, key: str) -> int:
    node = Node(directory, store, keys, key=key)
    try:
        node.seed()
        return len(digests_of(node))
    finally:
        node.close()
        shutil.rmtree(directory)
