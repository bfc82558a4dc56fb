"""What `bench image` keeps between runs: the root, its layers, our tree and the key that it is signed with.

FOLDER/KIND/root         what pip installed, with the interpreter; stamp.json says of what
            data/layers  the remote's files
            data/tree
            keys         of this bench alone
            built.json   which code has built the tree: another one builds it anew
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import NamedTuple

import bootseer.tree as tree_package
from bench.image_layers import make_layers
from bench.image_tree import Root, walk
from bench.image_ways import NAME, build
from bench.record import note
from bootseer import aio
from bootseer.image.commands.common import opened
from bootseer.trust import Trust


class Built(NamedTuple):
    """What the remote has."""

    data: str  # its folder
    keys: str
    digest: str  # of the tree
    block_bytes: list[int]  # as stored, by block
    layers: int
    layers_bytes: int

    @property
    def block_count(self) -> int:
        return len(self.block_bytes)


def prepare(root: Root, directory: str) -> Built:
    """Layers and the tree of a root, made if they are not there yet, or by another builder."""
    data, keys = os.path.join(directory, "data"), os.path.join(directory, "keys")
    stamp_path = os.path.join(directory, "built.json")
    layers = make_layers(root.folder, os.path.join(data, "layers"))
    stamp = source_digest()
    try:
        with open(stamp_path, encoding="utf-8") as file:
            is_built = json.load(file) == stamp
    except (OSError, ValueError):
        is_built = False
    if not is_built:
        note("building our tree")
        if os.path.exists(stamp_path):
            os.remove(stamp_path)  # what an interrupted build leaves is not taken for a tree
        for path in (os.path.join(data, "tree"), keys):
            shutil.rmtree(path, ignore_errors=True)
        build(root.folder, data, keys)
        with open(stamp_path, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
    digest, sizes = read_tree(os.path.join(data, "tree"))
    return Built(data, keys, digest, sizes, len(layers), sum(layer.size for layer in layers))


def read_tree(directory: str) -> tuple[str, list[int]]:
    """Digest and stored bytes of all blocks of the tree in a folder of ours."""
    with opened(directory, name=NAME, trust=Trust.load({})) as tree:
        found = tree.digest, [tree.index.block(number).stored_bytes for number in range(tree.index.block_count)]
    aio.close()
    return found


def source_digest() -> str:
    """Of the code that builds trees: another one builds them anew."""
    found = hashlib.sha256()
    directory = os.path.dirname(tree_package.__file__ or "")
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py"):
            with open(os.path.join(directory, name), "rb") as file:
                found.update(file.read())
    return found.hexdigest()


def kept_bytes(directory: str) -> int:
    """What earlier runs have left."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in walk(directory))


def default_directory() -> str:
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(above, "bootseer-bench", "image")
