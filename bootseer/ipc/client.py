"""The client of a process that listens at a path: one reply for each request (replies.py).

Synchronous, and light to import. Servers: bootseer/mounts/tree_daemon/listener.py, launcher/status/server.py.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any

from bootseer.errors import ConfigError, StorageError, StorageTimeout
from bootseer.ipc.channel import Channel, wait_readable
from bootseer.ipc.replies import read_reply
from bootseer.ipc.unix_sockets import is_own_or_root, peer_of, with_short_address

MAX_ANSWER_BYTES = 4 << 20
ASK_S = 10.0


class NotAnsweringError(StorageTimeout):
    """There is a server, but it does not answer: it is stopped, or hangs."""


class GoneError(StorageError):
    """The server at the other end has ended."""


class Client:
    """A connection to a server of this user or of root; for one thread at a time."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection = connection
        self._channel = Channel(connection, max_bytes=MAX_ANSWER_BYTES)
        self._where = where
        self.peer = peer_of(connection)

    @classmethod
    def connect(cls, path: str, *, timeout_s: float = ASK_S) -> Client | None:
        """Connect; return None when no process listens there.

        Raises: ConfigError when it is another user's; NotAnsweringError; StorageError.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            with_short_address(path, connection.connect)
            client = cls(connection, path)
            if not is_own_or_root(client.peer):
                raise ConfigError(f"{path}: is served by user {client.peer.uid}, which is not trusted")
            return client
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, ConnectionResetError):
            connection.close()
            return None
        except (TimeoutError, BlockingIOError) as error:
            connection.close()
            raise NotAnsweringError(f"{path}: the daemon accepts no connection within {timeout_s:g} s") from error
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
        """Return the answer to one request.

        Raises: NotAnsweringError; GoneError when the server has ended; the error that it answers with.
        """
        self._channel.send({"do": do, **more})
        try:
            found = self._channel.receive(timeout_s)
        except TimeoutError as error:
            raise NotAnsweringError(f"{self._where}: the daemon does not answer within {timeout_s:g} s") from error
        if self._channel.is_invalid:
            raise StorageError(f"{self._where}: the daemon's answer is invalid")
        if found is None:
            raise GoneError(f"{self._where}: the daemon has ended")
        return read_reply(found, self._where)

    def is_gone(self) -> bool:
        """Return whether the other end has been closed."""
        try:
            return wait_readable(self._channel.fd, 0) and self._connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
