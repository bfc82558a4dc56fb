"""A process that mounts made-up files, with faults on demand. Usage: mount_server.py SETTINGS (JSON).

Faults are files in the `control` folder: `fail` (its text says how reads fail), `hang` (reads wait while it is
there). Versions that are made are folders in `versions`. What was asked of the files is written to `control/asked`
when the mount has ended.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Sequence

from bootseer.errors import DigestMismatch, Unavailable
from bootseer.mounts.fuse.mounting import Options, mount
from bootseer.mounts.fuse.protocol import MountedFile, MountedFiles, SavedFile


@functools.lru_cache(16)
def content(path: str, size: int) -> bytes:
    """What a made-up file has in it: bytes that repeat at no power of two."""
    block = random.Random(path).randbytes(min(size, 1_000_003))
    return (block * (size // max(1, len(block)) + 1))[:size]


class MadeUp:
    """Files of memory, each read of which takes a while."""

    version = "made-up"

    def __init__(self, files: dict[str, list[int]], latency_s: float, control: str) -> None:
        self.files = {path: MountedFile(size, 10**18, checked) for path, (size, checked) in files.items()}
        self._bytes = {path: content(path, size) for path, (size, _) in files.items()}
        self._latency_s, self._control = latency_s, control
        self._lock = threading.Lock()
        self._in_flight = 0
        self.max_in_flight = 0
        self.asked: list[tuple[str, int, int]] = []

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        with self._lock:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            self.asked.append((path, offset, len(target)))
        try:
            time.sleep(self._latency_s)
            while os.path.exists(f"{self._control}/hang"):
                time.sleep(0.01)
            self._fail(path, target)
            target[:] = self._bytes[path][offset : offset + len(target)]
        finally:
            with self._lock:
                self._in_flight -= 1

    def _fail(self, path: str, target: memoryview) -> None:
        try:
            with open(f"{self._control}/fail", encoding="utf-8") as file:
                how = file.read()
        except OSError:
            return
        target[:] = b"!" * len(target)  # what nobody may see
        if how == "digest":
            raise DigestMismatch(f"store/{path}: unit 0 is damaged")
        if how == "bug":
            raise KeyError("a bug")
        raise Unavailable(f"store/{path}: no answer")


class OnDisk:
    """A version that was saved."""

    def __init__(self, folder: str, version: str) -> None:
        self.version = version
        self._directory = folder
        self.files = {}
        for above, _, names in os.walk(folder):
            for name in names:
                full = os.path.join(above, name)
                self.files[os.path.relpath(full, folder)] = MountedFile(os.stat(full).st_size)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        with open(os.path.join(self._directory, path), "rb") as file:
            file.seek(offset)
            assert file.readinto(target) == len(target)


class DirectorySaver:
    """Versions are folders with numbers: seen whole or not at all."""

    def __init__(self, folder: str, keep: int | None, control: str) -> None:
        self.keep = keep
        self._directory, self._control = folder, control
        os.makedirs(folder, exist_ok=True)

    def save(self, files: Sequence[SavedFile], step: int | None) -> MountedFiles:
        open(f"{self._control}/saving", "w").close()
        while os.path.exists(f"{self._control}/hang"):
            time.sleep(0.01)
        if os.path.exists(f"{self._control}/fail"):
            raise Unavailable("the store is gone")
        number = len([name for name in os.listdir(self._directory) if not name.startswith(".")]) + 1
        name = f"{number:02d}" + ("" if step is None else f"-step{step}")
        part = os.path.join(self._directory, f".{name}")
        os.makedirs(part)
        for file in files:
            full = os.path.join(part, file.path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            data = bytearray(file.size)
            if file.files is not None:
                file.files.read_into(file.files_path, 0, memoryview(data))
            else:
                assert os.preadv(file.fd, [data], 0) == file.size
            with open(full, "wb") as target:
                target.write(data)
        done = os.path.join(self._directory, name)
        shutil.move(part, done)
        return OnDisk(done, name)


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = settings["control"]
    files = MadeUp(settings["files"], settings["latency_s"], control)
    saver = None
    if settings["versions"]:
        saver = DirectorySaver(settings["versions"], settings["keep"], control)
    mount(
        files,
        settings["folder"],
        read_only=saver is None,
        saver=saver,
        options=Options(**settings["options"]),
        on_ready=lambda: print("ready", flush=True),
    )
    with open(f"{control}/asked", "w", encoding="utf-8") as file:
        json.dump({"max_in_flight": files.max_in_flight, "asked": files.asked}, file)


if __name__ == "__main__":
    main()
