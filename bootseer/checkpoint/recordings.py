"""Where recordings of loads lie: `loads/<key>.json` in the user's cache folder, at most a few hundred.

The folder is the user's own (0700). What is read from it is bounded in size and must belong to the user; what it
says is checked by prefetch.py. A recording only makes a load faster, so nothing that goes wrong here is an error:
the answer is then None, or a sentence for the log.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

import msgspec

from bootseer.checkpoint import prefetch
from bootseer.checkpoint.source import SourceFile

FOLDER = "loads"
MAX_FILE_BYTES = 4 << 20
MAX_FILES = 256


def cache_folder(environ: Mapping[str, str]) -> str:
    """$BOOTSEER_CACHE_DIR, else bootseer's folder in the XDG cache."""
    own = environ.get("BOOTSEER_CACHE_DIR", "")
    if own:
        return own
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification: relative ones are to be ignored
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(base, "bootseer")


class Recordings:
    """The recordings of one user on one node."""

    def __init__(self, cache: str) -> None:
        self._folder = os.path.join(cache, FOLDER)

    def load(self, files: Mapping[str, SourceFile], position: prefetch.Position) -> prefetch.Recording | None:
        data = _read_own(self._path(prefetch.key(files, position)))
        return None if data is None else prefetch.decode(data, files, position)

    def save(
        self,
        files: Mapping[str, SourceFile],
        position: prefetch.Position,
        recording: prefetch.Recording,
        complete: bool,
    ) -> str:
        """Returns "" or why it was not saved. `complete`: all ranks of the node had their part."""
        path = self._path(prefetch.key(files, position))
        merged = prefetch.merge(self.load(files, position), recording, complete)
        data = msgspec.json.encode(merged)
        if len(data) > MAX_FILE_BYTES:
            data = msgspec.json.encode(recording)
        if len(data) > MAX_FILE_BYTES:
            return f"the recording of this load would take {len(data)} bytes"
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
            self._sweep(os.path.basename(path))
        except OSError as error:
            return f"cannot save what this load read: {error}"
        return ""

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.json")

    def _sweep(self, keep: str) -> None:
        """Drops the oldest beyond the limit."""
        with os.scandir(self._folder) as entries:
            aged = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in entries)
        for _, path in aged[: max(0, len(aged) - MAX_FILES)]:
            if os.path.basename(path) != keep:
                os.unlink(path)


def _read_own(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size > MAX_FILE_BYTES:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data if len(data) <= MAX_FILE_BYTES else None
