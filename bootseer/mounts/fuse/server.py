"""Adapter for FUSE: libfuse3 by mfusepy. Its options, thread and end, and checks of its requirements.

libfuse runs in a thread of its own, so that signals reach Python. It ends on `stop`, or when the directory is
unmounted by another process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import threading
from typing import Any

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts.fuse.operations import Operations

MAX_READ_BYTES = 1 << 20  # the kernel's limit without special settings
MAX_BACKGROUND = 128  # requests that the kernel sends ahead of the programs
READ_AHEAD_KIB = 1024  # of the kernel, for the mount; only root can set it, others have 128
MAX_THREADS = 64
UNCHANGING_S = 86400.0
KICK_S = 0.05
DEVICE = "/dev/fuse"
NO_NEWS = "Ignoring invalid max threads value 4294967295"  # libfuse 3.14 about its own default


def check_directory(directory: str) -> None:
    """Raise ConfigError, with the fix, when nothing can be mounted at `directory`."""
    try:
        is_full = bool(os.listdir(directory))  # the kernel may still have the attributes of a dead mount
    except NotADirectoryError as caught:
        raise ConfigError(f"{directory}: is not a directory") from caught
    except FileNotFoundError as caught:
        raise ConfigError(f"{directory}: no such directory; make it first") from caught
    except OSError as caught:
        if caught.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            raise ConfigError(
                f"{directory}: is a mount whose daemon has ended; clean it up with: fusermount3 -u -z {directory}"
            ) from caught
        raise ConfigError(f"{directory}: {os.strerror(caught.errno or 0).lower()}") from caught
    if os.path.ismount(directory):
        raise ConfigError(f"{directory}: is a mount point already; unmount it with: fusermount3 -u {directory}")
    if is_full:
        raise ConfigError(
            f"{directory}: is not empty, and a mount would hide its contents; name an empty directory"
        )


def check_system() -> None:
    """Raise ConfigError, with the fix, when this machine or user cannot mount."""
    if not os.path.exists(DEVICE):
        raise ConfigError(
            f"{DEVICE} is missing: load the kernel's module (modprobe fuse), or start the container with "
            f"--device {DEVICE} --cap-add SYS_ADMIN; bootseer.checkpoint and stripe:: read without a mount"
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise ConfigError(f"{DEVICE}: permission denied for this user; its mode must be 666, as fuse3 sets it")
    if os.geteuid() and shutil.which("fusermount3") is None:
        raise ConfigError("fusermount3, which mounts for users other than root, was not found: install fuse3")
    _import_mfusepy()


class Session:
    """One mount, from `start` to `join`."""

    def __init__(
        self, operations: Operations, folder: str, *, name: str, read_only: bool, allow_other: bool
    ) -> None:
        self.is_ready = threading.Event()  # programs see the mount, or it failed
        self.error: BaseException | None = None
        self._operations = operations
        self._directory = folder
        self._name, self._read_only, self._allow_other = name, read_only, allow_other
        self._lock = threading.Lock()
        self._fuse: Any = None  # libfuse's handle, while it may be used
        self._mfusepy: Any = None
        self._messages = _Messages()
        self._thread = threading.Thread(target=self._run, name="mount-fuse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Unmount, also while programs have files open; the caller repeats it until it has ended."""
        with self._lock:
            if self._fuse is not None:
                self._mfusepy._libfuse.fuse_exit(ctypes.c_void_p(self._fuse))
                # The loop waits for its workers in a call that a signal ends.
                signal.pthread_kill(self._thread.ident or 0, signal.SIGUSR2)

    def _run(self) -> None:
        try:
            self._mfusepy = _import_mfusepy()
            self._operations.on_init, self._operations.on_end = self._init, self._forget
            self._operations.context_thread = lambda: int(self._mfusepy.fuse_get_context()[2])
            self._messages.catch()
            _make_class(self._mfusepy)(self._operations, self._directory, foreground=True, **self._options())
        except RuntimeError as caught:  # libfuse's exit status
            said = " ".join(self._messages.take().split()) or f"libfuse failed with status {caught}"
            hint = "; a container needs --cap-add SYS_ADMIN for it" if "not permitted" in said else ""
            self.error = StorageError(f"{self._directory}: could not be mounted: {said}{hint}")
        except BaseException as caught:
            self.error = caught
        finally:
            self._forget()
            self._messages.let_go()
            self.is_ready.set()

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "fsname": self._name.replace("\\", "\\\\").replace(",", "\\,"),
            "subtype": "bootseer",
            "max_read": MAX_READ_BYTES,
            "default_permissions": True,
            "noatime": True,
            "allow_other": self._allow_other,
            "ro": self._read_only,
        }
        if self._mfusepy.fuse_version_minor >= 12:
            options["max_threads"] = MAX_THREADS  # older ones start as many as they need
        return options

    def _init(self, conn: Any, config: Any) -> None:
        """Set options, in the daemon, after the kernel's handshake."""
        conn.max_read = MAX_READ_BYTES
        conn.max_write = MAX_READ_BYTES
        conn.max_readahead = READ_AHEAD_KIB << 10
        conn.max_background = MAX_BACKGROUND
        conn.congestion_threshold = MAX_BACKGROUND * 3 // 4
        conn.want |= conn.capable & 1  # FUSE_CAP_ASYNC_READ
        config.kernel_cache = 1  # all changes go through the kernel
        config.nullpath_ok = 1
        timeout_s = UNCHANGING_S if self._read_only else 1.0
        config.entry_timeout = config.attr_timeout = timeout_s
        config.negative_timeout = timeout_s if self._read_only else 0.0
        with self._lock:
            self._fuse = self._mfusepy._libfuse.fuse_get_context().contents.fuse
        self._messages.let_go()
        threading.Thread(target=self._set_read_ahead, name="mount-ready", daemon=True).start()

    def _forget(self) -> None:
        with self._lock:
            self._fuse = None

    def _set_read_ahead(self) -> None:
        """Set what needs the mount itself, after the handshake."""
        try:
            device = os.stat(self._directory).st_dev
            path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
            with open(path, "w", encoding="ascii") as file:
                file.write(str(READ_AHEAD_KIB))
        except OSError:
            pass  # not root: the kernel requests 128 KiB at a time
        self.is_ready.set()


