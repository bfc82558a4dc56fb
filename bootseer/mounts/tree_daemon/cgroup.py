"""Moves a process that outlives its starter out of the starter's cgroup (v2).

The daemon of a tree serves all jobs of a node. In its starter's cgroup it would end with that cgroup's
`cgroup.kill` (systemd, Slurm, containers). Or others would wait for it, as a cgroup with a process has not ended.

It moves to a cgroup `bootseer-trees` at the highest visible level of the hierarchy; its last user removes that. It
stays where it is if that cannot be made or entered: without rights, read-only, with cgroup v1 only. In a container
it stays as well, as the container's cgroup is the highest. It then ends with its starter, and a job whose tree is
lost mounts it again. It also stays below its starter's subreaper, so a daemon that a rank has started ends with
bootrun's supervisor.
"""

from __future__ import annotations

import errno
import os

from bootseer.errors import StorageError
from bootseer.linux import mount as kernel

NAME = "bootseer-trees"
_UNIFIED = "0::"


def leave() -> str:
    """Move this process and its future children. Returns: why it could not, "" on success."""
    own = ""
    try:
        own = own_path(_read_own())
        if own in ("", "/"):
            return ""
        top = top_of(kernel.mounts(), own)
        if not top:
            return f"it stays in the cgroup {own}, and ends with it: no higher cgroup is visible"
        for is_last in (False, False, True):
            try:
                os.makedirs(f"{top}/{NAME}", 0o755, exist_ok=True)
                _enter(f"{top}/{NAME}")
                break
            except OSError as error:
                # Its last user removed it between the two calls.
                if is_last or error.errno not in (errno.ENOENT, errno.ENODEV, errno.EEXIST):
                    raise
        return ""
    except StorageError as error:
        return str(error)
    except OSError as error:
        return f"it stays in the cgroup {own}, and ends with it: {error.strerror}"


def remove() -> None:
    """Remove the cgroup, if no other process is in it; for a process that is about to end."""
    try:
        own = own_path(_read_own())
        top = top_of(kernel.mounts(), own) if own.endswith(f"/{NAME}") else ""
        if top:
            _enter(top)
            os.rmdir(f"{top}/{NAME}")
    except (OSError, StorageError):
        pass  # it has other processes; an empty one costs nothing


def _read_own() -> str:
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _enter(directory: str) -> None:
    fd = os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")  # this process
    finally:
        os.close(fd)


def own_path(text: str) -> str:
    """PURE: return the path in the v2 hierarchy from /proc/self/cgroup; "" where there is none."""
    found = [line.removeprefix(_UNIFIED) for line in text.splitlines() if line.startswith(_UNIFIED)]
    return found[0] if found and ".." not in found[0].split("/") else ""


def top_of(mounts: list[kernel.Mount], own: str) -> str:
    """PURE: return the directory of the highest visible cgroup above `own`; "" for none but itself."""
    shown = [
        each
        for each in mounts
        if each.fstype == "cgroup2" and each.root != own and (own + "/").startswith(each.root.rstrip("/") + "/")
    ]
    return min(shown, key=lambda each: len(each.root)).target if shown else ""
