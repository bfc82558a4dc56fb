"""Folders of a tree over folders of the node, in a namespace of this process's own: an environment at its place.

The node's root stays the root. In each folder the tree's part lies above what the node has there, and above both a
tmpfs takes what is written; nothing of it is seen outside, and nothing stays when the last process inside is gone.
To be called in a process with one thread that does nothing else (holder.py). Only for root: marks of a tree that
hide what lies below (`trusted.overlay.opaque`) count for nobody else.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts import kernel, namespaces, overlay, writable
from bootseer.mounts.root import MadeRoot

_FLAGS = kernel.NOSUID | kernel.NODEV


class Layer(NamedTuple):
    """One folder over another."""

    upper: str  # of the tree
    target: str  # of the node, without links on the way; it exists


class LayersSpec(NamedTuple):
    layers: Sequence[Layer]
    scratch: (
        str  # a folder that nobody needs to look at inside, such as the tree's root: a tmpfs hides it for a while
    )


def make_layers(spec: LayersSpec) -> MadeRoot:
    """Mounts them. Raises: ConfigError when this user, kernel or node cannot have it; StorageError."""
    if namespaces.separate():
        raise ConfigError("an environment can be laid over a folder by root alone (CAP_SYS_ADMIN)")
    os.chdir("/")
    opened: list[int] = []
    try:
        for layer in spec.layers:
            for path in layer:
                opened.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        kernel.mount("bootseer", spec.scratch, "tmpfs", _FLAGS, "mode=0700")
        for number, layer in enumerate(spec.layers):
            above, below = opened[2 * number : 2 * number + 2]
            folder = os.path.join(spec.scratch, str(number))
            os.mkdir(folder, 0o700)
            root = os.fstat(above)
            upper, work = writable.make_layers(folder, root, claimed_fd=-1, gives_away=True)
            os.utime(upper, ns=(root.st_atime_ns, root.st_mtime_ns))
            lowers = [f"/proc/self/fd/{above}", f"/proc/self/fd/{below}"]
            overlay.mount_overlay(lowers, layer.target, upper=upper, work=work)
        kernel.unmount(spec.scratch, kernel.DETACH)
    except OSError as error:
        raise StorageError(f"the environment cannot be laid over its folders: {error}") from error
    finally:
        for fd in opened:
            os.close(fd)
    return MadeRoot(has_overlay=True, has_user_namespace=False, notes=())
