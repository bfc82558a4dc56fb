"""A process that makes the metadata of a tree while others validate the index: both dominate a first start.

In: the index object as it is stored. Out: the part of it that fetching needs, which is quick to decode; the result
of `erofs.metadata`, in shared memory. First the part that a mount reads, then the result of a part of the
validation, then the rest, while programs are being started. The result for an index that fails validation is
dropped, so nothing unvalidated reaches the kernel. The process is forked before the daemon has threads or an
order, and waits. Without it, or when it fails, the daemon does the work itself.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
from io import FileIO
from mmap import PROT_READ, mmap

from bootseer.errors import IntegrityError
from bootseer.mounts.device.metadata_memory import MetadataMemory
from bootseer.mounts.tree_daemon.forked import ForkedHelper, fork_helper
from bootseer.mounts.tree_daemon.metadata import read_slim, write_slim
from bootseer.mounts.tree_daemon.validation import to_memory
from bootseer.tree import erofs
from bootseer.tree.index import Index, check_attributes, check_files, check_head, read_unchecked

SLIM = b"s"
FIRST = struct.Struct("<Q")  # bytes that are there
CHECKED = b"+"
DONE = struct.Struct("<Q")  # bytes that the metadata has
PATIENCE_S = 60.0  # for either part
_HEAD_BYTES = 66  # two flags: validates files, adds the place of a status folder; the digest in hex
_FLAGS = {False: b"-", True: b"+"}


class Maker:
    """The daemon's end: `begin`, `slim` or not, `first`, `is_checked`, `finish`; `close` in any case.

    Not thread-safe.
    """

    def __init__(self, helper: ForkedHelper | None) -> None:
        """`helper`: None if it could not be started; then nothing is made."""
        self._helper = helper
        self._is_asked = False
        self._has_slim = False

    @property
    def pid(self) -> int:
        """Return its pid; 0: there is none, or no longer."""
        return self._helper.pid if self._helper is not None else 0

    def begin(self, index_bytes: bytes, digest: str, *, adds_place: bool = False) -> None:
        """Send it an index object with this digest, unless it has one. Errors show in `first`.

        Args: adds_place: of a status folder.
        """
        if self._helper is None or self._is_asked:
            return
        try:
            fd = to_memory(index_bytes)
            try:
                self.begin_with(fd, digest, checks=True, adds_place=adds_place)
            finally:
                os.close(fd)
        except OSError:
            pass

    def begin_with(self, index: int, digest: str, *, checks: bool, adds_place: bool = False) -> None:
        """Send it an index in a memory file, which stays open. `checks`: whether it validates the files in it."""
        try:
            if self._helper is not None:
                head = _FLAGS[checks] + _FLAGS[adds_place] + digest.encode()
                socket.send_fds(self._helper.connection, [head], [index])
                self._is_asked = True
        except OSError:
            pass

    def slim(self) -> Index | None:
        """Return the part of the index for fetching, not validated; None when it has failed. Blocks."""
        self._has_slim = True
        try:
            said, file = self._receive()
            if file is not None:
                with file:
                    if said == SLIM:
                        size = os.fstat(file.fileno()).st_size
                        return read_slim(os.pread(file.fileno(), size, 0), "the index")
        except (OSError, MemoryError, IntegrityError):
            pass
        self.close()
        return None

    def first(self) -> MetadataMemory | None:
        """Return the metadata once a mount can begin with it; None when it has failed, and ended. Blocks."""
        if not self._has_slim:
            self.slim()
        try:
            said, file = self._receive()
            if file is not None:
                with file:
                    if len(said) == FIRST.size:
                        return MetadataMemory(mmap(file.fileno(), 0, prot=PROT_READ), *FIRST.unpack(said))
        except (OSError, MemoryError, ValueError):
            pass
        self.close()
        return None

    def _receive(self) -> tuple[bytes, FileIO | None]:
        """Return a message and the file sent with it. Raises: OSError."""
        if self._helper is None or not self._is_asked:
            return b"", None
        self._helper.connection.settimeout(PATIENCE_S)
        said, fds, _, _ = socket.recv_fds(self._helper.connection, FIRST.size, 1)
        return said, open(fds[0], "rb", buffering=0) if fds else None

    def is_checked(self) -> bool:
        """Return whether its part of the validation passed; False when it has failed. Blocks."""
        try:
            return self._helper is not None and self._helper.connection.recv(len(CHECKED)) == CHECKED
        except OSError:
            return False

    def finish(self) -> int:
        """Return the length of the complete metadata; 0 when it has failed. Blocks; ends it."""
        try:
            said = self._helper.connection.recv(DONE.size) if self._helper is not None else b""
            return int(DONE.unpack(said)[0]) if len(said) == DONE.size else 0
        except OSError:
            return 0
        finally:
            self.close()

    def close(self) -> None:
        """End it in any state."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


_waiting: list[Maker] = []  # at most one


def start() -> None:
    """Fork it; call it before this process has threads. Never fails."""
    helper = fork_helper("tree-maker", socket.SOCK_SEQPACKET, _make)
    if helper is not None:
        _waiting.append(Maker(helper))


def begin(index: int, digest: str) -> None:
    """Send the started one, if any, an index in a memory file that others validate. Never fails."""
    for maker in _waiting:
        maker.begin_with(index, digest, checks=False)


def take() -> Maker:
    """Return the started one, which the caller then owns; else one that makes nothing."""
    return _waiting.pop() if _waiting else Maker(None)


def _make(connection: socket.socket) -> int:
    said, fds, _, _ = socket.recv_fds(connection, _HEAD_BYTES, 1)
    if not fds:
        return 0  # it is not needed
    gc.disable()
    digest, is_checking, adds_place = said[2:].decode(), said[:1] == _FLAGS[True], said[1:2] == _FLAGS[True]
    with open(fds[0], "rb", buffering=0) as file:
        index_bytes = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    index = read_unchecked(index_bytes, digest, "the index")
    slim = to_memory(write_slim(index))
    socket.send_fds(connection, [SLIM], [slim])
    os.close(slim)
    making = erofs.MetadataImage(_with_place(index) if adds_place else index, digest)
    fd = os.memfd_create("metadata", os.MFD_CLOEXEC)
    os.truncate(fd, making.max_bytes)
    data = mmap(fd, making.max_bytes)
    making.write_first(data)
    socket.send_fds(connection, [FIRST.pack(making.first_bytes)], [fd])
    try:
        check_head(index, "the index")
        check_attributes(index, "the index")
        if is_checking:
            check_files(index, "the index")
    except IntegrityError:
        return 1  # the daemon validates it again, and reports the error
    connection.send(CHECKED)
    connection.send(DONE.pack(making.write_rest(data)))
    return 0


def _with_place(index: Index) -> Index:
    from bootseer.tree.status_folder import with_place

    return with_place(index)
