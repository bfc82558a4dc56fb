"""Blocking WebHDFS calls to NameNodes and, for data, straight to chosen DataNodes. One connection a call.

Every socket operation has a deadline, so a call ends when nothing moves for that long; `Breaker` ends it from
another thread at once. Answers are bounded and their errors become ours here. bootseer.storage.webhdfs makes it
asynchronous.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from bootseer.errors import (
    AlreadyExists,
    NotFound,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.landing import GivenUpError, Landing

PREFIX = "/webhdfs/v1"
MAX_ANSWER_BYTES = 256 << 20  # a listing of a million names
CONNECT_S = 5.0  # a host that does not answer at all; a refusal comes at once
_STEP_BYTES = 256 << 10  # of receiving and sending: what the deadline counts for
_SEND_BUFFER_BYTES = 1 << 20  # little is in flight unseen, so that a stall is noticed early

_ERRORS: dict[str, type[StorageError]] = {
    "FileNotFoundException": NotFound,
    "FileAlreadyExistsException": AlreadyExists,
    "AlreadyBeingCreatedException": AlreadyExists,
    "AccessControlException": PermissionDenied,
    "AuthorizationException": PermissionDenied,
    "SecurityException": PermissionDenied,
    "InvalidToken": PermissionDenied,
    "StandbyException": Unavailable,
    "RetriableException": Unavailable,
    "SafeModeException": Unavailable,
    "ConnectException": Unavailable,
    "SocketTimeoutException": Unavailable,
    "NoRouteToHostException": Unavailable,
    "BlockMissingException": Unavailable,
}


# A plain IOException with one of these is a lost connection between servers, or a cluster that is short of nodes.
_PASSING = re.compile(
    r"local exception|reset|refused|timed? ?out|broken pipe|EOF|closed|could only be replicated|datanodes .*bad"
    r"|safe ?mode",
    re.IGNORECASE,
)


class FileStatus(NamedTuple):
    """What the NameNode says of one name."""

    name: str  # "" when it was asked for by its path
    size: int
    is_folder: bool
    mtime_ms: int
    file_id: int  # 0 where the server has none
    replication: int
    block_bytes: int
    owner: str = ""  # "" where the server does not say
    mode: int = -1  # permissions and sticky bit; -1 where the server does not say


class WebNode(NamedTuple):
    """A DataNode as its web server is reached."""

    address: str  # host:port
    silent_s: int  # since its last heartbeat, 0 where unknown


class WebBlock(NamedTuple):
    """Where one block lies; nodes in the NameNode's order."""

    offset: int  # bytes, in the file
    length: int  # bytes
    nodes: tuple[WebNode, ...]


