"""A device as one read-only file in a directory, served over /dev/fuse: EROFS reads the data of files from it.

The protocol is implemented here in plain Python: a read costs a tenth of one through libfuse's bindings. It fails
closed: when this process dies, or `stop` is called, readers get errors, never zeros. EROFS metadata can be served
beside the device, from memory: in containers, files lie on tmpfs or overlayfs, from which the kernel cannot mount
it.

The process must not fork after `mount`, other than to exec. A child that kept the descriptor would keep the
connection alive, and readers would hang when the server dies. Children of os.fork close it; children of C code
cannot. It must not map files of the mount either: a page fault would hold the interpreter's lock, which the answer
needs.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import threading
import time

from bootseer.errors import ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.mounts.device import fuse_wire as wire
from bootseer.mounts.device.server import (
    METADATA,
    NAME,
    REQUEST_BYTES,
    Device,
    Done,
    Server,
    SharedDescriptor,
    Statistics,
)

__all__ = ["Device", "Done", "FlatFile", "Statistics"]

FUSE = "/dev/fuse"
THREADS = 4  # these keep a disk busy; more would contend for the interpreter's lock
GREETING_S = 10.0  # the kernel sends its handshake as soon as it has mounted
END_S = 5.0


class State(enum.Enum):
    NEW = "new"
    SERVING = "serving"
    STOPPED = "stopped"


class FlatFile:
    """The mount: `start`, or `mount` and then `serve`; then `path` can be read until `stop`."""

    def __init__(self, folder: str) -> None:
        """Args: folder: an empty one."""
        self.folder = os.path.realpath(folder)  # as in the list of mounts
        self.path = os.path.join(self.folder, NAME)
        self.metadata_path = os.path.join(self.folder, METADATA)
        self.connection = -1  # its number in the list of mounts
        self._state = State.NEW
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: SharedDescriptor | None = None
        self._server: Server | None = None
        self._threads = [
            threading.Thread(target=self._serve, name=f"flat-{number}", daemon=True) for number in range(THREADS)
        ]

    def start(self, device: Device, metadata: Device | None = None) -> None:
        """Mount and serve. Args, raises: as these."""
        self.mount()
        self.serve(device, metadata)

    def mount(self) -> None:
        """Mount; accesses block until `serve`.

        Raises: ConfigError when this process, kernel or directory does not support such a mount; StorageError.
        """
        assert self._state is State.NEW, "once"
        link = self._link = SharedDescriptor(open_fuse())
        self._state = State.SERVING
        try:
            self._mount(link)
            self.connection = self._find_connection()
            greet(link.fd, self.folder)
        except BaseException:
            self.stop()
            raise

    def serve(self, device: Device, metadata: Device | None = None) -> None:
        """Serve reads from now on. After `stop` it does nothing.

        Args: metadata: is served at `metadata_path`, if given. Raises: StorageError.
        """
        with self._lock:
            if self._state is State.STOPPED:
                return
            assert self._link is not None and self._server is None, "once, when it is mounted"
            self._server = Server(self._link, device, metadata)
            try:
                for thread in self._threads:
                    _start(thread, self._link)
                return
            except StorageError as caught:
                error = caught
        self.stop()
        raise error

    def is_serving(self) -> bool:
        """Return whether the mount is served; False also after an unmount by another process."""
        return self._state is State.SERVING and any(thread.is_alive() for thread in self._threads)

    def abort(self) -> None:
        """Make all reads fail from now on, regardless of the server, where fusectl is mounted.

        Not for the number of a connection that has ended: the next FUSE mount of the machine gets that number.
        """
        if self.connection < 0 or self._link is None or self._pid != os.getpid():
            return
        if self._link.is_connected():
            kernel.abort(self.connection)

    def stop(self) -> None:
        """Unmount; pending reads get errors. A second call, or one in a fork, does nothing.

        Raises: StorageError, ConfigError when it could not be unmounted.
        """
        with self._lock:
            if self._state is not State.SERVING or self._pid != os.getpid():
                return
            self._state = State.STOPPED
        assert self._link is not None
        try:
            if self.connection >= 0:
                self._unmount()
        finally:
            if self._server is not None:
                self._server.forget()
            end_s = time.monotonic() + END_S
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(max(0.0, end_s - time.monotonic()))
            self._link.let_go()

    def statistics(self) -> Statistics:
        return Statistics(0, 0, 0, 0, 0) if self._server is None else self._server.statistics()

    # ---- internals -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._link is not None and self._server is not None
        try:
            self._server.run()
        finally:
            self._link.let_go()

    def _mount(self, link: SharedDescriptor) -> None:
        flags = kernel.RDONLY | kernel.NODEV | kernel.NOSUID | kernel.NOEXEC | kernel.NOATIME
        data = f"fd={link.fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
        kernel.mount("bootseer", self.folder, "fuse.bootseer", flags, f"{data},max_read={wire.MAX_READ_BYTES}")

    def _find_connection(self) -> int:
        """Return the connection's number: only the list of mounts has it without a request to the server."""
        for each in kernel.mounts_below(self.folder):
            if each.target == self.folder and kernel.is_fuse(each):
                return each.minor
        raise StorageError(f"{self.folder}: was unmounted while it was being mounted")

    def _unmount(self) -> None:
        self.abort()
        for each in kernel.mounts_below(self.folder):
            if kernel.is_fuse(each) and each.minor == self.connection:
                kernel.unmount_lazily(each.target, kernel.FORCE)  # aborts too, where fusectl is not mounted


def open_fuse() -> int:
    try:
        return os.open(FUSE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as caught:
        if caught.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"{FUSE}: permission denied: serving a mount needs root, and in a container --device {FUSE}"
            ) from caught
        raise ConfigError(
            f"{FUSE} is missing: load the kernel's module (modprobe fuse), or start the container with "
            f"--device {FUSE} --cap-add SYS_ADMIN"
        ) from caught


def greet(fd: int, directory: str) -> None:
    """Answer the kernel's first request. Raises: ConfigError, StorageError."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(GREETING_S * 1000):
        raise StorageError(f"{directory}: the kernel sent no request within {GREETING_S:g} s of the mount")
    try:
        found = wire.read_greeting(os.read(fd, REQUEST_BYTES))
        if found is None:
            raise StorageError(f"{directory}: the kernel's first request is not FUSE_INIT")
        unique, greeting = found
        why = wire.why_refused(greeting)
        if why:
            os.write(fd, wire.reply(unique, number=errno.EPROTO))
            raise ConfigError(f"{directory}: this kernel has {why}: use a newer one")
        os.write(fd, wire.reply(unique, wire.greet(greeting)))
    except OSError as caught:
        raise StorageError(f"{directory}: was unmounted while it was being mounted: {caught.strerror}") from caught


def _start(thread: threading.Thread, link: SharedDescriptor) -> None:
    link.hold()
    try:
        thread.start()
    except RuntimeError as caught:
        link.let_go()
        raise StorageError("no thread could be started: is the limit of processes reached?") from caught
