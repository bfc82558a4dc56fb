"""The method `unpack`: new files are made beside each target, then all are moved into place (move.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgspec

from bootseer.counted import counted
from bootseer.env.capture.subtree import Subtree, subtree
from bootseer.env.restore.call import RestoreCall
from bootseer.env.restore.claim import claimed_at
from bootseer.env.restore.move import TargetMove, move
from bootseer.env.restore.relocate import MAX_NAMED, relocate, why_not
from bootseer.env.restore.staging import Claim
from bootseer.env.restore.unpack_helpers import UnpackWorkers, unpack_helpers
from bootseer.env.store.admissible import find_tree_fault
from bootseer.errors import ConfigError, IntegrityError
from bootseer.linux.cgroups import usable_cores
from bootseer.tree.reading import BlockSource
from bootseer.tree.unpack.helpers import HelperFailedError
from bootseer.tree.unpack.tree import Materialised, Progress, materialise

MAX_THREADS = 8  # two per core, as one waits for a store or a lock of the file system


def unpack(call: RestoreCall, hot: Sequence[int], on_progress: Progress | None) -> bool:
    """Unpack and move. Return False if another process was faster and the environment is there."""
    with ExitStack() as stack:
        claims = {
            target: stack.enter_context(claimed_at(target, call.environ, call.wait_s))
            for target in sorted(call.targets)  # in a fixed order, which prevents deadlocks
        }
        for claimed in claims.values():
            call.notes += claimed.notes
        if call.is_there():
            return False
        call.check_expected()
        # They start while the tree is opened, and are ready together with it.
        helpers = stack.enter_context(
            unpack_helpers(call.tree, call.snapshot, call.environ, is_wanted=not hot and len(call.targets) == 1)
        )
        opened = stack.enter_context(call.tree.open())
        reason = find_tree_fault(opened.tree, len(call.targets))
        if reason:
            raise IntegrityError(f"{call.tree.url or 'its tree'}: {reason}")
        parts = [
            TargetMove(
                claims[target], _owned_by_target(subtree(opened.tree, str(number).encode()), claims[target])
            )
            for number, target in enumerate(call.targets)
        ]
        moves = call.moves()
        if moves:
            reason = why_not(opened.tree, is_relocatable=call.snapshot.relocatable)
            if reason:
                raise ConfigError(f"{call.targets[0]}: the environment of {moves[0][0].decode()}: {reason}")
        try:
            for part in parts:
                _fill(call, part, opened.blocks, hot, helpers, on_progress)
                if moves:
                    told = relocate(part.below.tree, part.staged.tree_fd, moves, part.claim.target)
                    call.notes += [f"warning: moved to {part.claim.target}: {line}" for line in told[:MAX_NAMED]]
                    if len(told) > MAX_NAMED:
                        call.notes.append(f"warning: and {counted(len(told) - MAX_NAMED, 'more file')} like these")
            call.before_move()
            move(call, parts)
        finally:
            for part in parts:
                if part.staging is not None and not part.is_kept:
                    part.staging.throw_away()
    return True


def _fill(
    call: RestoreCall,
    part: TargetMove,
    blocks: BlockSource,
    hot: Sequence[int],
    helpers: UnpackWorkers | None,
    on_progress: Progress | None,
) -> None:
    """Unpack the files of a target beside it."""

    def fill(helpers: UnpackWorkers | None) -> Materialised:
        part.staging = part.claim.stage()
        try:
            return materialise(
                part.below.tree,
                part.staging.tree,
                blocks,
                hot=hot,
                threads=_threads(),
                on_progress=on_progress,
                is_private=True,
                helpers=helpers,
                meanwhile=partial(part.prepare_ahead, call),
            )
        finally:
            if helpers is not None:
                helpers.close()  # in any case: no other process writes there any more

    try:
        done = fill(helpers)
    except HelperFailedError as error:
        call.notes.append(f"the environment is unpacked by a single process: {error}")
        part.staged.throw_away()
        done = fill(None)
    for what, count in done.skipped.items():
        call.skipped[what] = call.skipped.get(what, 0) + count


def _owned_by_target(below: Subtree, claimed: Claim) -> Subtree:
    """Give the files to the owner of the target; of a new target this is the caller."""
    if claimed.is_fresh:
        return owned_by(below, os.geteuid(), os.getegid())
    found = os.fstat(claimed.target_fd)
    return owned_by(below, found.st_uid, found.st_gid)


def _threads() -> int:
    return min(MAX_THREADS, 2 * usable_cores())


def owned_by(below: Subtree, uid: int, gid: int) -> Subtree:
    """Return the subtree with the maker's files given to the target's owner `uid` and group `gid`."""
    tree = below.tree
    maker, group = tree.uids[0], tree.gids[0]
    if (maker, group) == (uid, gid):
        return below
    uids = [uid if each == maker else each for each in tree.uids]
    # The maker's other groups have other members on this node.
    gids = [
        gid if each == group or owner == maker else each for each, owner in zip(tree.gids, tree.uids, strict=True)
    ]
    return below._replace(tree=msgspec.structs.replace(tree, uids=uids, gids=gids))