class _Messages:
    """Messages of libfuse on the standard error stream while it mounts; it reports errors only there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved = -1
        self._caught = -1

    def catch(self) -> None:
        with self._lock:
            try:
                self._saved = os.dup(2)
            except OSError:
                return  # there is no such stream
            self._caught = os.memfd_create("messages", os.MFD_CLOEXEC)
            os.dup2(self._caught, 2)

    def take(self) -> str:
        """Return the messages and restore the stream."""
        with self._lock:
            if self._saved < 0:
                return ""
            os.dup2(self._saved, 2)
            text = os.pread(self._caught, 4096, 0)
            os.close(self._saved)
            os.close(self._caught)
            self._saved = self._caught = -1
            return text.decode("utf-8", "replace")

    def let_go(self) -> None:
        """Restore the stream and write the messages to it."""
        said = [line for line in self.take().splitlines(keepends=True) if not line.startswith(NO_NEWS)]
        try:
            os.write(2, "".join(said).encode())
        except OSError:
            pass  # the stream has no reader


def _import_mfusepy() -> Any:
    if sys.platform != "linux":
        raise ConfigError("mounts need Linux")
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # else it loads libfuse 2 where both are installed
    try:
        import mfusepy
    except ModuleNotFoundError as caught:
        raise ConfigError("mounts need mfusepy: pip install 'bootseer[checkpoint]'") from caught
    except (OSError, AttributeError) as caught:
        raise ConfigError(
            "libfuse3 was not found: install fuse3 (Debian, Ubuntu) or fuse3-libs (Fedora)"
        ) from caught
    if mfusepy.fuse_version_major != 3:
        raise ConfigError("libfuse3 was not found, only libfuse 2: install fuse3 or fuse3-libs")
    return mfusepy


def _make_class(mfusepy: Any) -> Any:
    """Return mfusepy's class, without its copies of the data and with the arguments that it omits."""

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        def read(self, path: Any, buffer: Any, size: int, offset: int, info: Any) -> Any:
            del path
            address = ctypes.cast(buffer, ctypes.c_void_p).value
            return self.operations.read(info.contents.fh, offset, size, address)

        def write(self, path: Any, buffer: Any, size: int, offset: int, info: Any) -> Any:
            del path
            if not size:
                return 0
            data = (ctypes.c_char * size).from_address(ctypes.cast(buffer, ctypes.c_void_p).value or 0)
            return self.operations.write(info.contents.fh, offset, memoryview(data).cast("B"))

        def truncate_fuse_3(self, path: Any, length: int, info: Any) -> Any:
            handle = info.contents.fh if info else None
            return self.operations.truncate(None if path is None else os.fsdecode(path), length, handle)

        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> Any:
            return self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags)

    return Fuse
