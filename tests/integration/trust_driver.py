"""Publishes and opens trees as a program of a user does: orders as JSON on stdin, one outcome each on stdout.

A process of its own, so that it can be another user, and so that no client of a store outlives a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from bootseer.errors import BootseerError
from bootseer.storage import open_store
from bootseer.tree import compression, index
from bootseer.tree.head import make_head
from bootseer.tree.index import Index
from bootseer.tree.opening import open_tree, publish_tree
from bootseer.trust import Trust


def index_bytes(source: str) -> bytes:
    """A tree with nothing in it but a name of its own."""
    empty = Index(
        tool="test", source=source, packs=[], blocks=b"", parents=[0], names=[b""], modes=[0o40755], uids=[0],
        gids=[0], mtimes_ns=[0], sizes=[0], runs=[[]], targets=[b""], links=[-1],
    )  # fmt: skip
    return compression.compress(index.encode(empty))


async def publish(
    url: str, source: str, options: dict[str, Any], name: str = "", signs: bool = True
) -> dict[str, str]:
    store = open_store(url, options=options)
    data = index_bytes(source)
    head = make_head(data, "image", url, name)
    key = Trust.load().signing_key() if signs else None
    assert key is not None or not signs
    await publish_tree(store, data, head, key)
    await store.aclose()
    return {"digest": head.digest}


async def open_(url: str, options: dict[str, Any], name: str = "", digest: str = "") -> dict[str, str]:
    store = open_store(url.partition("@sha256:")[0], options=options)
    try:
        tree = await open_tree(store, url, Trust.load(), name=name, digest=digest)
    finally:
        await store.aclose()
    return {"source": tree.index.source, "digest": tree.digest, "because": tree.because}


async def main() -> None:
    for order in json.load(sys.stdin):
        act = {"publish": publish, "open": open_}[order.pop("do")]
        try:
            outcome = await act(**order)
        except BootseerError as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(outcome))


if __name__ == "__main__":
    asyncio.run(main())
    # obstore's threads go on while the interpreter ends, and have it aborted now and then (seen with Python 3.11).
    sys.stdout.flush()
    os._exit(0)
