"""What the ways of `bench env` start from: the installed tree, archives of it, and our snapshot in a store.

    reference        the environment, as pip left it
    data/env.tar.zst of it, zstd -3
    data/env.tar.gz  of it, by venv-pack, where that works
    data/store       the environment store, signed by
    keys             a key of this bench alone
    built.json       of what, and by which code: another one makes all of it anew

The snapshot is captured as a job's is: a look before set-up, one after it, then the tree of the difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import bootseer.env
import bootseer.storage
import bootseer.tree
from bench.ckpt_run import BOUND
from bench.env_disk import Disk
from bench.env_node import find_snapshot, key_of, open_env_store
from bench.env_packages import Wheels, clean_environ
from bench.record import BenchError, note
from bootseer import aio
from bootseer.env.capture.capture import Capture
from bootseer.env.key.document import encode
from bootseer.env.store.lease import LeaseUnavailable
from bootseer.env.store.snapshot import Snapshot
from bootseer.trust import KeyDirectory, Trust

INSTALL_S = 3600.0
TARGET = ("env", "venv")  # on the disk
ZSTD_LEVEL = 3
_LAYOUT = 1  # of what is made here; another number makes it anew


class Kept(NamedTuple):
    """Paths and sizes."""

    wheels: Wheels
    target: str  # where the environment belongs
    reference: str
    files: int  # regular ones of the reference
    size: int  # bytes of these
    data: str  # the folder that the remote serves
    tar: str
    packed: str  # "" where venv-pack does not work
    keys: str
    digest: str  # of our tree
    tree_files: int
    packs: list[str]
    facts: dict[str, float]  # seconds of setup, end and build


def prepare(directory: str, wheels: Wheels, disk: Disk) -> Kept:
    """Makes what is not there yet. Raises: BenchError."""
    target = target_of(disk)
    data, keys = os.path.join(directory, "data"), os.path.join(directory, "keys")
    reference, stamp_path = os.path.join(directory, "reference"), os.path.join(directory, "built.json")
    stamp = {
        "layout": _LAYOUT,
        "wheels": wheels.names,
        "target": target,
        "code": source_digest(bootseer.env, bootseer.tree, bootseer.storage),
        "python": sys.version,
    }
    facts = _read(stamp_path, stamp)
    if facts is None:
        for path in (data, keys, reference):
            shutil.rmtree(path, ignore_errors=True)
        if os.path.exists(stamp_path):
            os.remove(stamp_path)  # what an interrupted run leaves is not taken for whole
        os.makedirs(os.path.join(data, "store"))
        facts = _make(directory, wheels, disk, data, keys, reference)
        with open(stamp_path, "w", encoding="utf-8") as file:
            json.dump({"of": stamp, "facts": facts}, file)
    found = _find(data, keys, wheels, target)
    packs = os.path.join(data, "store", "trees", found.key, "packs")
    files, size = count(reference)
    packed = os.path.join(data, "env.tar.gz")
    return Kept(
        wheels=wheels,
        target=target,
        reference=reference,
        files=files,
        size=size,
        data=data,
        tar=os.path.join(data, "env.tar.zst"),
        packed=packed if os.path.exists(packed) else "",
        keys=keys,
        digest=found.tree,
        tree_files=found.files,
        packs=sorted(entry.path for entry in os.scandir(packs)),
        facts=facts,
    )


def target_of(disk: Disk) -> str:
    return os.path.join(disk.path, *TARGET)


def make_venv(target: str) -> list[str]:
    """The command that makes an empty virtual environment."""
    return [*BOUND, sys.executable, "-m", "venv", "--without-pip", target]


def install(target: str, wheels: Wheels) -> list[str]:
    """The command by which pip installs all wheels into it, with bytecode."""
    words = ["--python", os.path.join(target, "bin", "python"), "install", "--quiet", "--no-deps", "--no-index"]
    return [*BOUND, sys.executable, "-m", "pip", *words, "--find-links", wheels.folder, "-r", wheels.lock]


def run(argv: Sequence[str], environ: Mapping[str, str], timeout_s: float = INSTALL_S) -> None:
    """Raises: BenchError when it fails, with what it said."""
    try:
        ran = subprocess.run(
            argv, env=dict(environ), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchError(f"{' '.join(argv)}: still running after {timeout_s:g} s") from None
    if ran.returncode:
        raise BenchError(f"{' '.join(argv)}: status {ran.returncode}\n{(ran.stdout + ran.stderr)[-3000:]}")


def count(directory: str) -> tuple[int, int]:
    """Regular files of a folder, and their bytes."""
    files = size = 0
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                files, size = files + 1, size + os.path.getsize(path)
    return files, size


def source_digest(*packages: ModuleType) -> str:
    """Of the code that makes snapshots."""
    found = hashlib.sha256()
    for package in packages:
        directory = os.path.dirname(package.__file__ or "")
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                with open(os.path.join(directory, name), "rb") as file:
                    found.update(file.read())
    return found.hexdigest()


# ---- making ------------------------------------------------------------------------------------------------


def _make(directory: str, wheels: Wheels, disk: Disk, data: str, keys: str, reference: str) -> dict[str, float]:
    target = target_of(disk)
    environ = clean_environ(BOOTSEER_KEYS=keys)
    note(f"installing {len(wheels.names)} packages for the reference and the snapshot")
    KeyDirectory(keys).make("bench")
    disk.renew()
    os.makedirs(os.path.dirname(target))
    capture = Capture([target], environ, name="bench")
    capture.begin()
    began_s = time.monotonic()
    run(make_venv(target), environ)
    run(install(target, wheels), environ)
    facts = {"setup": time.monotonic() - began_s, "end": capture.end().took_s}
    began_s = time.monotonic()
    _publish(capture, os.path.join(data, "store"), environ, wheels, target, facts["setup"])
    facts["build"] = time.monotonic() - began_s
    note("copying and packing it")
    run(["cp", "-a", "--", target, reference], environ)
    tar = os.path.join(data, "env.tar.zst")
    pack = f'tar -C "$0" -cf - . | zstd -q -{ZSTD_LEVEL} -T0 -o "$1"'
    run(["bash", "-o", "pipefail", "-c", pack, reference, tar], environ)
    _venv_pack(directory, target, os.path.join(data, "env.tar.gz"), environ)
    return facts


def _publish(
    capture: Capture, root: str, environ: Mapping[str, str], wheels: Wheels, target: str, setup_s: float
) -> None:
    keyed = key_of(wheels.lock, target, environ)
    trust = Trust.load(environ)
    document, signing = encode(keyed.document), trust.signing_key()
    with open_env_store(root, trust) as store:
        cannot = aio.run_sync(store.prepare(keyed.key, document, signing))
        if cannot is not None:
            raise BenchError(f"the snapshot is not published: {cannot}")
        built = capture.build(store.packs(keyed.key).put, codec=store.codec)
        snapshot = Snapshot(
            key=keyed.key,
            tree=built.tree.digest,
            index_bytes=len(built.tree.index_bytes),
            targets=[target],
            created_s=time.time(),
            expires_s=None,
            setup_s=setup_s,
            distributions="",
            python="",
            files=built.facts.files,
            bytes=built.facts.bytes,
            deleted=built.facts.deleted,
            left_out=[],
            outside=[],
            relocatable=True,
        )
        done = aio.run_sync(store.publish(snapshot, document, built.tree.index_bytes, signing))
    if isinstance(done, LeaseUnavailable) or not done.is_ours:
        raise BenchError(f"the snapshot is not published: {done}")
    if built.facts.left_out:
        raise BenchError(f"the snapshot is not the whole environment: {built.facts.left_out[:3]} are left out")


def _find(data: str, keys: str, wheels: Wheels, target: str) -> Snapshot:
    environ = clean_environ(BOOTSEER_KEYS=keys)
    key = key_of(wheels.lock, target, environ).key
    _, found = find_snapshot(os.path.join(data, "store"), key, Trust.load(environ))
    aio.close()
    return found


def _venv_pack(directory: str, target: str, packed: str, environ: Mapping[str, str]) -> None:
    """Its archive, if it can be had and takes this environment; else a line says why there is none."""
    tools = os.path.join(directory, "tools")
    try:
        if not os.path.isdir(tools):
            words = ["install", "--quiet", "--no-deps", "--target", tools, "venv-pack", "setuptools<81"]
            run([sys.executable, "-m", "pip", *words], {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        words = ["-m", "venv_pack", "-q", "-p", target, "-o", packed]
        run([sys.executable, *words], {**environ, "PYTHONPATH": tools, "PYTHONWARNINGS": "ignore"})
    except BenchError as error:
        shutil.rmtree(tools, ignore_errors=True)
        if os.path.exists(packed):
            os.remove(packed)
        lines = str(error).strip().splitlines()
        note(f"venv-pack is left out: {lines[-1][:300]}")


def _read(path: str, stamp: dict[str, object]) -> dict[str, float] | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return dict(found["facts"]) if found["of"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
