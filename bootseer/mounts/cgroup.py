"""Takes a process that outlives its starter out of the starter's cgroup (v2).

The daemon of a tree serves all jobs of a node. In the cgroup of the one that started it, it would end with that
one's `cgroup.kill` (systemd, Slurm, containers), or be waited for: with a process in it no cgroup has ended.

It goes into a cgroup `bootseer-trees` at the top of what can be seen of the hierarchy; its last user removes that.
Where it cannot be made or entered (no rights, read-only, cgroup v1 only), and in a container, whose own cgroup is
the top, the daemon stays where it is and shares the fate of its starter; then a job whose tree is lost mounts it
anew. It also stays below its starter's subreaper, so one that a rank itself has started ends with bootrun's guard.
"""

from __future__ import annotations

import errno
import os

from bootseer.errors import StorageError
from bootseer.mounts import kernel

NAME = "bootseer-trees"
_UNIFIED = "0::"


def leave() -> str:
    """Moves this process, and what it starts from now on. Returns: why it could not, "" where all is well."""
    own = ""
    try:
        own = own_path(_read_own())
        if own in ("", "/"):
            return ""
        top = top_of(kernel.mounts(), own)
        if not top:
            return f"it stays in the cgroup {own}, and ends with it: no top of it is to be seen"
        for is_last in (False, False, True):
            try:
                os.makedirs(f"{top}/{NAME}", 0o755, exist_ok=True)
                _enter(f"{top}/{NAME}")
                break
            except OSError as error:
                # Its last user took it away between the two.
                if is_last or error.errno not in (errno.ENOENT, errno.ENODEV, errno.EEXIST):
                    raise
        return ""
    except StorageError as error:
        return str(error)
    except OSError as error:
        return f"it stays in the cgroup {own}, and ends with it: {error.strerror}"


def remove() -> None:
    """Of a process that is about to end: takes the cgroup away if nobody else is in it."""
    try:
        own = own_path(_read_own())
        top = top_of(kernel.mounts(), own) if own.endswith(f"/{NAME}") else ""
        if top:
            _enter(top)
            os.rmdir(f"{top}/{NAME}")
    except (OSError, StorageError):
        pass  # others are in it; an empty one costs nothing


def _read_own() -> str:
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _enter(folder: str) -> None:
    fd = os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")  # this process
    finally:
        os.close(fd)


def own_path(text: str) -> str:
    """PURE: of /proc/self/cgroup: where in the v2 hierarchy; "" where there is none."""
    found = [line.removeprefix(_UNIFIED) for line in text.splitlines() if line.startswith(_UNIFIED)]
    return found[0] if found and ".." not in found[0].split("/") else ""


def top_of(mounts: list[kernel.Mount], own: str) -> str:
    """PURE: the folder that shows the highest cgroup above `own` that can be seen; "" for none but itself."""
    shown = [
        each
        for each in mounts
        if each.fstype == "cgroup2" and each.root != own and (own + "/").startswith(each.root.rstrip("/") + "/")
    ]
    return min(shown, key=lambda each: len(each.root)).target if shown else ""
