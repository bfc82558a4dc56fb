"""Who takes part: the private file by which the launcher hands key, nodes and stores to whoever serves or reads.

Written whole and renamed, so that a reader sees the old nodes or the new ones. `PeersFile` looks now and then
whether there is another one; no file means that the job is over, or that nobody helps. It holds the key of the
job's peers, so it is its owner's alone, and is never given by argument or environment.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bootseer.errors import ConfigError, IntegrityError, StorageError
from bootseer.formats import decode_json
from bootseer.peers.auth import LEAST_KEY_BYTES, origin_id
from bootseer.peers.wire import is_node
from bootseer.storage.paths import check_path, redact

FORMAT = "bootseer-peers/1"
MOST_FILE_BYTES = 16 << 20
MOST_NODES = 100_000
MOST_ORIGINS = 256
LOOK_S = 0.5  # between looks for another file


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the job and where it serves."""

    id: str  # the same for its whole life in the job; another one after it was replaced
    address: str  # an IP address
    port: int


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store that the job reads, all of whose objects never change, or are read by their etag."""

    url: str  # as readers have it; may hold a password
    options: dict[str, Any] = {}
    below: list[str] = []  # folders of which objects may be asked; none: all


class JobPeers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one node knows of the job's peers."""

    format: str = FORMAT
    job: str  # for people
    own: str  # id of this node
    key: str  # of `derive_key`, as hex digits
    nodes: list[Node]  # all of them, this one too
    origins: list[Origin]

    def key_bytes(self) -> bytes:
        return bytes.fromhex(self.key)

    def find_origin(self, url: str) -> Origin | None:
        return next((origin for origin in self.origins if origin.url == url), None)

    def origins_by_id(self) -> dict[str, Origin]:
        key = self.key_bytes()
        return {origin_id(key, origin.url): origin for origin in self.origins}


# msgspec crashes when two threads decode a type for the first time at the same moment: here only one can.
_KNOWN = msgspec.json.Decoder(JobPeers)


def may_share(origin: Origin, path: str) -> bool:
    """Whether an object of a store goes through peers."""
    return not origin.below or any(path.startswith(f"{folder}/") for folder in origin.below)


def check(peers: JobPeers, where: str) -> JobPeers:
    """The value itself. Raises: ConfigError."""
    ids = [node.id for node in peers.nodes]
    if not 0 < len(ids) <= MOST_NODES or len(peers.origins) > MOST_ORIGINS:
        raise ConfigError(f"{where}: {len(ids)} nodes and {len(peers.origins)} stores")
    if len(set(ids)) != len(ids) or peers.own not in ids:
        raise ConfigError(f"{where}: each node needs an id of its own, and {peers.own!r} has to be one of them")
    for node in peers.nodes:
        if not is_node(node.id):
            raise ConfigError(f"{where}: {node.id!r} is no id of a node: up to 128 letters, no spaces")
        if not 0 < node.port < 65536 or not _is_address(node.address):
            raise ConfigError(f"{where}: node {node.id} is at {node.address!r}, port {node.port}: no IP and port")
    try:
        key = peers.key_bytes()
    except ValueError:
        key = b""
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{where}: its key is not {LEAST_KEY_BYTES} bytes as hex digits")
    for origin in peers.origins:
        for folder in origin.below:
            try:
                check_path(redact(origin.url), folder)
            except StorageError as error:
                raise ConfigError(f"{where}: {error}") from error
    return peers


def read_peers(path: str) -> JobPeers | None:
    """What the file says; None when there is none.

    Raises: ConfigError when others can read or write it, and for what it cannot say.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{path}: is no file of this user or of root")
        if status.st_mode & 0o077:
            raise ConfigError(f"{path}: others can get at it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600")
        data = _read(fd, MOST_FILE_BYTES + 1)
    finally:
        os.close(fd)
    try:
        found = decode_json(
            data, JobPeers, FORMAT, path, what="no file of a job's peers", most_bytes=MOST_FILE_BYTES
        )
        return check(found, path)
    except IntegrityError as error:
        raise ConfigError(str(error)) from error


def write_peers(path: str, peers: JobPeers) -> None:
    """Puts the file there in one step, for its owner alone. Its folder should be private as well.

    Raises: ConfigError for what no reader would take; OSError.
    """
    data = msgspec.json.encode(check(peers, path))
    beside = f"{path}.{os.getpid()}.{threading.get_ident()}"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


class PeersFile:
    """The file as it is now. For any thread; looking costs a system call, at most each `look_s`."""

    def __init__(
        self, path: str, *, look_s: float = LOOK_S, log: Callable[[str], object] = lambda _: None
    ) -> None:
        self.path = path
        self._look_s, self._log = look_s, log
        self._looked_s = float("-inf")
        self._seen: tuple[int, ...] | None = None
        self._peers: JobPeers | None = None

    def follow(self, path: str) -> None:
        """Another file from now on, of another job; "" for none."""
        if path != self.path:
            self.path, self._seen, self._peers = path, None, None
            self._looked_s = float("-inf")

    def current(self, *, is_urgent: bool = False) -> JobPeers | None:
        """None: nobody helps. The same object as long as the file is the same. `is_urgent`: looks in any case."""
        now_s = time.monotonic()
        if is_urgent or now_s - self._looked_s >= self._look_s:
            self._looked_s = now_s
            self._look()
        return self._peers

    def _look(self) -> None:
        try:
            status = os.stat(self.path)
            seen: tuple[int, ...] = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            self._seen, self._peers = None, None
            return
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._peers = read_peers(self.path)
        except ConfigError as error:
            self._peers = None
            self._log(f"peers are not used: {error}")


def _read(fd: int, most_bytes: int) -> bytes:
    parts = []
    while most_bytes > 0 and (part := os.read(fd, most_bytes)):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
