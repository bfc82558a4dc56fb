"""Small trees for tests of registries: a folder's files as bytes, and the artefact that they make."""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

import msgspec

from bootseer.storage.oci.manifest import (
    MANIFEST,
    TRACE,
    TREE,
    TREE_INDEX,
    TREE_PACK,
    Descriptor,
    Manifest,
    digest_of,
)
from bootseer.tree import compression
from bootseer.tree.head import Head
from bootseer.tree.head import encode as encode_head
from bootseer.tree.index import BLOCK, BLOCK_BYTES, Index, encode
from bootseer.trust import SigningKey, parse, seal

WORKLOAD = "0123456789abcdef"


class SmallTree(NamedTuple):
    """A tree as the files of its folder."""

    digest: str
    files: dict[str, bytes]  # by path

    @property
    def packs(self) -> list[str]:
        return [path for path in self.files if path.startswith("packs/")]

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))

    def manifest(self) -> bytes:
        """Of its artefact."""
        head, index, *packs = (
            Descriptor(media_type=kind, digest=digest_of(data), size=len(data))
            for kind, data in zip(
                (TREE, TREE_INDEX, *[TREE_PACK] * len(self.packs)), self.files.values(), strict=True
            )
        )
        return msgspec.json.encode(
            Manifest(
                schema_version=2, media_type=MANIFEST, artifact_type=TREE, config=head, layers=[index, *packs]
            )
        )

    def signed(self, key: SigningKey) -> SmallTree:
        """The same by a key."""
        payload = parse(self.files["tree.json"], TREE, "here").payload
        return self._replace(files={**self.files, "tree.json": seal(payload, TREE, key)})

    def trace(self, workload: str = WORKLOAD, *, runs: int = 1, tree: str = "") -> bytes:
        """A hot trace of it, as it is stored."""
        payload = {
            "format": "bootseer-trace/1", "tree": tree or self.digest, "workload": workload, "runs": runs,
            "blocks": [0], "seen": [1], "first_ms": [0],
        }  # fmt: skip
        return seal(msgspec.json.encode(payload), TRACE, None)


def make_tree(
    *, packs: int = 3, blocks: int = 4, name: str = "oci://registry/team/app:v1", seed: int = 0
) -> SmallTree:
    """`blocks` blocks of random bytes in each pack: half a megabyte with four."""
    chance = random.Random(seed)
    stored = [[chance.randbytes(BLOCK_BYTES) for _ in range(blocks)] for _ in range(packs)]
    table, contents = bytearray(), []
    for number, pack in enumerate(stored):
        offset = 0
        for block in pack:
            table += BLOCK.pack(hashlib.sha256(block).digest(), number, offset, len(block), len(block))
            offset += len(block)
        contents.append(b"".join(pack))
    index = Index(
        tool="tests", packs=[(hashlib.sha256(each).digest(), len(each)) for each in contents], blocks=bytes(table),
        parents=[0], names=[b""], modes=[0o40755], uids=[0], gids=[0], mtimes_ns=[0], sizes=[0], runs=[[]],
        targets=[b""], links=[-1],
    )  # fmt: skip
    data = compression.compress(encode(index))
    digest = hashlib.sha256(data).hexdigest()
    head = Head(format="bootseer-tree/1", name=name, digest=digest, index_bytes=len(data), kind="image")
    files = {"tree.json": seal(encode_head(head), TREE, None), f"index/{head.digest}": data}
    files |= {index.pack_path(number): each for number, each in enumerate(contents)}
    return SmallTree(head.digest, files)
