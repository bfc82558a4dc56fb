"""PURE: whose the files of an environment are where it is restored.

What belonged to the owner of the environment where it was made belongs to the owner of the target here: else an
environment that an ordinary user (of CI, say) has made would leave files that root runs to whoever has that number
on this node. What set-up gave to others on purpose stays theirs.
"""

from __future__ import annotations

import msgspec

from bootseer.env.subtree import Subtree


def owned_by(below: Subtree, uid: int, gid: int) -> Subtree:
    """The same, in the hands of the target's owner `uid` and its group."""
    tree = below.tree
    maker, group = tree.uids[0], tree.gids[0]
    if (maker, group) == (uid, gid):
        return below
    uids = [uid if each == maker else each for each in tree.uids]
    # Another group of the maker's means other people here.
    gids = [
        gid if each == group or owner == maker else each for each, owner in zip(tree.gids, tree.uids, strict=True)
    ]
    return below._replace(tree=msgspec.structs.replace(tree, uids=uids, gids=gids))
