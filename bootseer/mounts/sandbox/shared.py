"""Directories in this user's cache that are visible inside images at the same path, where a job needs them there.

An environment that set-up makes on top of an image, and compile caches, lie on the node: they outlive the job,
and the next one finds them. An environment contains its own path, which must be the same on all nodes. So its
directory is not below one that is named after the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from bootseer.cache_folder import locate, make_private_dir, prepare
from bootseer.errors import StorageError
from bootseer.storage.os_errors import map_os_errors

SETUP, CACHES = "setup", "caches"  # what a job may need
ENVIRONMENTS, SCRATCH, FIRST_STEP = "image-envs", ("env", "scratch"), "first-step"


def is_of_node(name: str) -> bool:
    """PURE: return whether a variable locates files of processes on the node: no image decides that."""
    return name.startswith("BOOTSEER_") or name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")


def of_node(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for programs in an image, with the node's values where they locate its directories."""
    ours = {name: value for name, value in os.environ.items() if is_of_node(name)}
    return {name: value for name, value in environ.items() if not is_of_node(name)} | ours


def environments(environ: Mapping[str, str]) -> str:
    """Return the directory of environments on top of images. Raises: ConfigError when there is no place for it."""
    return os.path.join(locate(environ, os.geteuid()), ENVIRONMENTS)


def scratch(environ: Mapping[str, str]) -> str:
    """Return the scratch directory of captures. Raises: ConfigError, StorageError."""
    return os.path.join(prepare(locate(environ, os.geteuid())), *SCRATCH)


def first_step(environ: Mapping[str, str]) -> str:
    """Return the directory of compile caches. Raises: ConfigError, StorageError."""
    return os.path.join(prepare(locate(environ, os.geteuid())), FIRST_STEP)


_DIRECTORIES: dict[str, tuple[Callable[[Mapping[str, str]], str], ...]] = {
    SETUP: (environments, scratch),
    CACHES: (first_step,),
}


def shared_directories(needs: Iterable[str], parents: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Make and return the directories. Args: needs: of SETUP, CACHES. parents: further directories, of the job.

    Raises: ConfigError, StorageError when there is no place for them.
    """
    found = [make(environ) for need in needs for make in _DIRECTORIES[need]]
    for directory in found:
        with map_os_errors(directory):
            make_private_dir(directory)
    for directory in parents:
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{directory}: cannot be made for use inside the image: {error.strerror}"
            ) from error
        found.append(directory)
    return found
