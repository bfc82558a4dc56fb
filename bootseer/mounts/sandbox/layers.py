"""Directories of a tree over directories of the node, in a namespace of this process: an environment at its place.

The node's root stays the root. In each directory the tree's part lies above the node's, and a tmpfs above both
takes writes. Nothing of it is visible outside, and nothing stays after the last process inside. Call it in a
process with one thread that does nothing else (process.py). Only for root: the marks by which a tree hides lower
layers (`trusted.overlay.opaque`) have no effect for other users.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.errors import ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.linux import namespaces
from bootseer.mounts.sandbox import overlay, writable
from bootseer.mounts.sandbox.root import RootResult

_FLAGS = kernel.NOSUID | kernel.NODEV


class Layer(NamedTuple):
    """One directory over another."""

    upper: str  # of the tree
    target: str  # of the node, without symbolic links; it exists


class LayersSpec(NamedTuple):
    layers: Sequence[Layer]
    scratch: str  # a directory that is not accessed inside, such as the tree's root: a tmpfs hides it for a while


def make_layers(spec: LayersSpec) -> RootResult:
    """Mount the layers. Raises: ConfigError when this user, kernel or node does not support it; StorageError."""
    if namespaces.separate():
        raise ConfigError("only root can mount an environment over a directory (CAP_SYS_ADMIN)")
    os.chdir("/")
    opened: list[int] = []
    try:
        for layer in spec.layers:
            for path in layer:
                opened.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        kernel.mount("bootseer", spec.scratch, "tmpfs", _FLAGS, "mode=0700")
        for number, layer in enumerate(spec.layers):
            above, below = opened[2 * number : 2 * number + 2]
            directory = os.path.join(spec.scratch, str(number))
            os.mkdir(directory, 0o700)
            root = os.fstat(above)
            upper, work = writable.make_layers(directory, root, claimed_fd=-1, gives_away=True)
            os.utime(upper, ns=(root.st_atime_ns, root.st_mtime_ns))
            lowers = [f"/proc/self/fd/{above}", f"/proc/self/fd/{below}"]
            overlay.mount_overlay(lowers, layer.target, upper=upper, work=work)
        kernel.unmount(spec.scratch, kernel.DETACH)
    except OSError as error:
        raise StorageError(f"the environment cannot be mounted over its directories: {error}") from error
    finally:
        for fd in opened:
            os.close(fd)
    return RootResult(has_overlay=True, has_user_namespace=False, notes=())
