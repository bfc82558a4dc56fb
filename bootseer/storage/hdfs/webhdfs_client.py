"""Blocking WebHDFS calls: to NameNodes over kept connections, and for data straight to chosen DataNodes.

Every socket operation has a deadline, so a call ends after that time without progress; `CancelHandle` ends
it from another thread at once. The client limits the size of answers and maps their errors.
bootseer.storage.hdfs.webhdfs makes it asynchronous.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, quote, urlencode, urlsplit

from bootseer.errors import (
    AlreadyExists,
    NotFound,
    PermissionDenied,
    StorageError,
    StorageTimeout,
    Truncated,
    Unavailable,
)
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.engine.counts import StoreCounters
from bootseer.storage.engine.revocable_buffer import RevocableBuffer
from bootseer.storage.http.client import HttpClient, HttpResponse

PREFIX = "/webhdfs/v1"
MAX_ANSWER_BYTES = 256 << 20  # a listing of a million names
_MAX_ERROR_BYTES = 1 << 20
MAX_IDLE = 4  # kept connections to one NameNode
CONNECT_S = 5.0  # for a host that does not answer; a refusal arrives at once
_STEP_BYTES = 256 << 10  # of receiving and sending: the deadline applies to each step
_SEND_BUFFER_BYTES = 1 << 20  # little in-flight data, so that a stall is noticed early

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


# A plain IOException with one of these means a lost connection between servers, or a cluster short of nodes.
_PASSING = re.compile(
    r"local exception|reset|refused|timed? ?out|broken pipe|EOF|closed|could only be replicated|datanodes .*bad"
    r"|safe ?mode",
    re.IGNORECASE,
)


class FileStatus(NamedTuple):
    """The NameNode's record of one name."""

    name: str  # "" when it was requested by its path
    size: int
    is_folder: bool
    mtime_ms: int
    file_id: int  # 0 where the server has none
    replication: int
    block_bytes: int
    owner: str = ""  # "" if the server does not report it
    mode: int = -1  # permissions and sticky bit; -1 if the server does not report them


class WebNode(NamedTuple):
    """The web server of a DataNode."""

    address: str  # host:port
    silent_s: int  # since its last heartbeat, 0 where unknown


class WebBlock(NamedTuple):
    """The location of a block; nodes in the NameNode's order."""

    offset: int  # bytes, in the file
    length: int  # bytes
    nodes: tuple[WebNode, ...]


