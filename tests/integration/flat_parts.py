"""Programs for tests of the flat file: `serve SETTINGS` shows a file as a device, `read SETTINGS` compares.

A server is told how its device behaves; at SIGTERM it stops and prints its statistics. A reader writes a line now
and then, and last how it ended: `OK`, the name of the first error, or `WRONG` for data that is not the file's.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from bootseer.mounts.device.file import Done, FlatFile
from bootseer.mounts.device.metadata_memory import MetadataMemory

PAGE = 4096


class FileDevice:
    """A file as a device.

    `behaviour`: what may become of a read, one of them for each: here, late, never, none, short, long, raise,
    raise-later, twice. `bad`: offsets that can never be read.
    """

    def __init__(self, path: str, behaviour: list[str], bad: list[int], seed: int = 1) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self._behaviour, self._bad = behaviour, bad
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._next: dict[tuple[int, int], str] = {}

    def try_read(self, offset: int, target: memoryview) -> bool:
        with self._lock:
            how = self._random.choice(self._behaviour)
            if any(offset <= each < offset + len(target) for each in self._bad):
                how = "none"
            if how != "here":
                self._next[offset, len(target)] = how
        if how == "raise":
            raise RuntimeError("a bug")
        return how == "here" and os.preadv(self._fd, [target], offset) == len(target)

    def read_later(self, offset: int, length: int, done: Done) -> None:
        with self._lock:
            how = self._next.pop((offset, length), "late")
            wait_s = self._random.random() * 0.003
        if how == "raise-later":
            raise RuntimeError("another bug")
        if how == "never":
            return
        data = os.pread(self._fd, length, offset)
        answer = {"none": None, "short": data[:-1], "long": data + b"x"}.get(how, data)

        def answer_late() -> None:
            time.sleep(wait_s)
            done(answer)
            if how == "twice":
                done(bytes(length))

        threading.Thread(target=answer_late, daemon=True).start()


def serve(settings: dict[str, Any]) -> None:
    """Settings: file, folder, behaviour; if wanted bad, metadata (a file), is_forking."""
    signals = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    metadata: MetadataMemory | None = None
    if settings.get("metadata"):
        with open(settings["metadata"], "rb") as file:
            metadata = MetadataMemory(file.read())
    flat = FlatFile(settings["folder"])
    flat.start(FileDevice(settings["file"], settings["behaviour"], settings.get("bad", [])), metadata)
    child = 0
    if settings.get("is_forking"):
        child = os.fork()
        if not child:
            flat.stop()  # is its parent's
            signal.sigwait(signals)
            os._exit(0)
    print(f"ready {flat.connection} {child}", flush=True)
    signal.sigwait(signals)
    began_s = time.monotonic()
    flat.stop()
    print(json.dumps({**flat.statistics()._asdict(), "stop_s": time.monotonic() - began_s}), flush=True)


def read(settings: dict[str, Any]) -> None:
    """Settings: path; file, with the right bytes; seed; most (reads); how (direct, buffered, mapped); uid."""
    with open(settings["file"], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as right:
        # Whoever else it becomes, folders above are only root's.
        os.chdir(os.path.dirname(settings["path"]))
        if settings.get("uid"):
            os.setuid(settings["uid"])
        try:
            done = _read_all(
                os.path.basename(settings["path"]),
                right,
                settings["how"],
                random.Random(settings["seed"]),
                settings["most"],
            )
        except OSError as caught:
            done = errno.errorcode[caught.errno or 0]
    print(done, flush=True)


def _read_all(path: str, right: mmap.mmap, how: str, pick: random.Random, most: int) -> str:
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
    print("open", flush=True)
    buffer = memoryview(mmap.mmap(-1, 4 << 20))
    for number in range(most):
        length = pick.choice((1, 1, 1, 2, 16, 32, 255, 256, 257, 700)) * PAGE
        offset = pick.randrange(len(right))
        if how == "direct":
            offset -= offset % PAGE
        else:
            length -= pick.randrange(PAGE)
        end = min(offset + length, len(right))
        if how == "mapped":
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                if mapped[offset:end] != right[offset:end]:
                    return "WRONG"
        while how != "mapped" and offset < end:
            got = os.preadv(fd, [buffer[: end - offset]], offset)
            if not got or buffer[:got] != right[offset : offset + got]:
                return "WRONG"
            offset += got
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if number % 20 == 19:
            print("reads", flush=True)
    return "OK"


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](json.loads(sys.argv[2]))
