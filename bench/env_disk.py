"""The disk of `bench env`: a file system that is made anew for each way, so that none finds what another left.

As root it is ext4 of its own in a file: no journal that others write to, nothing to be removed between two ways
(removing 50,000 files, with the discards that follow, slows down whoever comes next), and a page cache that is
empty because the file system is new. The file is written once in full: blocks that the file system below gives
out late would be paid for by the first way that touches them. Without root it is a folder that is emptied.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time

from bench.record import BenchError, note

_ZEROS = bytes(8 << 20)
_BUSY_S = 120.0  # what a way has left in the background ends by then
_POLL_S = 0.05
_TOOLS = ("mkfs.ext4", "losetup", "mount", "umount")
_MAKE = ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")


class Disk:
    """`path` is where it is seen; empty after each `renew`."""

    def __init__(self, above: str, size_bytes: int) -> None:
        """`above`: a folder of the bench alone, on a real disk."""
        self.path = os.path.join(above, "disk")
        self._image = f"{self.path}.img"
        self._loop = ""
        self._take_away()
        os.makedirs(self.path)
        reason = self._attach(size_bytes)
        self.kind = f"ways write to {'ext4 of its own' if self._loop else 'a folder of the disk'}"
        if reason:
            note(f"no file system of its own: {reason}: ways share one with everybody, and it shows")

    def renew(self) -> None:
        """Nothing is on it. Raises: BenchError when somebody uses it still."""
        if not self._loop:
            shutil.rmtree(self.path)
            os.mkdir(self.path)
            os.sync()
            return
        self._unmount()
        self._wait_until_free()
        _run(*_MAKE, self._loop)
        _run("mount", "-o", "nodiscard", self._loop, self.path)

    def close(self) -> None:
        """Takes it away."""
        if self._loop:
            self._unmount()
        self._take_away()

    # ---- inside --------------------------------------------------------------------------------------------

    def _attach(self, size_bytes: int) -> str:
        """Why there is no file system of its own; "" if there is."""
        if os.geteuid():
            return "only root can mount one"
        missing = [name for name in _TOOLS if shutil.which(name) is None]
        if missing:
            return f"not installed here: {', '.join(missing)}"
        note(f"writing the file of a disk of {size_bytes / 1e9:.1f} GB")
        with open(self._image, "wb", buffering=0) as file:
            for _ in range(-(-size_bytes // len(_ZEROS))):
                file.write(_ZEROS)
            os.fsync(file.fileno())
        for direct in (("--direct-io=on",), ()):  # not every file system below can
            ran = subprocess.run(["losetup", "-f", "--show", *direct, self._image], capture_output=True, text=True)
            if not ran.returncode:
                self._loop = ran.stdout.strip()
                return ""
        os.remove(self._image)
        return ran.stderr.strip()[-200:]

    def _unmount(self) -> None:
        end_s = time.monotonic() + _BUSY_S
        while os.path.ismount(self.path):
            ran = subprocess.run(["umount", self.path], capture_output=True, text=True)
            if ran.returncode:
                if time.monotonic() > end_s:
                    raise BenchError(f"the disk of the bench is in use after a way: {ran.stderr.strip()}")
                time.sleep(_POLL_S)

    def _wait_until_free(self) -> None:
        """A mount namespace that somebody made meanwhile has a copy of every mount, until its processes end."""
        end_s = time.monotonic() + _BUSY_S
        while True:
            try:
                os.close(os.open(self._loop, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > end_s:
                    raise BenchError(f"{self._loop}, the disk of the bench: {error.strerror}") from error
                time.sleep(_POLL_S)

    def _take_away(self) -> None:
        """Also what a killed run has left."""
        while os.path.ismount(self.path):
            _run("umount", "--lazy", self.path)
        if os.path.exists(self._image):
            found = subprocess.run(
                ["losetup", "-n", "-O", "NAME", "-j", self._image], capture_output=True, text=True
            )
            for loop in found.stdout.split():
                subprocess.run(["losetup", "-d", loop], check=False)
            os.remove(self._image)
        shutil.rmtree(self.path, ignore_errors=True)


def _run(*argv: str) -> None:
    ran = subprocess.run(argv, capture_output=True, text=True)
    if ran.returncode:
        raise BenchError(f"{' '.join(argv)}: {ran.stderr.strip()[-500:]}")
