"""The end of a load on one node: the reads of its ranks are recorded, the checkpoint is copied to the node's disk,
and the memory is released.

It begins by bootrun's order, or some time after all ranks have their parts. The next load at the same position
gets the recorded reads.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping

import msgspec

from bootseer.checkpoint.io.source import SourceFile
from bootseer.checkpoint.service import prefetch
from bootseer.checkpoint.service.copier import Copier
from bootseer.checkpoint.service.disk_copy import can_keep
from bootseer.checkpoint.service.filler import disk_directory
from bootseer.checkpoint.service.node_memory import NodeMemory
from bootseer.checkpoint.service.process import Answers, Fork
from bootseer.checkpoint.service.start_options import StartOptions
from bootseer.linux.files import read_regular, replace_file
from bootseer.logs import get_logger

_log = get_logger(__name__)

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
    """The access traces of one user on one node: files `loads/<key>.json`, bounded in number and size.

    prefetch.py verifies their content. A trace only makes a load faster, so no failure here is an error: the
    result is then None, or a sentence for the log.
    """

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


class MemoryRelease:
    """Records, copies and releases; runs on the service's loop."""

    def __init__(
        self,
        memory: NodeMemory,
        give_back: Callable[[], object],
        selector: selectors.BaseSelector,
        fork: Fork,
        answers: Answers,
    ) -> None:
        """Args: give_back: releases the memory as soon as no path leads there."""
        self._memory = memory
        self._give_back = give_back
        self._answers = answers
        self._options = StartOptions()
        self._recordings = Recordings(cache_folder(os.environ))
        self._copier = Copier(selector, fork, answers, memory.forget_damaged)
        self._quiet_since_s: float | None = None  # all ranks have their parts

    def start(self, options: StartOptions) -> None:
        self._options = options

    def end(self) -> None:
        self._copier.stop()

    def last_reads(
        self, files: Mapping[str, SourceFile], position: prefetch.Position
    ) -> prefetch.Recording | None:
        """Return the reads of an earlier load like this one, None if none was recorded."""
        return self._recordings.load(files, position)

    def note_quiet(self, is_quiet: bool) -> None:
        """Begin to wait, or stop waiting. Args: is_quiet: all ranks have their parts, and none needs more."""
        self._quiet_since_s = time.monotonic() if is_quiet else None

    def is_due(self) -> bool:
        """Return whether it was quiet for long enough, once."""
        if self._quiet_since_s is None or time.monotonic() - self._quiet_since_s <= self._options.quiet_s:
            return False
        self._quiet_since_s = None
        return True

    def release(self, position: prefetch.Position | None, *, complete: bool) -> None:
        """Release the memory. Args: position: of the load, None before any; complete: also copy to the disk."""
        if self._memory.is_served and position is not None:
            reads = self._memory.take_reads()
            files = self._memory.files
            made = prefetch.record(files, reads, position)
            if made is not None:
                why = self._recordings.save(files, position, made, complete)
                if why:
                    _log.line(why)
        if complete:
            self._start_copier()
        if not self._options.keeps:
            self._give_back()

    def copy(self) -> None:
        """Copy the checkpoint to this node's disk, as ordered."""
        self._start_copier()
        if not self._copier.is_running:
            self._answers.send("copied", why="it is not in this node's memory, or has no checksums")

    def _start_copier(self) -> None:
        """Start the copy, unless the checkpoint is on the node's disk anyway."""
        arena, pinned, max_bytes = self._memory.arena, self._memory.pinned, self._options.disk_bytes
        if not max_bytes or arena is None or pinned is None or self._copier.is_running:
            return
        if can_keep(pinned.files) and disk_directory(self._options.url) is None:
            self._copier.start(pinned, arena, max_bytes, self._memory.damaged)
