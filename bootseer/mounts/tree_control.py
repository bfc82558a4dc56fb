"""How others talk to the daemon of a tree: JSON lines over a socket in its folder, one answer for each request.

    in      {"do": "status"}                {"do": "hold"}: until the connection is closed the tree stays mounted
    out     {"ok": {...}}    {"error": "a line for people", "kind": "ConfigError"}

This is the client's end, in plain code, light to import; tree_listener.py is the daemon's.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from types import TracebackType
from typing import Any

from bootseer import errors
from bootseer.errors import BootseerError, ConfigError, StorageError, StorageTimeout

# Of a daemon, unless it is told otherwise.
IDLE_S = 60.0
DEADLINE_S = 30.0
STORE_TIMEOUT_S = 30.0
STREAM_AFTER_S = 10.0  # nobody waits for what no start needs; what trains has just begun to
READ_AHEAD_SHARE = 7 / 8
ANY_WORKLOAD = "0" * 16  # as in bootseer.blocks.trace

MOST_ANSWER_BYTES = 4 << 20
ASK_S = 10.0
_PEER = struct.Struct("@iII")  # pid, uid, gid


class NotAnsweringError(StorageTimeout):
    """There is a daemon, and it says nothing: it is stopped, or hangs."""


class GoneError(StorageError):
    """There is no daemon any more at the other end."""


class Peer:
    """Who is at the other end."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid, self.uid = pid, uid


def peer_of(connection: socket.socket) -> Peer:
    """As the kernel says, from when it connected, or listened."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    return Peer(pid, uid)


def may_talk(peer: Peer) -> bool:
    return peer.uid in (0, os.geteuid())


class Control:
    """A connection to a daemon; for one thread at a time."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection = connection
        self._where = where
        self.peer = peer_of(connection)

    @classmethod
    def connect(cls, path: str, *, timeout_s: float = ASK_S) -> Control | None:
        """None when nobody listens there.

        Raises: ConfigError when it is another user's; NotAnsweringError; StorageError.
        """
        folder, name = os.path.split(path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                connection.settimeout(timeout_s)
                # By the folder's descriptor: addresses of sockets have at most 107 bytes.
                connection.connect(f"/proc/self/fd/{fd}/{name}")
            finally:
                os.close(fd)
            control = cls(connection, path)
            if not may_talk(control.peer):
                raise ConfigError(f"{path}: is served by user {control.peer.uid}, who is not believed")
            return control
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, ConnectionResetError):
            connection.close()
            return None
        except (TimeoutError, BlockingIOError) as error:
            connection.close()
            raise NotAnsweringError(f"{path}: the daemon takes no connection within {timeout_s:g} s") from error
        except PermissionError as error:
            connection.close()
            raise ConfigError(f"{path}: is another user's") from error
        except OSError as error:
            connection.close()
            raise StorageError(f"{path}: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise

    def ask(self, do: str, *, timeout_s: float = ASK_S, **more: object) -> dict[str, Any]:
        """The answer to one request.

        Raises: NotAnsweringError; GoneError when the daemon has ended; the error that it answers with.
        """
        line = json.dumps({"do": do, **more}).encode() + b"\n"
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(line)
            found = json.loads(self._receive(time.monotonic() + timeout_s))
        except TimeoutError as error:
            raise NotAnsweringError(f"{self._where}: the daemon does not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise GoneError(f"{self._where}: the daemon has ended") from error
        except ValueError as error:
            raise StorageError(f"{self._where}: an answer that cannot be understood") from error
        if isinstance(found, dict) and isinstance(found.get("ok"), dict):
            return dict(found["ok"])
        raise to_error(found, self._where)

    def is_gone(self) -> bool:
        """Whether the other end has been closed."""
        try:
            self._connection.settimeout(0)
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, end_s: float) -> bytes:
        received = bytearray()
        while not received.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._connection.settimeout(left_s)
            data = self._connection.recv(65536)
            if not data:
                raise ConnectionResetError
            received += data
            if len(received) > MOST_ANSWER_BYTES:
                raise ValueError("too long")
        return bytes(received)


def to_error(found: object, where: str) -> BootseerError:
    """The error in an answer, as its class if that is one of ours."""
    text = found.get("error") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(text, str):
        return StorageError(f"{where}: an answer that cannot be understood")
    kind = getattr(errors, str(found.get("kind")), StorageError)
    is_ours = isinstance(kind, type) and issubclass(kind, BootseerError)
    return kind(text) if is_ours else StorageError(text)


def from_error(error: BaseException) -> dict[str, str]:
    """The answer that tells of an error."""
    known = error if isinstance(error, BootseerError) else StorageError(f"a bug: {type(error).__name__}: {error}")
    kinds = [each.__name__ for each in type(known).__mro__ if getattr(errors, each.__name__, None) is each]
    return {"error": " ".join(str(known).split()), "kind": kinds[0]}
