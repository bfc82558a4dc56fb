"""An environment that is mounted: its tree over its targets, seen by the ranks alone. Nothing is unpacked.

In: where the tree is, its targets, a holder (a process forked before the caller had threads). Out: words before a
rank's command that bring it in. The tree's daemon fetches blocks as they are read, keeps and prefetches them, and
is found again by the next start on the node; the mount namespace and what is written in it belong to one job.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.env.admission import Admission
from bootseer.errors import ConfigError, IntegrityError, StorageError
from bootseer.mounts.holder import Holder
from bootseer.mounts.image_root import enter_path
from bootseer.mounts.layers import Layer, LayersSpec
from bootseer.mounts.privileges import may_mount
from bootseer.mounts.tree_mount import MountedTree, TreeOptions, mount_tree
from bootseer.storage.os_errors import map_os_errors

if TYPE_CHECKING:
    from bootseer.trust import Trust

WHOLE_BYTES = 4 << 30  # stored; reads of a start that nobody has recorded are small and many
OPTIONS = TreeOptions(whole_bytes=WHOLE_BYTES, shares=True)


class DamagedError(IntegrityError):
    """Blocks of the tree were asked for at all that may have them: no other way to unpack it would have them."""


class MountedEnv:
    """Ranks can be started in it until `close`; those that run then go on."""

    def __init__(
        self, tree: MountedTree, holder: Holder, targets: Sequence[str], seconds: Mapping[str, float]
    ) -> None:
        self._tree, self._holder = tree, holder
        self._lease = tree.hold()
        self.seconds = dict(seconds)  # what each step took
        try:
            began_s = time.monotonic()
            layers = [Layer(os.path.join(tree.folder, str(n)), target) for n, target in enumerate(targets)]
            self.address = holder.lay(LayersSpec(layers, tree.folder))
            self.seconds["lay"] = time.monotonic() - began_s
        except BaseException:
            self._lease.close()
            raise
        # -I and -S: nothing of the caller's Python settings counts, and nothing is looked for.
        self.prefix = (sys.executable, "-I", "-S", enter_path(), self.address)

    @property
    def pid(self) -> int:
        """Of the process that sees it, and lets others in."""
        return self._holder.pid

    @property
    def digest(self) -> str:
        return self._tree.digest

    @property
    def faults_path(self) -> str:
        """The file that tells what of it could not be read (bootseer.mounts.faults)."""
        return self._tree.faults_path

    @property
    def control(self) -> str:
        """The socket of the process that serves it."""
        return self._tree.control

    def is_lost(self) -> bool:
        """Whether the tree's daemon has ended: what is read of it fails."""
        return self._lease.is_lost()

    def end_start(self) -> bool:
        """The first step is over: what was read until now is the trace. Whether something was recorded."""
        return self._tree.end_start()

    def status(self) -> dict[str, object]:
        """Figures of the tree's daemon."""
        return self._tree.status()

    def close(self) -> None:
        """Also ends the holder."""
        self._holder.close()
        self._lease.close()


def mount_env(
    url: str,
    digest: str,
    targets: Sequence[str],
    holder: Holder,
    *,
    trust: Trust | None = None,
    workload: str = "",
    options: TreeOptions | None = None,
    environ: Mapping[str, str] | None = None,
) -> MountedEnv:
    """Lays the tree at `url` over its targets: folder "0" of it over the first, and so on.

    Args: url: of the tree's folder in its store; digest: of the tree, which is all that is believed; workload: by
        bootseer.blocks.trace.workload_key: which recording is prefetched; without one everything is; holder:
        closed with the result, or by the caller after an error.
    Raises: ConfigError when this user or machine cannot have it, with the reason; StorageError, also where blocks
        of it could not be read and still cannot; IntegrityError, also for a tree that has what no environment may.
    """
    if not may_mount():
        raise ConfigError("mounts need root (CAP_SYS_ADMIN)")
    began_s = time.monotonic()
    options = options or OPTIONS
    admission = Admission(url, digest, len(targets), options.store, os.environ if environ is None else environ)
    tree = mount_tree(
        url,
        trust=trust,
        digest=digest,
        workload=workload,
        options=options,
        environ=environ,
        vetting=admission,
    )
    if tree.unreadable:
        why = "; ".join(tree.unreadable)
        if tree.is_damaged:
            raise DamagedError(why)
        raise StorageError(f"reads of it failed a moment ago, or in an earlier start: {why}")
    seconds = {"tree": time.monotonic() - began_s}
    admission.check()
    seconds["admission"] = time.monotonic() - began_s - seconds["tree"]
    real = []
    for target in targets:
        with map_os_errors(target):
            os.makedirs(target, mode=0o755, exist_ok=True)  # something to mount on
        real.append(os.path.realpath(target))
        if real[-1] == "/":
            raise ConfigError(f"{target}: is the root folder, and no target")
    return MountedEnv(tree, holder, real, seconds)
