"""A checkpoint as a directory: `mount_checkpoint` shows a version, and makes versions of files that savers write.

In: the URL of a checkpoint and an empty directory. This module joins a Source and the striped writer with
bootseer.mounts, which knows neither. In the background a process of its own serves the mount (`python -m
bootseer.checkpoint.mounting`): clients of stores do not survive a fork. docs/guide/mount.md is for users.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from bootseer import aio
from bootseer.checkpoint.format.manifest import is_version
from bootseer.checkpoint.io.inputs import FileInput, Input
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import open_source
from bootseer.checkpoint.writing.writer import default_geometry, write_version
from bootseer.errors import (
    BootseerError,
    CheckpointError,
    ConfigError,
    IntegrityError,
    NotFound,
    StorageError,
)
from bootseer.linux.cgroups import read_memory
from bootseer.mounts.fuse.mounting import SETTLE_S, SPOOL_BYTES, WINDOW_BYTES, Options, mount
from bootseer.mounts.fuse.protocol import MountedFile, MountedFiles, SavedFile
from bootseer.mounts.fuse.server import check_directory, check_system
from bootseer.own_module import command_of
from bootseer.storage import open_store, redact
from bootseer.storage.paths import scheme_of

MEMORY_SHARE = 8  # at most one part in so many of the free memory, each for the window and for writes
MIN_WINDOW_BYTES = 32 << 20
READ_AGAIN_S = 3600.0  # the source's own deadlines come first
READY_S = 120.0  # a store may be slow to answer


def mount_checkpoint(
    url: str,
    directory: str,
    *,
    writable: bool = False,
    foreground: bool = True,
    version: str | None = None,
    verify: str | None = None,
    window_bytes: int | None = None,
    allow_other: bool = False,
    spool_bytes: int | None = None,
    spool_directory: str = "",
    settle_s: float | None = SETTLE_S,
    keep: int | None = None,
    unit_bytes: int | None = None,
    stripes: int | None = None,
    log_path: str = "",
    on_ready: Callable[[], None] = lambda: None,
) -> str:
    """Mount the newest complete version of `url` at `directory`.

    In the foreground, serve the mount and return when it has ended; otherwise return when programs can use it.

    Args:
        writable: written files become new versions.
        version: a version instead of the newest.
        verify: as for `bootseer.checkpoint.open`.
        window_bytes: memory for reads; by default 256 MiB, less if memory is short.
        spool_bytes, spool_directory: memory for writes, and the directory that takes the excess (TMPDIR).
        settle_s: a directory without changes for so long is complete; None: only explicit commits.
        keep: how many of the newest versions are kept when one is made; None: all.
        unit_bytes, stripes: how new versions are split.
        log_path: of the background process; by default a new file in TMPDIR.
        on_ready: called in the foreground when programs can use the mount.
    Returns: the path of the background process's log, "" in the foreground.
    Raises: ConfigError, NotFound, CheckpointError, StorageError, IntegrityError.
    """
    if url and not scheme_of(url):
        url = os.path.abspath(url)  # libfuse leaves the working directory
    settings = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}
    check_system()
    check_directory(directory)
    _check(writable, version, keep, settle_s)
    if not foreground:
        return _start({**settings, "directory": os.path.abspath(directory)}, log_path)
    options = Options(
        name=f"bootseer:{redact(url)}",
        window_bytes=window_bytes or default_window_bytes(),
        allow_other=allow_other,
        spool_bytes=min(SPOOL_BYTES, _share_bytes()) if spool_bytes is None else spool_bytes,
        spool_directory=spool_directory,
        settle_s=settle_s,
    )
    files = _open(url, version, verify, is_base=writable)
    saver = VersionSaver(url, verify, keep, unit_bytes, stripes) if writable else None
    try:
        mount(files, directory, read_only=not writable, saver=saver, options=options, on_ready=on_ready)
    finally:
        files.close()
        if saver is not None:
            saver.close()
    return ""


_NOT_SETTINGS = ("foreground", "log_path", "on_ready")


def default_window_bytes() -> int:
    """Return the memory for reads: less if memory is short."""
    return max(MIN_WINDOW_BYTES, min(WINDOW_BYTES, _share_bytes()))


def _share_bytes() -> int:
    return read_memory().free_bytes // MEMORY_SHARE


class SourceFiles:
    """The files of a Source as `MountedFiles`; without a source there are no files yet.

    `path`: a directory or file of the source: only that is shown. `on_damage`: called with the error if bytes
    cannot be read, for good.
    """

    def __init__(
        self,
        source: Source | None,
        path: str = "",
        on_damage: Callable[[BootseerError], object] = lambda _: None,
    ) -> None:
        self._source = source
        self._on_damage = on_damage
        self._paths: dict[str, str] = {}  # as shown -> in the source
        self.version = "" if source is None else source.version
        self.files: Mapping[str, MountedFile] = {}
        if source is not None:
            for each in [path] if path in source.files else source.files:
                if not path or each.startswith(f"{path}/"):
                    self._paths[each[len(path) + 1 if path else 0 :]] = each
                elif each == path:
                    self._paths[path.rpartition("/")[2]] = each
            mtime_ns = int(source.version[:20]) if is_version(self.version) else time.time_ns()
            self.files = {
                name: MountedFile(source.files[each].size, mtime_ns, source.files[each].checked_bytes)
                for name, each in self._paths.items()
            }

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        assert self._source is not None
        try:
            self._source.read([Request(self._paths[path], offset, target)])
        except (IntegrityError, NotFound) as error:
            self._on_damage(error)
            raise

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class FilesInput:
    """A file of an earlier version, to be written again; it returns only verified bytes."""

    def __init__(self, files: MountedFiles, path: str) -> None:
        self._files, self._path = files, path
        self.size, _, self._checked_bytes = files.files[path]

    async def read_into(self, offset: int, target: memoryview) -> None:
        # Not in the pool: the source's own calls need its threads.
        await aio.run_abandonable(self._read, offset, target, timeout_s=READ_AGAIN_S)

    def _read(self, offset: int, target: memoryview) -> None:
        unit = self._checked_bytes or 1
        begin = offset - offset % unit
        end = min(self.size, -(-(offset + len(target)) // unit) * unit)
        if (begin, end) == (offset, offset + len(target)):
            self._files.read_into(self._path, offset, target)
        else:
            whole = memoryview(bytearray(end - begin))
            self._files.read_into(self._path, begin, whole)
            target[:] = whole[offset - begin : offset - begin + len(target)]


class VersionSaver:
    """Creates striped versions for `bootseer.mounts`."""

    def __init__(
        self, url: str, verify: str | None, keep: int | None, unit_bytes: int | None, stripes: int | None
    ) -> None:
        self.keep = keep
        self._url = url
        self._verify = verify
        self._store = open_store(url)
        self._geometry = default_geometry(self._store, unit_bytes, stripes)
        self._made: list[SourceFiles] = []

    def save(self, files: Sequence[SavedFile], step: int | None) -> MountedFiles:
        inputs: list[tuple[str, Input]] = []
        opened: list[FileInput] = []
        try:
            for file in files:
                if file.files is not None:
                    inputs.append((file.path, FilesInput(file.files, file.files_path)))
                else:
                    opened.append(FileInput(f"/proc/self/fd/{file.fd}"))
                    inputs.append((file.path, opened[-1]))
            pinned = aio.run_sync(
                write_version(self._store, "", inputs, step=step, geometry=self._geometry, keep=self.keep)
            )
        finally:
            for each in opened:
                each.close()
        made = _open(self._url, pinned.version, self._verify)
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()
        aio.run_sync(self._store.aclose())


def _check(writable: bool, version: str | None, keep: int | None, settle_s: float | None) -> None:
    if writable and version is not None:
        raise ConfigError("a writable mount begins with the newest version; do not name another one")
    if keep is not None and (not writable or keep < 1):
        raise ConfigError(f"keep={keep}: must be at least 1, and needs a writable mount")
    if settle_s is not None and settle_s < 0:
        raise ConfigError(f"settle_s={settle_s}: must not be negative")


def _open(url: str, version: str | None, verify: str | None, *, is_base: bool = False) -> SourceFiles:
    """Open the files of a version; if versions are to be made and none exists, return no files."""
    try:
        opened = open_source(url, verify=verify, version=version)
    except (NotFound, CheckpointError):
        if not is_base:
            raise
        return SourceFiles(None)
    if is_base and opened.path:
        opened.close()
        raise ConfigError(f"{redact(url)}: is inside a checkpoint; mount the checkpoint to write to it")
    return SourceFiles(opened.source, opened.path)


# ---- in the background ---------------------------------------------------------------------------------------


def _start(settings: Mapping[str, Any], log_path: str) -> str:
    """Start the process that serves the mount, and wait until it does or reports an error."""
    if log_path:
        log_path = os.path.abspath(log_path)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    else:
        log, log_path = tempfile.mkstemp(prefix="bootseer-mount-", suffix=".log")
    ready = theirs = -1
    try:
        ready, theirs = os.pipe()
        # Settings by stdin: a URL may hold a password, and every user sees command lines.
        subprocess.run(
            command_of("bootseer.checkpoint.mounting", str(theirs)),
            input=json.dumps(settings).encode(),
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            start_new_session=True,
            check=False,
        )
        os.close(theirs)
        theirs = -1
        said = b""
        while not said.endswith(b"\n") and select.select([ready], [], [], READY_S)[0]:
            data = os.read(ready, 65536)
            if not data:
                break
            said += data
    finally:
        for fd in (log, ready, theirs):  # a mount that starts later cannot report it, and ends
            if fd >= 0:
                os.close(fd)
    if said != b"ready\n":
        raise StorageError(
            said.decode("utf-8", "replace").strip() or f"nothing was mounted; the log is {log_path}"
        )
    return log_path


def _serve(ready: int) -> NoReturn:
    """Serve in the background process; report the outcome to the starter, which waits only for that."""
    settings = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if os.fork():
        os._exit(0)
    is_told = False

    def tell(line: str) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            os.write(ready, f"{' '.join(line.split())}\n".encode())
            os.close(ready)

    try:
        mount_checkpoint(**settings, on_ready=lambda: tell("ready"))
    except BootseerError as error:
        print(f"bootseer mount: {error}", file=sys.stderr, flush=True)
        tell(str(error))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print(
            "bootseer mount: ended by a second signal; files that are not in a version are lost",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
