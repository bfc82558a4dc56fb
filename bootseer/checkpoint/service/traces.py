"""The files of access traces of loads: `loads/<key>.json` in the user's cache directory, at most a few hundred.

The directory is the user's own (0700). Files are bounded in size and must belong to the user; prefetch.py verifies
their content. A trace only makes a load faster, so no failure here is an error: the result is then None, or a
sentence for the log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from bootseer.checkpoint.io.source import SourceFile
from bootseer.checkpoint.service import prefetch
from bootseer.linux.files import read_regular, replace_file

DIRECTORY = "loads"
MAX_FILE_BYTES = 4 << 20
MAX_FILES = 256


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return $BOOTSEER_CACHE_DIR, otherwise bootseer's directory in the XDG cache."""
    own = environ.get("BOOTSEER_CACHE_DIR", "")
    if own:
        return own
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # by the specification, relative paths are ignored
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(base, "bootseer")


class Recordings:
    """The access traces of one user on one node."""

    def __init__(self, cache: str) -> None:
        self._directory = os.path.join(cache, DIRECTORY)

    def load(self, files: Mapping[str, SourceFile], position: prefetch.Position) -> prefetch.Recording | None:
        data = read_regular(self._path(prefetch.key(files, position)), MAX_FILE_BYTES, is_own=True)
        return None if data is None else prefetch.decode(data, files, position)

    def save(
        self,
        files: Mapping[str, SourceFile],
        position: prefetch.Position,
        recording: prefetch.Recording,
        complete: bool,
    ) -> str:
        """Return "" or why it was not saved. `complete`: all ranks of the node had their part."""
        path = self._path(prefetch.key(files, position))
        merged = prefetch.merge(self.load(files, position), recording, complete)
        data = msgspec.json.encode(merged)
        if len(data) > MAX_FILE_BYTES:
            data = msgspec.json.encode(recording)
        if len(data) > MAX_FILE_BYTES:
            return f"cannot save the access trace of this load: it has {len(data)} bytes"
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            replace_file(path, data)
            self._sweep(os.path.basename(path))
        except OSError as error:
            return f"cannot save the access trace of this load: {error}"
        return ""

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, f"{key}.json")

    def _sweep(self, keep: str) -> None:
        """Delete the oldest traces beyond the limit."""
        with os.scandir(self._directory) as entries:
            aged = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in entries)
        for _, path in aged[: max(0, len(aged) - MAX_FILES)]:
            if os.path.basename(path) != keep:
                os.unlink(path)