class Breaker:
    """Ends a blocking call from outside: its connection is shut down, so its thread comes back at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.is_tripped = False

    def trip(self) -> None:
        with self._lock:
            self.is_tripped = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # closed already

    def hold(self, connected: socket.socket | None) -> None:
        """The call works with this connection from now on; None: with none any more."""
        with self._lock:
            self._socket = connected
            if self.is_tripped and connected is not None:
                raise GivenUpError


class WebHdfsClient:
    """Calls to one HDFS. Thread-safe.

    Args:
        namenodes: host:port of the web server of each NameNode; the active one is found and remembered.
        rpc: what DataNodes are to call the file system: host:port of the NameNode, or the nameservice's name.
            "" takes it from the NameNode's first redirect.
    """

    def __init__(
        self, namenodes: Sequence[str], *, user: str, timeout_s: float, tls: bool = False, rpc: str = ""
    ) -> None:
        self._namenodes = list(namenodes)
        self._user = user
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if tls else None
        self._rpc = rpc
        self._active = 0
        self._lock = threading.Lock()
        self.requests = 0

    # ---- names -------------------------------------------------------------------------------------------------

    def status(self, path: str) -> FileStatus:
        answer = self._ask("GET", path, "GETFILESTATUS")
        with self._understanding(path):
            return _to_status(answer["FileStatus"])

    def entries(self, path: str) -> list[FileStatus]:
        answer = self._ask("GET", path, "LISTSTATUS")
        with self._understanding(path):
            return [_to_status(found) for found in answer["FileStatuses"]["FileStatus"]]

    def delete(self, path: str) -> None:
        """With all that is in it; what is missing is no error."""
        self._ask("DELETE", path, "DELETE", recursive="true")

    def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        options = "OVERWRITE" if overwrite else "NONE"
        self._ask("PUT", path, "RENAME", destination=new, renameoptions=options)

    def set_replication(self, path: str, replication: int) -> None:
        self._ask("PUT", path, "SETREPLICATION", replication=str(replication))

    def concat(self, path: str, sources: Sequence[str]) -> None:
        """Appends the sources, which are gone then."""
        self._ask("POST", path, "CONCAT", sources=",".join(sources))

    def blocks(self, path: str, offset: int, length: int) -> list[WebBlock]:
        """The blocks that hold a range."""
        answer = self._ask("GET", path, "GET_BLOCK_LOCATIONS", offset=str(offset), length=str(length))
        # A certificate is for a name; else an address needs no name server.
        host, port = ("hostName", "infoSecurePort") if self._tls else ("ipAddr", "infoPort")
        with self._understanding(path):
            return [
                WebBlock(
                    found["startOffset"],
                    found["block"]["numBytes"],
                    tuple(WebNode(f"{place[host]}:{place[port]}", 0) for place in found["locations"]),
                )
                for found in answer["LocatedBlocks"]["locatedBlocks"]
            ]

    def live_nodes(self) -> list[WebNode]:
        """DataNodes that take files, sorted; as the NameNode knows them from their heartbeats."""
        query = "/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        answer = self._at_active(lambda namenode: self._get_json("GET", namenode, query, "/"))
        with self._understanding("/"):
            return sorted(
                WebNode(self._web_address(name, node), int(node.get("lastContact", 0)))
                for name, node in json.loads(answer["beans"][0]["LiveNodes"]).items()
                if node.get("adminState", "In Service") == "In Service"
            )

    def answers(self, node: str, within_s: float) -> bool:
        """Whether a DataNode (host:port) says anything at all; a frozen one takes connections but does not."""
        try:
            with (
                self._talk(node, within_s, "/") as connection,
                _ask_over(connection, "GET", f"{PREFIX}/?op=GETHOMEDIRECTORY"),  # DataNodes refuse it
            ):
                return True
        except StorageError:
            return False

    # ---- data --------------------------------------------------------------------------------------------------

    def read(
        self, path: str, offset: int, length: int, landing: Landing, breaker: Breaker, *, node: str, stall_s: float
    ) -> None:
        """Lands `length` bytes from one DataNode (host:port), "" for the one that the NameNode names."""
        where = self._at_datanode("GET", path, "OPEN", node, {"offset": str(offset), "length": str(length)})
        buffer = memoryview(bytearray(min(length, _STEP_BYTES)))
        done = 0
        with (
            self._talk(where.netloc, stall_s, path, breaker) as connection,
            _ask_over(connection, "GET", where.target) as response,
        ):
            if response.status != http.client.OK:
                raise self._error(response, path)
            promised = response.headers.get("Content-Length")
            if promised is not None and promised.isdecimal() and int(promised) < length:
                raise Truncated(f"{self._shown(path)} ends before byte {offset + length}")
            while done < length:
                count = response.readinto(buffer[: length - done])
                if not count:
                    raise Unavailable(f"{self._shown(path)}: {where.netloc} ended the connection in the middle")
                landing.land(buffer[:count])
                done += count

    def write(
        self,
        path: str,
        data: memoryview | bytes,
        breaker: Breaker,
        *,
        node: str = "",
        replication: int,
        block_bytes: int,
        stall_s: float,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a whole new file through one DataNode, which gets the first replica of each of its blocks.

        `on_sent` is called when all is sent and only the answer is to come. After an error something of it may be
        there, or come later: the name must not be used again.
        """
        options = {"overwrite": "false"}
        if replication:
            options["replication"] = str(replication)
        if block_bytes:
            options["blocksize"] = str(block_bytes)
        where = self._at_datanode("PUT", path, "CREATE", node, options)
        view = memoryview(data)
        with self._talk(where.netloc, stall_s, path, breaker) as connection:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.putrequest("PUT", where.target)
            connection.putheader("Content-Length", str(len(view)))
            connection.putheader("Content-Type", "application/octet-stream")
            connection.endheaders()
            began_s = time.monotonic()
            try:
                for start in range(0, len(view), _STEP_BYTES):
                    connection.sock.sendall(view[start : start + _STEP_BYTES])
            except TimeoutError:
                raise
            except OSError:
                if breaker.is_tripped:
                    raise
                # Else it may have answered instead of listening: a name that is there, no permission.
            on_sent()
            # What is under way inside takes about as long as what was sent; a stall shows only here then.
            connection.sock.settimeout(stall_s + 2 * (time.monotonic() - began_s))
            with connection.getresponse() as response:
                if response.status != http.client.CREATED:
                    raise self._error(response, path)

    # ---- inside ------------------------------------------------------------------------------------------------

    class _Place(NamedTuple):
        netloc: str  # host:port
        target: str  # path and query

    def _ask(self, method: str, path: str, op: str, **options: str) -> dict[str, Any]:
        target = self._target(path, op, options)
        return self._at_active(lambda namenode: self._get_json(method, namenode, target, path))

    def _at_active(self, call: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Calls the NameNode that served last, then the others."""
        first = self._active
        for number in range(len(self._namenodes)):
            index = (first + number) % len(self._namenodes)
            try:
                answer = call(self._namenodes[index])
            except Unavailable:
                if number == len(self._namenodes) - 1:
                    raise
            else:
                self._active = index
                return answer
        raise AssertionError("there is at least one NameNode")

    def _get_json(self, method: str, netloc: str, target: str, path: str) -> dict[str, Any]:
        with (
            self._talk(netloc, self._timeout_s, path) as connection,
            _ask_over(connection, method, target) as response,
        ):
            if response.status != http.client.OK:
                raise self._error(response, path)
            content = response.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise StorageError(f"{self._shown(path)}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        with self._understanding(path):
            answer = json.loads(content) if content else {}
            if not isinstance(answer, dict):
                raise TypeError(answer)
        return answer

    def _at_datanode(self, method: str, path: str, op: str, node: str, options: dict[str, str]) -> _Place:
        """Where to send a data call: straight to the node, or wherever the NameNode says."""
        if node and self._rpc:
            return self._Place(node, self._target(path, op, {**options, "namenoderpcaddress": self._rpc}))
        target = self._target(path, op, options)
        where: dict[str, Any] = self._at_active(lambda namenode: self._redirect(method, namenode, target, path))
        parts = urlsplit(where["location"])
        if parts.scheme not in ("http", "https") or not parts.netloc or not parts.path.startswith(PREFIX):
            raise StorageError(f"{self._shown(path)}: the NameNode sends us to an address that is no WebHDFS")
        query = parse_qs(parts.query)
        if not self._rpc and "delegation" not in query:
            self._rpc = query.get("namenoderpcaddress", [""])[0]
        if node and self._rpc:
            return self._at_datanode(method, path, op, node, options)
        return self._Place(parts.netloc, f"{parts.path}?{parts.query}")

    def _redirect(self, method: str, netloc: str, target: str, path: str) -> dict[str, Any]:
        with (
            self._talk(netloc, self._timeout_s, path) as connection,
            _ask_over(connection, method, target) as response,
        ):
            if response.status != http.client.TEMPORARY_REDIRECT:
                raise self._error(response, path)
            return {"location": response.headers.get("Location", "")}

    def _target(self, path: str, op: str, options: dict[str, str]) -> str:
        query = {"op": op, "user.name": self._user, **options}
        return f"{PREFIX}{quote(path)}?{urlencode(query)}"

    @contextmanager
    def _talk(
        self, netloc: str, stall_s: float, path: str, breaker: Breaker | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request; what goes wrong with it is an error of ours."""
        connection = self._connect(netloc, stall_s)
        try:
            if breaker is not None:
                breaker.hold(connection.sock)
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error, path, netloc) from error
        finally:
            if breaker is not None:
                breaker.hold(None)
            connection.close()

    def _connect(self, netloc: str, stall_s: float) -> http.client.HTTPConnection:
        with self._lock:
            self.requests += 1
        host, _, port = netloc.rpartition(":")
        if not host or not port.isdecimal():
            raise StorageError(f"{netloc!r} is no host:port of a web server")
        host, timeout_s = host.strip("[]"), min(CONNECT_S, stall_s)
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=self._tls)
        try:
            connection.connect()
        except TimeoutError as error:
            connection.close()
            raise StorageTimeout(f"{netloc} did not take a connection within {timeout_s:g} s") from error
        except OSError as error:
            connection.close()
            raise Unavailable(f"{netloc} cannot be reached: {error}") from error
        connection.sock.settimeout(stall_s)
        return connection

    @contextmanager
    def _understanding(self, path: str) -> Iterator[None]:
        """For taking an answer apart: whoever sent it need not be a NameNode."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{self._shown(path)}: the answer is none of WebHDFS; is it a NameNode?") from error

    def _web_address(self, name: str, node: dict[str, Any]) -> str:
        if self._tls is None:
            return str(node["infoAddr"])
        return name.rpartition(":")[0] + ":" + str(node["infoSecureAddr"]).rpartition(":")[2]

    def _failure(self, error: Exception, path: str, netloc: str) -> StorageError:
        if isinstance(error, TimeoutError):
            return StorageTimeout(f"{self._shown(path)}: nothing came from {netloc} in time")
        return Unavailable(f"{self._shown(path)}: {netloc}: {str(error) or type(error).__name__}")

    def _error(self, response: http.client.HTTPResponse, path: str) -> StorageError:
        """What an answer other than the wanted one means."""
        name, message = "", ""
        try:
            remote = json.loads(response.read(1 << 20))["RemoteException"]
            name, message = str(remote["exception"]), str(remote["message"]).splitlines()[0]
        except (ValueError, KeyError, TypeError, IndexError):
            pass  # no JSON, such as a proxy's page: the status must do
        kind = _ERRORS.get(name)
        if (
            kind is None
            and name in ("IOException", "EOFException", "RemoteException")
            and _PASSING.search(message)
        ):
            kind = Unavailable
        if kind is None:
            kind = Unavailable if response.status >= 500 or response.status == 429 else StorageError
            if response.status == 401:
                kind, message = PermissionDenied, "it wants Kerberos: use hdfs:// with hdfs-native for that"
        said = f"{name}: {message}" if name else message or f"HTTP status {response.status}"
        return kind(f"{self._shown(path)}: {said}")

    def _shown(self, path: str) -> str:
        return f"{'s' if self._tls else ''}webhdfs://{self._namenodes[self._active]}{path}"


def _ask_over(connection: http.client.HTTPConnection, method: str, target: str) -> http.client.HTTPResponse:
    connection.request(method, target, headers={"Content-Length": "0"} if method != "GET" else {})
    return connection.getresponse()


def _to_status(found: dict[str, Any]) -> FileStatus:
    return FileStatus(
        name=str(found["pathSuffix"]),
        size=int(found["length"]),
        is_folder=found["type"] == "DIRECTORY",
        mtime_ms=int(found["modificationTime"]),
        file_id=int(found.get("fileId", 0)),
        replication=int(found.get("replication", 0)),
        block_bytes=int(found.get("blockSize", 0)),
        owner=str(found.get("owner", "")),
        mode=int(str(found.get("permission", "-1")), 8),
    )
