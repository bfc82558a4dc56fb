"""Folders in this user's cache that are seen inside images at the same path, where a job needs them there.

An environment that set-up makes on top of an image, and first-step caches, lie on the node: they outlive the job,
and the next one finds them. What set-up makes has its path in it, which has to be the same on all nodes; so its
folder is not below one that is named after the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from bootseer.cache_folder import locate, make_private, prepare
from bootseer.errors import StorageError
from bootseer.storage.os_errors import map_os_errors

SETUP, CACHES = "setup", "caches"  # what a job may need
ENVIRONMENTS, SCRATCH, FIRST_STEP = "image-envs", ("env", "scratch"), "first-step"


def is_of_node(name: str) -> bool:
    """PURE: whether a variable says where processes on the node have their own files: no image decides that."""
    return name.startswith("BOOTSEER_") or name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")


def of_node(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an environment that programs in an image get, for what has to find folders on this node."""
    ours = {name: value for name, value in os.environ.items() if is_of_node(name)}
    return {name: value for name, value in environ.items() if not is_of_node(name)} | ours


def environments(environ: Mapping[str, str]) -> str:
    """Where environments on top of images lie. Raises: ConfigError when there is no place for it."""
    return os.path.join(locate(environ, os.geteuid()), ENVIRONMENTS)


def scratch(environ: Mapping[str, str]) -> str:
    """Of captures. Raises: ConfigError, StorageError."""
    return os.path.join(prepare(locate(environ, os.geteuid())), *SCRATCH)


def first_step(environ: Mapping[str, str]) -> str:
    """Where first-step caches lie. Raises: ConfigError, StorageError."""
    return os.path.join(prepare(locate(environ, os.geteuid())), FIRST_STEP)


_FOLDERS: dict[str, tuple[Callable[[Mapping[str, str]], str], ...]] = {
    SETUP: (environments, scratch),
    CACHES: (first_step,),
}


def shared_folders(needs: Iterable[str], parents: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Makes them. Args: needs: of SETUP, CACHES. parents: further folders, of the job's own.

    Raises: ConfigError, StorageError when there is no place for them.
    """
    found = [make(environ) for need in needs for make in _FOLDERS[need]]
    for folder in found:
        with map_os_errors(folder):
            make_private(folder)
    for folder in parents:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{folder}: cannot be made, to be seen inside the image: {error.strerror}"
            ) from error
        found.append(folder)
    return found
