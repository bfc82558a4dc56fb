"""The way `unpack`: new files are made beside each target, then all of them are moved there (restore_move.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bootseer.counted import counted
from bootseer.env.admissible import why_no_environment
from bootseer.env.owning import owned_by
from bootseer.env.relocate import MOST_NAMED, relocate, why_not
from bootseer.env.restore_call import Call
from bootseer.env.restore_claim import claimed_at
from bootseer.env.restore_move import Part, move
from bootseer.env.staging import Claim
from bootseer.env.subtree import Subtree, subtree
from bootseer.env.unpack_helpers import UnpackHelpers, unpack_helpers
from bootseer.errors import ConfigError, IntegrityError
from bootseer.storage.cpu_limits import usable_cores
from bootseer.tree.materialise import Materialised, Progress, materialise
from bootseer.tree.materialise_helpers import HelperFailedError
from bootseer.tree.reading import BlockSource

MOST_THREADS = 8  # two for a core: one waits for a store or a lock of the file system


def unpack(call: Call, hot: Sequence[int], on_progress: Progress | None) -> bool:
    """False: another process was faster, and the environment is there."""
    with ExitStack() as stack:
        claims = {
            target: stack.enter_context(claimed_at(target, call.environ, call.wait_s))
            for target in sorted(call.targets)  # in one order: nobody waits for somebody who waits for him
        }
        for claimed in claims.values():
            call.notes += claimed.notes
        if call.is_there():
            return False
        call.check_expected()
        # They begin while the tree is opened, and are ready when it is.
        helpers = stack.enter_context(
            unpack_helpers(call.tree, call.snapshot, call.environ, is_wanted=not hot and len(call.targets) == 1)
        )
        opened = stack.enter_context(call.tree.open())
        reason = why_no_environment(opened.tree, len(call.targets))
        if reason:
            raise IntegrityError(f"{call.tree.url or 'its tree'}: {reason}")
        parts = [
            Part(claims[target], _at_home(subtree(opened.tree, str(number).encode()), claims[target]))
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
                    call.notes += [f"warning: moved to {part.claim.target}: {line}" for line in told[:MOST_NAMED]]
                    if len(told) > MOST_NAMED:
                        call.notes.append(
                            f"warning: and {counted(len(told) - MOST_NAMED, 'more file')} like these"
                        )
            call.before_move()
            move(call, parts)
        finally:
            for part in parts:
                if part.staging is not None and not part.is_kept:
                    part.staging.throw_away()
    return True


def _fill(
    call: Call,
    part: Part,
    blocks: BlockSource,
    hot: Sequence[int],
    helpers: UnpackHelpers | None,
    on_progress: Progress | None,
) -> None:
    """Makes the files of a target, beside it."""

    def fill(helpers: UnpackHelpers | None) -> Materialised:
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
                meanwhile=partial(part.look_ahead, call),
            )
        finally:
            if helpers is not None:
                helpers.close()  # whatever happened: nobody else writes there any more

    try:
        done = fill(helpers)
    except HelperFailedError as error:
        call.notes.append(f"the environment is unpacked by one process alone: {error}")
        part.staged.throw_away()
        done = fill(None)
    for what, count in done.skipped.items():
        call.skipped[what] = call.skipped.get(what, 0) + count


def _at_home(below: Subtree, claimed: Claim) -> Subtree:
    """In the hands of who has the target; a new one is the caller's."""
    if claimed.is_fresh:
        return owned_by(below, os.geteuid(), os.getegid())
    found = os.fstat(claimed.target_fd)
    return owned_by(below, found.st_uid, found.st_gid)


def _threads() -> int:
    return min(MOST_THREADS, 2 * usable_cores())
