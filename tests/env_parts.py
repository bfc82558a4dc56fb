"""What tests of the environment store share: tiny trees and snapshots, users' keys, a walk of all around."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bootseer import aio
from bootseer.env.store.snapshot import PAYLOAD_TYPE, Snapshot
from bootseer.env.store.store import EnvStore
from bootseer.storage import Store
from bootseer.tree import compression
from bootseer.tree.builder.building import BuiltTree, build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index, digest_of, encode
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey, seal

NOW_S = 1_800_000_000.0
ADA, EVE = SigningKey.make(name="ada"), SigningKey.make(name="eve")
ADAS = Trust([TrustedKey(PublicKey(ADA.public, "ada"), "/keys/ada.pub")])


def document(name: str = "a") -> tuple[str, bytes]:
    """A key, and the document that it is of."""
    data = json.dumps({"format": "bootseer-env-key/1", "commands": [f"pip install {name}"]}).encode()
    return hashlib.sha256(data).hexdigest(), data


def make_snapshot(key: str, tree: str, index_bytes: int, /, **more: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "key": key,
        "tree": tree,
        "index_bytes": index_bytes,
        "targets": ["/opt/venv"],
        "created_s": NOW_S,
        "expires_s": None,
        "setup_s": 12.5,
        "distributions": "",
        "python": "3.11.7",
        "files": 2,
        "bytes": 10,
        "deleted": 0,
        "left_out": [],
        "outside": [],
        "relocatable": True,
    }
    return Snapshot(**(fields | more))


def write_environment(directory: Path, text: str = "x", targets: int = 1) -> Path:
    """The files of a tiny environment: a folder for each target."""
    for number in range(targets):
        package = directory / str(number) / "lib" / "small"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"VALUE = {text!r}\n")
        (package / "data.bin").write_bytes(hashlib.sha256(text.encode()).digest() * 5000)
        (directory / str(number) / "bin").mkdir()
        (directory / str(number) / "bin" / "python").symlink_to("/usr/bin/python3")
    return directory


def build_into(store: EnvStore, key: str, directory: Path) -> BuiltTree:
    """The packs of a folder's tree go into the store; from plain code."""
    return build(DirectorySource(str(directory)), store.packs(key).put, threads=1)


def publish(
    store: EnvStore, directory: Path, name: str = "a", *, key: SigningKey | None = ADA, **more: Any
) -> Any:
    """Builds and publishes; from plain code."""
    replaces = more.pop("replaces", 0)
    env_key, data = document(name)
    built = build_into(store, env_key, directory)
    snapshot = make_snapshot(env_key, built.digest, len(built.index_bytes), **more)
    return aio.run_sync(store.publish(snapshot, data, built.index_bytes, key, replaces=replaces))


def put_raw(
    store: Store, key: str, snapshot: Snapshot, signer: SigningKey | None = ADA, *, number: int = 1
) -> None:
    """A generation past all checks: what an attacker, or somebody whose key was stolen, can write."""
    import msgspec

    envelope = seal(msgspec.json.encode(snapshot), PAYLOAD_TYPE, signer)
    aio.run_sync(store.publish(f"keys/{key}/env-{number:06d}.json", envelope))


def put_index(store: Store, key: str, index: Index) -> tuple[str, int]:
    """An index past the builder; gives digest and size."""
    data = compression.compress(encode(index))
    digest = digest_of(data)
    aio.run_sync(store.publish(f"trees/{key}/index/{digest}", data))
    return digest, len(data)


def everything(directory: Path, without: Sequence[Path] = ()) -> dict[str, tuple[object, ...]]:
    """All names below a folder with what would change if somebody wrote there."""
    found: dict[str, tuple[object, ...]] = {}
    for above, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if Path(above, name) not in without]
        for name in (*directories, *files):
            path = os.path.join(above, name)
            status = os.lstat(path)
            found[path] = (status.st_mode, status.st_ino, status.st_uid, status.st_mtime_ns, status.st_size)
            if stat.S_ISREG(status.st_mode):
                found[path] += (hashlib.sha256(Path(path).read_bytes()).hexdigest(),)
    return found
