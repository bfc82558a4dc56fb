"""What the mounted trees of this user on this node say of themselves: bytes by source, waits of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.errors import BootseerError
from bootseer.mounts.tree_daemon.places import check, locate, places
from launcher.serve.jobs import NotAnsweredError, request

ANSWER_S = 2.0
MAX_TREES = 64


class TreeAnswer(NamedTuple):
    """A mounted tree, and the answer of its daemon."""

    digest: str
    status: Mapping[str, Any]


async def look_at_trees(environ: Mapping[str, str]) -> list[TreeAnswer]:
    """Return the trees whose daemons answer."""
    try:
        runtime = locate(environ)
        check(runtime)
        found = list(places(runtime))[:MAX_TREES]
    except (BootseerError, OSError):
        return []  # nothing is mounted
    answers = await asyncio.gather(*(_ask(each.digest, each.control_path) for each in found))
    return [each for each in answers if each is not None]


async def _ask(digest: str, path: str) -> TreeAnswer | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return TreeAnswer(digest, await request(path, "status"))
    except (OSError, TimeoutError, NotAnsweredError):
        return None  # it ends, or hangs: `bootseer image ls` shows that
