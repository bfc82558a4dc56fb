"""What tests of captures share: virtual environments, folders that change, and a tree laid over what was before.

The oracle is by hand: a copy of the target as it was before, over it the tree, as a plain program would unpack it;
that has to be what the commands left, attribute by attribute (tests/support_trees.py).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer.env.capture.capture import Built, Capture, Changes
from bootseer.tree.block_codec import unpack_block
from bootseer.tree.builder.building import BuiltTree
from bootseer.tree.index import BLOCK_UNITS, HOLE, UNIT_BYTES, decode
from tests.support import clean_environ


class Captured(NamedTuple):
    """A capture that was built."""

    changes: Changes
    built: Built
    packs: dict[str, bytes]


def environ_of(directory: str | os.PathLike[str], **more: str) -> dict[str, str]:
    """An environment whose caches and home are in a folder of the test."""
    home = os.path.join(directory, "home")
    tmp = os.path.join(directory, "tmp")
    for each in (home, tmp):
        os.makedirs(each, exist_ok=True)
    return clean_environ() | {
        "HOME": home,
        "TMPDIR": tmp,
        "BOOTSEER_CACHE": os.path.join(home, ".cache", "bootseer"),
        "PIP_CACHE_DIR": os.path.join(home, ".cache", "pip"),
        "UV_CACHE_DIR": os.path.join(home, ".cache", "uv"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        **more,
    }


def make_venv(path: str | os.PathLike[str]) -> str:
    """A virtual environment that has this interpreter's pip, without installing one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True, stdin=subprocess.DEVNULL)
    return os.fspath(path)


def pip(venv: str, environ: Mapping[str, str], *args: str) -> None:
    """Runs pip for a virtual environment."""
    command = [sys.executable, "-m", "pip", "--python", os.path.join(venv, "bin", "python"), "-q", *args]
    done = subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def capture(
    targets: Sequence[str | os.PathLike[str]],
    environ: Mapping[str, str],
    change: Callable[[], object],
    *,
    then: Callable[[], object] | None = None,
    inputs: Sequence[str] = (),
    python: str = "",
    hot_paths: Sequence[bytes] = (),
) -> Captured:
    """All three steps around `change`; `then` is what happens after the second look."""
    capturing = Capture([os.fspath(each) for each in targets], environ, inputs=inputs, python=python)
    capturing.begin()
    change()
    changes = capturing.end()
    if then is not None:
        then()
    packs: dict[str, bytes] = {}
    built = capturing.build(packs.__setitem__, hot_paths=hot_paths, threads=2)
    return Captured(changes, built, packs)


def paths_of(captured: Captured) -> set[str]:
    """Everything in the tree but the folders of targets."""
    tree = captured.built.tree.tree
    return {os.fsdecode(tree.path(entry)) for entry in range(1, len(tree)) if tree.parents[entry]}


def restore(captured: Captured, number: int, directory: str) -> None:
    """Lays what was captured of a target over a folder that is as the target was before."""
    found = _Device(captured.built.tree, captured.packs)
    tree = decode(captured.built.tree.index_bytes, captured.built.tree.digest, "captured")
    top = b"%d" % number
    inside = [entry for entry in range(len(tree)) if (tree.path(entry) + b"/").startswith(top + b"/")]
    opaque = set(tree.opaque)
    places = {}
    for entry in inside:
        path = tree.path(entry)[len(top) + 1 :]
        place = places[entry] = os.path.join(os.fsencode(directory), path) if path else os.fsencode(directory)
        mode = tree.modes[entry]
        if stat.S_ISDIR(mode):
            if os.path.lexists(place) and (entry in opaque or not os.path.isdir(place) or os.path.islink(place)):
                _remove(place)
            os.makedirs(place, exist_ok=True)
            continue
        _remove(place)
        if tree.rdevs.get(entry) == (0, 0) and stat.S_ISCHR(mode):
            continue
        if tree.links[entry] != -1:
            os.link(places[tree.links[entry]], place, follow_symlinks=False)
            continue
        if stat.S_ISLNK(mode):
            os.symlink(tree.targets[entry], place)
        else:
            with open(place, "wb") as file:
                for offset, address, length in tree.pieces(entry):
                    if address != HOLE:
                        file.seek(offset)
                        file.write(found.read(address, length))
                file.truncate(tree.sizes[entry])
            os.chmod(place, stat.S_IMODE(mode))
        for name, value in tree.xattrs.get(entry, []):
            os.setxattr(place, name, value, follow_symlinks=False)
        _own(place, tree.uids[entry], tree.gids[entry])
        os.utime(place, ns=(tree.mtimes_ns[entry],) * 2, follow_symlinks=False)
    for entry in reversed(inside):
        if stat.S_ISDIR(tree.modes[entry]):
            place = places[entry]
            _own(place, tree.uids[entry], tree.gids[entry])
            os.chmod(place, stat.S_IMODE(tree.modes[entry]))
            os.utime(place, ns=(tree.mtimes_ns[entry],) * 2)


def copy_exactly(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """With owners, times, links and attributes."""
    subprocess.run(["cp", "-a", "--", source, target], check=True)


class _Device:
    """The blocks of a tree, from its packs."""

    def __init__(self, built: BuiltTree, packs: Mapping[str, bytes]) -> None:
        self._tree = built.tree
        self._packs = packs

    def read(self, address: int, length: int) -> bytes:
        number, inside = divmod(address, BLOCK_UNITS)
        block = self._tree.block(number)
        pack = self._packs[self._tree.packs[block.pack][0].hex()]
        stored = pack[block.offset : block.offset + block.stored_bytes]
        raw = unpack_block(stored, block.raw_bytes, "block")
        data = raw[inside * UNIT_BYTES : inside * UNIT_BYTES + length]
        assert len(data) == length
        return data


def _remove(place: bytes) -> None:
    if os.path.islink(place) or (os.path.lexists(place) and not os.path.isdir(place)):
        os.unlink(place)
    elif os.path.isdir(place):
        shutil.rmtree(place)


def _own(place: bytes, uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.chown(place, uid, gid, follow_symlinks=False)
