"""The private file by which the launcher passes key, nodes and stores to servers and readers.

It is replaced by a rename, so that readers see the old or the new nodes. `PeersFile` checks periodically for a new
one. Without a file the job is over, or peers are disabled. It contains the key of the job's peers, so it is
private to its owner, and is never passed by argument or environment.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bootseer.errors import ConfigError, IntegrityError, StorageError
from bootseer.formats import decode_json
from bootseer.linux.files import replace_file
from bootseer.logs import get_logger
from bootseer.peers.auth import MIN_KEY_BYTES, origin_id
from bootseer.peers.wire import is_node
from bootseer.storage.paths import check_path, redact

_log = get_logger(__name__)

FORMAT = "bootseer-peers/1"
MAX_FILE_BYTES = 16 << 20
MAX_NODES = 100_000
MAX_ORIGINS = 256
POLL_S = 0.5  # between checks for another file


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of the job and its address."""

    id: str  # constant during its life in the job; a replacement has another one
    address: str  # an IP address
    port: int


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store that the job reads. Its objects never change, or are read by their etag."""

    url: str  # as readers use it; may contain a password
    options: dict[str, Any] = {}
    below: list[str] = []  # directories of shared objects; none: all


class JobPeers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data of one node about the job's peers."""

    format: str = FORMAT
    job: str  # for display
    own: str  # id of this node
    key: str  # of `derive_key`, as hex digits
    nodes: list[Node]  # all of them, including this one
    origins: list[Origin]

    def key_bytes(self) -> bytes:
        return bytes.fromhex(self.key)

    def find_origin(self, url: str) -> Origin | None:
        return next((origin for origin in self.origins if origin.url == url), None)

    def origins_by_id(self) -> dict[str, Origin]:
        key = self.key_bytes()
        return {origin_id(key, origin.url): origin for origin in self.origins}


# msgspec crashes if two threads decode a type for the first time simultaneously; here only one thread can.
_KNOWN = msgspec.json.Decoder(JobPeers)


def may_share(origin: Origin, path: str) -> bool:
    """Return whether an object of a store is shared between peers."""
    return not origin.below or any(path.startswith(f"{directory}/") for directory in origin.below)


def check(peers: JobPeers, where: str) -> JobPeers:
    """Validate and return the value. Raises: ConfigError."""
    ids = [node.id for node in peers.nodes]
    if not 0 < len(ids) <= MAX_NODES or len(peers.origins) > MAX_ORIGINS:
        raise ConfigError(f"{where}: {len(ids)} nodes and {len(peers.origins)} stores")
    if len(set(ids)) != len(ids) or peers.own not in ids:
        raise ConfigError(f"{where}: each node needs a unique id, and {peers.own!r} has to be one of them")
    for node in peers.nodes:
        if not is_node(node.id):
            raise ConfigError(f"{where}: {node.id!r} is not a node id (up to 128 characters, no spaces)")
        if not 0 < node.port < 65536 or not _is_address(node.address):
            raise ConfigError(f"{where}: node {node.id}: invalid address or port: {node.address!r}, {node.port}")
    try:
        key = peers.key_bytes()
    except ValueError:
        key = b""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{where}: its key is not {MIN_KEY_BYTES} bytes as hex digits")
    for origin in peers.origins:
        for directory in origin.below:
            try:
                check_path(redact(origin.url), directory)
            except StorageError as error:
                raise ConfigError(f"{where}: {error}") from error
    return peers


def read_peers(path: str) -> JobPeers | None:
    """Read the file; return None if it does not exist.

    Raises: ConfigError if other users can read or write it, or if its content is invalid.
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
            raise ConfigError(f"{path}: is not a file of this user or of root")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{path}: other users can access it (mode {stat.S_IMODE(status.st_mode):04o}); run chmod 600"
            )
        data = _read(fd, MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    try:
        found = decode_json(
            data, JobPeers, FORMAT, path, what="not a file of a job's peers", max_bytes=MAX_FILE_BYTES
        )
        return check(found, path)
    except IntegrityError as error:
        raise ConfigError(str(error)) from error


def write_peers(path: str, peers: JobPeers) -> None:
    """Write the file atomically, private to its owner. Its directory should be private as well.

    Raises: ConfigError for content that readers would refuse; OSError.
    """
    replace_file(path, msgspec.json.encode(check(peers, path)))


class PeersFile:
    """The present content of the file, for any thread. A check costs one system call, at most each `look_s`."""

    def __init__(self, path: str, *, look_s: float = POLL_S, log: Callable[[str], object] | None = None) -> None:
        """Args: log: receives why the file cannot be used (default: it is logged)."""
        self.path = path
        self._look_s, self._log = look_s, log or _log.info
        self._looked_s = float("-inf")
        self._seen: tuple[int, ...] | None = None
        self._peers: JobPeers | None = None

    def follow(self, path: str) -> None:
        """Follow the file of another job from now on; "" for none."""
        if path != self.path:
            self.path, self._seen, self._peers = path, None, None
            self._looked_s = float("-inf")

    def current(self, *, is_urgent: bool = False) -> JobPeers | None:
        """Return the job, the same object while the file is unchanged; None: no peers. `is_urgent`: check now."""
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
            self._log(f"peer sharing disabled: {error}")


def _read(fd: int, max_bytes: int) -> bytes:
    parts = []
    while max_bytes > 0 and (part := os.read(fd, max_bytes)):
        parts.append(part)
        max_bytes -= len(part)
    return b"".join(parts)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
