"""Checks by a trial mount whether this user can mount trees on this machine.

`probe_mount` lets another process do it (`-m bootseer.mounts.tree_daemon.probe`, which prints `ok` or the reason):
a server of FUSE must not fork afterwards, and a mount that hangs ends with its process.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.linux import mount as kernel
from bootseer.linux.child_processes import run_limited
from bootseer.own_module import command_of

if TYPE_CHECKING:
    from bootseer.mounts.device.file import Done
    from bootseer.tree.index import Index

PROBE_S = 60.0
DATA = b"bootseer\n".ljust(4096, b"\1")
NAME = b"probe"
_DIRECTORIES = ("device", "root")


def probe_mount() -> str:
    """Return why this user cannot mount trees on this machine, "" if possible. Takes a quarter of a second."""
    command = command_of("bootseer.mounts.tree_daemon.probe")
    try:
        done = run_limited(command, timeout_s=PROBE_S, cwd="/")
    except subprocess.TimeoutExpired:
        return f"a trial mount did not end within {PROBE_S:g} s"
    except OSError as error:
        return f"a trial mount could not be started: {error.strerror}"
    said = done.stdout.decode("utf-8", "replace").strip()
    if said:
        return "" if said == "ok" else said
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"a trial mount ended with status {done.returncode}: {lines[-1] if lines else ''}"


def find_reason() -> str:
    """Return the reason by a trial in this process."""
    import tempfile

    try:
        directory = tempfile.mkdtemp(prefix="bootseer-probe-")
    except OSError as error:
        return f"no directory for a trial mount could be made: {error.strerror}"
    try:
        return _try_in(directory)
    except BootseerError as error:
        return str(error)
    finally:
        kernel.clear(directory)
        for name in (*_DIRECTORIES, ""):
            try:
                os.rmdir(os.path.join(directory, name))
            except OSError:
                pass  # it was not made


def _try_in(directory: str) -> str:
    from bootseer.mounts.device.erofs_mount import mount_erofs
    from bootseer.mounts.device.file import FlatFile
    from bootseer.mounts.device.metadata_memory import MetadataMemory
    from bootseer.tree import erofs

    device, root = (os.path.join(directory, name) for name in _DIRECTORIES)
    for path in (device, root):
        os.mkdir(path, 0o700)
    index = _small_tree()
    metadata = MetadataMemory(erofs.metadata(index, hashlib.sha256(DATA).hexdigest()))
    flat = FlatFile(device)
    flat.start(_OneBlock(), metadata)
    try:
        mount_erofs(flat.metadata_path, flat.path, root)
        data = _read(os.path.join(os.fsencode(root), NAME))
    except OSError as error:
        return f"a mounted tree cannot be read: {error.strerror}"
    finally:
        kernel.unmount_lazily(root)
        flat.stop()
    return "" if data == DATA else "a mounted tree has wrong bytes"


def _read(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, len(DATA) + 1)
    finally:
        os.close(fd)


class _OneBlock:
    """A device with DATA at its start."""

    size = 128 << 10

    def try_read(self, offset: int, target: memoryview) -> bool:
        target[:] = DATA.ljust(self.size, b"\0")[offset : offset + len(target)]
        return True

    def read_later(self, offset: int, length: int, done: Done) -> None:
        del offset, length
        done(None)  # all bytes are here


def _small_tree() -> Index:
    """Return the index of a directory with one file."""
    from bootseer.tree.index import BLOCK, Index

    blocks = BLOCK.pack(hashlib.sha256(DATA).digest(), 0, 0, len(DATA), len(DATA))
    return Index(
        tool="probe", packs=[(hashlib.sha256(DATA).digest(), len(DATA))], blocks=blocks, parents=[0, 0],
        names=[b"", NAME], modes=[stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644], uids=[0, 0], gids=[0, 0],
        mtimes_ns=[0, 0], sizes=[0, len(DATA)], runs=[[], [0, 1]], targets=[b"", b""], links=[-1, -1],
    )  # fmt: skip


if __name__ == "__main__":
    print(" ".join(find_reason().split()) or "ok", flush=True)
    os._exit(0)  # threads that hang are not waited for