class WebHdfsClient:
    """Calls to one HDFS. Thread-safe.

    Args:
        namenodes: host:port of the web server of each NameNode; the client finds and remembers the active one.
        timeout_s: for an answer of one NameNode.
        rpc: the NameNode for DataNodes: its host:port, or the nameservice's name.
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
        self._counts = StoreCounters()
        self._http = _NameNodeHttp(timeout_s, self._tls, self._counts)

    @property
    def requests(self) -> int:
        return self._counts.to_dict()["requests"]

    @property
    def namenode_count(self) -> int:
        return len(self._namenodes)

    def close(self) -> None:
        """Close the kept connections; later calls still work."""
        self._http.close()

    # ---- names -------------------------------------------------------------------------------------------------

    def status(self, path: str, wire: CancelHandle | None = None) -> FileStatus:
        answer = self._ask("GET", path, "GETFILESTATUS", wire)
        with self._parsing(path):
            return _to_status(answer["FileStatus"])

    def entries(self, path: str, wire: CancelHandle | None = None) -> list[FileStatus]:
        answer = self._ask("GET", path, "LISTSTATUS", wire)
        with self._parsing(path):
            return [_to_status(found) for found in answer["FileStatuses"]["FileStatus"]]

    def delete(self, path: str, wire: CancelHandle | None = None) -> None:
        """Delete a path with its contents; a missing path is no error."""
        self._ask("DELETE", path, "DELETE", wire, recursive="true")

    def rename(self, path: str, new: str, *, overwrite: bool, wire: CancelHandle | None = None) -> None:
        options = "OVERWRITE" if overwrite else "NONE"
        self._ask("PUT", path, "RENAME", wire, is_once=True, destination=new, renameoptions=options)

    def set_replication(self, path: str, replication: int, wire: CancelHandle | None = None) -> None:
        self._ask("PUT", path, "SETREPLICATION", wire, replication=str(replication))

    def concat(self, path: str, sources: Sequence[str], wire: CancelHandle | None = None) -> None:
        """Append the sources to `path`, and remove them."""
        self._ask("POST", path, "CONCAT", wire, is_once=True, sources=",".join(sources))

    def blocks(self, path: str, offset: int, length: int, wire: CancelHandle | None = None) -> list[WebBlock]:
        answer = self._ask("GET", path, "GET_BLOCK_LOCATIONS", wire, offset=str(offset), length=str(length))
        # A certificate is for a name; otherwise, an address avoids name resolution.
        host, port = ("hostName", "infoSecurePort") if self._tls else ("ipAddr", "infoPort")
        with self._parsing(path):
            return [
                WebBlock(
                    found["startOffset"],
                    found["block"]["numBytes"],
                    tuple(WebNode(f"{place[host]}:{place[port]}", 0) for place in found["locations"]),
                )
                for found in answer["LocatedBlocks"]["locatedBlocks"]
            ]

    def live_nodes(self, wire: CancelHandle | None = None) -> list[WebNode]:
        """Return the DataNodes that accept files, sorted, as the NameNode knows them from heartbeats."""
        query = "/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        answer = self._at_active(lambda namenode: self._get_json("GET", namenode, query, "/", wire))
        with self._parsing("/"):
            return sorted(
                WebNode(self._web_address(name, node), int(node.get("lastContact", 0)))
                for name, node in json.loads(answer["beans"][0]["LiveNodes"]).items()
                if node.get("adminState", "In Service") == "In Service"
            )

    def answers(self, node: str, within_s: float) -> bool:
        """Return whether a DataNode (host:port) answers at all; a frozen one only accepts connections."""
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
        self,
        path: str,
        offset: int,
        length: int,
        landing: RevocableBuffer,
        breaker: CancelHandle,
        *,
        node: str,
        stall_s: float,
    ) -> None:
        """Land `length` bytes from one DataNode (host:port), "" for the NameNode's choice."""
        span = {"offset": str(offset), "length": str(length)}
        where = self._at_datanode("GET", path, "OPEN", node, span, breaker)
        buffer = memoryview(bytearray(min(length, _STEP_BYTES)))
        done = 0
        with (
            self._talk(where.netloc, stall_s, path, breaker) as connection,
            _ask_over(connection, "GET", where.target) as response,
        ):
            if response.status != http.client.OK:
                raise self._refusal(response, path)
            promised = response.headers.get("Content-Length")
            if promised is not None and promised.isdecimal() and int(promised) < length:
                raise Truncated(f"{self._shown(path)} ends before byte {offset + length}")
            while done < length:
                count = response.readinto(buffer[: length - done])
                if not count:
                    raise Unavailable(f"{self._shown(path)}: {where.netloc} closed the connection too early")
                landing.land(buffer[:count])
                done += count

    def write(
        self,
        path: str,
        data: memoryview | bytes,
        breaker: CancelHandle,
        *,
        node: str = "",
        replication: int,
        block_bytes: int,
        stall_s: float,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a whole new file through one DataNode, which gets the first replica of each of its blocks.

        `on_sent` is called when everything is sent and only the answer is missing. After an error, a partial file
        may exist or appear later: the name must not be used again.
        """
        options = {"overwrite": "false"}
        if replication:
            options["replication"] = str(replication)
        if block_bytes:
            options["blocksize"] = str(block_bytes)
        where = self._at_datanode("PUT", path, "CREATE", node, options, breaker)
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
                if breaker.is_cut:
                    raise
                # It may have answered without reading: an existing name, no permission.
            on_sent()
            # Buffered data takes about as long as the data sent so far; a stall appears only after that.
            connection.sock.settimeout(stall_s + 2 * (time.monotonic() - began_s))
            with connection.getresponse() as response:
                if response.status != http.client.CREATED:
                    raise self._refusal(response, path)

    # ---- inside ------------------------------------------------------------------------------------------------

    class _Reply(NamedTuple):
        status: int
        location: str  # of a redirect
        content: bytes

    class _Place(NamedTuple):
        netloc: str  # host:port
        target: str  # path and query

    def _ask(
        self, method: str, path: str, op: str, wire: CancelHandle | None, *, is_once: bool = False, **options: str
    ) -> dict[str, Any]:
        """Return the answer to one call.

        `is_once`: once it was sent, another NameNode is asked only if this one has refused it. Where this one has
        done it without an answer, the answer of the other would be wrong.
        """
        target = self._target(path, op, options)
        try:
            return self._at_active(
                lambda namenode: self._get_json(method, namenode, target, path, wire, is_once=is_once)
            )
        except _UnansweredError as error:
            raise error.failure from error.failure.__cause__

    def _at_active(self, call: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Call the NameNode that answered last, then the others."""
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

    def _get_json(
        self,
        method: str,
        netloc: str,
        target: str,
        path: str,
        wire: CancelHandle | None,
        *,
        is_once: bool = False,
    ) -> dict[str, Any]:
        reply = self._call(method, netloc, target, path, wire, is_once=is_once)
        if reply.status != http.client.OK:
            raise self._error(reply.status, reply.content, path)
        with self._parsing(path):
            answer = json.loads(reply.content) if reply.content else {}
            if not isinstance(answer, dict):
                raise TypeError(answer)
        return answer

    def _call(
        self,
        method: str,
        netloc: str,
        target: str,
        path: str,
        wire: CancelHandle | None,
        *,
        is_once: bool = False,
    ) -> _Reply:
        """Send a request to a NameNode; its connection is kept for the next one."""
        wire = wire or CancelHandle()
        held = wire.held
        shown = f"{self._shown(path)}: {netloc}"
        try:
            exchange = self._http.begin_call(method, netloc, target, wire, shown, is_fresh=is_once)
            content = exchange.read_all(MAX_ANSWER_BYTES)
        except StorageError as error:
            if wire.held == held and not isinstance(error, Unavailable):
                raise Unavailable(str(error)) from error  # it cannot be reached, for whatever reason
            if is_once and isinstance(error, Unavailable) and wire.held > held:
                raise _UnansweredError(error) from error
            raise
        return self._Reply(exchange.status, exchange.headers.get("Location", ""), content)

    def _at_datanode(
        self, method: str, path: str, op: str, node: str, options: dict[str, str], wire: CancelHandle
    ) -> _Place:
        """Return the target of a data call: the node itself, or the NameNode's choice."""
        if node and self._rpc:
            return self._Place(node, self._target(path, op, {**options, "namenoderpcaddress": self._rpc}))
        target = self._target(path, op, options)
        where: dict[str, Any] = self._at_active(
            lambda namenode: self._redirect(method, namenode, target, path, wire)
        )
        parts = urlsplit(where["location"])
        if parts.scheme not in ("http", "https") or not parts.netloc or not parts.path.startswith(PREFIX):
            raise StorageError(f"{self._shown(path)}: the NameNode redirects to an address that is not WebHDFS")
        query = parse_qs(parts.query)
        if not self._rpc and "delegation" not in query:
            self._rpc = query.get("namenoderpcaddress", [""])[0]
        if node and self._rpc:
            return self._at_datanode(method, path, op, node, options, wire)
        return self._Place(parts.netloc, f"{parts.path}?{parts.query}")

    def _redirect(self, method: str, netloc: str, target: str, path: str, wire: CancelHandle) -> dict[str, Any]:
        reply = self._call(method, netloc, target, path, wire)
        if reply.status != http.client.TEMPORARY_REDIRECT:
            raise self._error(reply.status, reply.content, path)
        return {"location": reply.location}

    def _target(self, path: str, op: str, options: dict[str, str]) -> str:
        query = {"op": op, "user.name": self._user, **options}
        return f"{PREFIX}{quote(path)}?{urlencode(query)}"

    @contextmanager
    def _talk(
        self, netloc: str, stall_s: float, path: str, breaker: CancelHandle | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        """Open a connection to a DataNode for one request, and map its errors."""
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
        self._counts.add("requests")
        host, port = _check_address(netloc)
        timeout_s = min(CONNECT_S, stall_s)
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        try:
            connection.connect()
        except TimeoutError as error:
            connection.close()
            raise StorageTimeout(f"{netloc} did not accept a connection within {timeout_s:g} s") from error
        except OSError as error:
            connection.close()
            raise Unavailable(f"{netloc} is unreachable: {error}") from error
        connection.sock.settimeout(stall_s)
        return connection

    @contextmanager
    def _parsing(self, path: str) -> Iterator[None]:
        """Map errors of parsing an answer, whose sender may not be a NameNode."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{self._shown(path)}: invalid WebHDFS answer; is it a NameNode?") from error

    def _web_address(self, name: str, node: dict[str, Any]) -> str:
        if self._tls is None:
            return str(node["infoAddr"])
        return name.rpartition(":")[0] + ":" + str(node["infoSecureAddr"]).rpartition(":")[2]

    def _failure(self, error: Exception, path: str, netloc: str) -> StorageError:
        if isinstance(error, TimeoutError):
            return StorageTimeout(f"{self._shown(path)}: {netloc} sent nothing in time")
        return Unavailable(f"{self._shown(path)}: {netloc}: {str(error) or type(error).__name__}")

    def _refusal(self, response: http.client.HTTPResponse, path: str) -> StorageError:
        return self._error(response.status, response.read(_MAX_ERROR_BYTES), path)

    def _error(self, status: int, content: bytes, path: str) -> StorageError:
        """Map an unexpected answer to an error."""
        name, message = "", ""
        try:
            remote = json.loads(content)["RemoteException"]
            name, message = str(remote["exception"]), str(remote["message"]).splitlines()[0]
        except (ValueError, KeyError, TypeError, IndexError):
            pass  # not JSON, such as a proxy's page: only the status is left
        kind = _ERRORS.get(name)
        if (
            kind is None
            and name in ("IOException", "EOFException", "RemoteException")
            and _PASSING.search(message)
        ):
            kind = Unavailable
        if kind is None:
            kind = Unavailable if status >= 500 or status == 429 else StorageError
            if status == 401:
                kind, message = PermissionDenied, "the server requires Kerberos: use hdfs:// with hdfs-native"
        said = f"{name}: {message}" if name else message or f"HTTP status {status}"
        return kind(f"{self._shown(path)}: {said}")

    def _shown(self, path: str) -> str:
        return f"{'s' if self._tls else ''}webhdfs://{self._namenodes[self._active]}{path}"


class _UnansweredError(Exception):
    """A call was sent, and its answer did not come."""

    def __init__(self, failure: Unavailable) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _NameNodeHttp(HttpClient):
    """Kept connections to NameNodes. Proxies of the environment are not used."""

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None, counts: StoreCounters) -> None:
        connect_s = min(CONNECT_S, timeout_s)
        super().__init__(
            timeout_s=timeout_s, connect_s=connect_s, headers={}, ca_file="", counts=counts, max_idle=MAX_IDLE
        )
        self._context = tls

    def begin_call(
        self, method: str, netloc: str, target: str, wire: CancelHandle, shown: str, *, is_fresh: bool
    ) -> HttpResponse:
        """Send a request without a body until its response begins; a redirect is a response."""
        host, port = _check_address(netloc)
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = urlsplit(f"{'http' if self._context is None else 'https'}://{server}{target}")
        headers = {} if method == "GET" else {"Content-Length": "0"}
        return self._send(method, url, headers, wire, is_fresh, shown=shown)

    def _proxy_for(self, parts: SplitResult) -> SplitResult | None:
        del parts
        return None


def _check_address(netloc: str) -> tuple[str, int]:
    host, _, port = netloc.rpartition(":")
    if not host or not port.isdecimal():
        raise StorageError(f"{netloc!r} is not host:port of a web server")
    return host.strip("[]"), int(port)


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
