"""The process that holds an image's root open for those who enter it: `Holder` is its parent's end.

A child that is forked before the parent has threads. It makes the root (root.py), lives in it, and gives
descriptors of its namespaces to programs of this user that connect to its abstract socket (enter.py): no path,
which could be exchanged, and no pid, which could be another's by then. It ends with its parent; what runs inside
goes on.

    in      {"do": "make", ...}  {"do": "look", "paths": [[path, device, inode]]}  {"do": "attach", "folder": path}
            {"do": "detach", "folder": path}
            {"do": "lay", ...}: no root of its own, folders over those of the node (layers.py)
    out     {"ok": {...}}  {"error": line, "kind": class}
"""

from __future__ import annotations

import array  # noqa: F401  (socket.send_fds imports it, when the node's files are gone already)
import json
import os
import selectors
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from bootseer import errors
from bootseer.errors import BootseerError, StorageError, StorageTimeout
from bootseer.mounts import enter, kernel, namespaces
from bootseer.mounts.binds import Bind
from bootseer.mounts.forked import close_others
from bootseer.mounts.image_environ import LOADER
from bootseer.mounts.layers import Layer, LayersSpec, make_layers
from bootseer.mounts.root import MadeRoot, RootSpec, find_program, make_root

MOST_MESSAGE_BYTES = 16 << 20
MOST_LOOKED_AT = 64  # entries of a folder
BACKLOG = 4096
GIVE_S = 5.0
ASK_S = 120.0  # an answer takes milliseconds, or as long as a folder of the node takes to be mounted
END_S = 5.0
_POLL_S = 0.002
_PEER = struct.Struct("@iII")  # pid, uid, gid


class HeldRoot(NamedTuple):
    """A root that can be entered."""

    address: str  # of the abstract socket, for enter.py
    made: MadeRoot
    program: str  # the first of those that were looked for, "" if none is there


class Holder:
    """See the module's docstring. Calls block, at most `ask_s`; `close` ends it."""

    def __init__(self, *, ask_s: float = ASK_S) -> None:
        """Forks. Raises: StorageError."""
        self._ask_s = ask_s
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.pid = os.fork()
        except OSError as error:
            self._connection.close()
            theirs.close()
            raise StorageError(f"no process for the image: {error.strerror}") from error
        if self.pid == 0:
            _be_holder(theirs)
        theirs.close()
        self._connection.settimeout(ask_s)
        self._received = b""

    def make(
        self, spec: RootSpec, *, loader: Mapping[str, str], programs: Sequence[str] = (), path: str = ""
    ) -> HeldRoot:
        """Makes the root. Args: loader: variables of LOADER inside; programs, path: what to look for there.

        Raises: ConfigError, StorageError.
        """
        found = self._ask({
            "do": "make",
            "spec": [spec.lowers, spec.writable, spec.binds, spec.links, spec.users, spec.groups],
            "loader": dict(loader),
            "programs": list(programs),
            "path": path,
        })  # fmt: skip
        made = MadeRoot(found["has_overlay"], found["has_user_namespace"], tuple(found["notes"]))
        return HeldRoot(found["address"], made, found["program"])

    def lay(self, spec: LayersSpec) -> str:
        """Lays folders over folders of the node, for those who enter: the address, for enter.py.

        Raises: ConfigError, StorageError.
        """
        address: str = self._ask({"do": "lay", "layers": spec.layers, "scratch": spec.scratch})["address"]
        return address

    def look(self, paths: Sequence[str]) -> list[str]:
        """Those paths of the node that are not seen inside, or lead to something else there."""
        wanted = []
        for path in paths:
            found = os.stat(path)
            wanted.append((path, found.st_dev, found.st_ino))
        missing: list[str] = self._ask({"do": "look", "paths": wanted})["missing"]
        return missing

    def attach(self, folder: str, fd: int) -> None:
        """Shows the copy of a mount (namespaces.copy_mount) inside. Raises: StorageError, ConfigError."""
        self._ask({"do": "attach", "folder": folder}, fd)

    def detach(self, folder: str) -> None:
        """Takes away what was attached there, if anything was: what is below it is seen. Raises: as `attach`."""
        self._ask({"do": "detach", "folder": folder})

    def is_over(self) -> bool:
        """Whether its process has ended, whoever did that."""
        try:
            if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
                self.pid = 0
        except ChildProcessError:
            self.pid = 0
        return not self.pid

    def close(self) -> None:
        """Ends it and waits for its end, by force if it must be; one that the kernel holds up is left to it."""
        self._connection.close()
        if self.pid and not self._wait():
            os.kill(self.pid, signal.SIGKILL)  # it was not waited for, so the pid is its own
            self._wait()
        self.pid = 0

    def _wait(self) -> bool:
        """Whether it has ended, within END_S."""
        end_s = time.monotonic() + END_S
        while True:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return True
            except ChildProcessError:
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)

    def _ask(self, request: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        data = json.dumps(request).encode("ascii") + b"\n"
        try:
            if fd is not None:
                socket.send_fds(self._connection, [data], [fd])
            else:
                self._connection.sendall(data)
            while b"\n" not in self._received:
                part = self._connection.recv(1 << 16)
                if not part:
                    raise StorageError("the process that holds the image has ended")
                self._received += part
        except TimeoutError as error:
            if not self.is_over():
                os.kill(self.pid, signal.SIGKILL)  # what it may still answer is no answer to the next question
            raise StorageTimeout(
                f"the process that holds the image has not answered for {self._ask_s:g} s:"
                " does a folder of this node hang (a file system of the network)?"
            ) from error
        except OSError as error:
            raise StorageError(f"the process that holds the image has ended: {error.strerror}") from error
        line, _, self._received = self._received.partition(b"\n")
        found = json.loads(line)
        if "ok" in found:
            return dict(found["ok"])
        kind = getattr(errors, found["kind"], StorageError)
        raise kind(found["error"])


# ---- the process ---------------------------------------------------------------------------------------------


def _be_holder(connection: socket.socket) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _let_go((0, 1))
        close_others({0, 1, 2, connection.fileno()})
        _Process(connection).run()
        status = 0
    finally:
        os._exit(status)


class _Process:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._listener: socket.socket | None = None
        self._frame = b""
        self._fds: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._received = b""
        self._given: list[int] = []  # descriptors that came with requests
        self._attached: set[str] = set()  # folders: what else is mounted there belongs to the root

    def run(self) -> None:
        """Until the parent is gone."""
        self._selector.register(self._connection, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._give()
                elif not self._hear():
                    return

    def _hear(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._connection, 1 << 16, 8)
        for fd in fds:
            os.set_inheritable(fd, False)
        self._given += fds
        self._received += data
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                answer: dict[str, Any] = {"ok": self._do(json.loads(line))}
            except BootseerError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            except OSError as error:
                answer = {"error": f"the image: {error}", "kind": "StorageError"}
            self._connection.sendall(json.dumps(answer).encode("ascii") + b"\n")
        return bool(data) and len(self._received) < MOST_MESSAGE_BYTES

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "make":
                return self._make(request)
            case "lay":
                layers = [Layer(*each) for each in request["layers"]]
                return {"address": self._open_door(lambda: make_layers(LayersSpec(layers, request["scratch"])))[0]}
            case "look":
                return {"missing": [path for path, *place in request["paths"] if not _is_seen(path, tuple(place))]}
            case "attach":
                fd = self._given.pop()
                try:
                    self._detach(request["folder"])  # of an earlier attempt; its server is gone
                    namespaces.attach(fd, request["folder"])
                    self._attached.add(request["folder"])
                finally:
                    os.close(fd)
                return {}
            case "detach":
                self._detach(request["folder"])
                return {}
        raise StorageError(f"{request['do']} is not known")

    def _detach(self, folder: str) -> None:
        """Who has files of it open goes on with them."""
        if folder in self._attached:
            kernel.unmount(folder, kernel.DETACH)
            self._attached.remove(folder)

    def _make(self, request: dict[str, Any]) -> dict[str, Any]:
        lowers, writable, binds, links, users, groups = request["spec"]
        spec = RootSpec(
            lowers,
            writable,
            [Bind(*each) for each in binds],
            [(text, target) for text, target in links],
            users,
            groups,
        )
        address, made = self._open_door(lambda: make_root(spec), request["loader"])
        program = find_program(request["programs"], request["path"])
        return {**made._asdict(), "address": address, "program": program}

    def _open_door(
        self, make: Callable[[], MadeRoot], loader: Mapping[str, str] | None = None
    ) -> tuple[str, MadeRoot]:
        """Has this process move into what is made, and lets others in. Returns: where they ask."""
        address = f"bootseer-root-{os.urandom(16).hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + address.encode())
        made = make()
        self._fds = [
            os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC),
            os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
        ]
        if made.has_user_namespace:
            self._fds.append(os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC))
        self._frame = _make_frame(made.has_user_namespace, loader)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        _let_go((2,))
        return address, made

    def _give(self) -> None:
        """To one program that wants to enter."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection:
            _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.geteuid():
                return
            connection.settimeout(GIVE_S)
            try:
                socket.send_fds(connection, [self._frame], self._fds)
            except OSError:
                pass  # it has gone


def _make_frame(has_user_namespace: bool, loader: Mapping[str, str] | None) -> bytes:
    """`loader`: variables of LOADER inside, without the others; None: the caller's stay."""
    fields = [enter.NEEDS_USER if has_user_namespace else enter.NO_USER]
    for name in LOADER if loader is not None else ():
        assert loader is not None
        fields.append(os.fsencode(f"{name}={loader[name]}" if name in loader else name))
    data = b"\0".join(fields)
    if 4 + len(data) > enter.MOST_FRAME_BYTES:
        raise StorageError("the variables of an image's loader are too long")
    return len(data).to_bytes(4, "little") + data


def _is_seen(path: str, place: tuple[int, int]) -> bool:
    """Whether a path of the node leads to the same here, and what is in it can be reached."""
    try:
        found = os.stat(path)
        if (found.st_dev, found.st_ino) != place:
            return False
        if stat.S_ISDIR(found.st_mode):
            # Links into the memory of another process (checkpoints) can be refused to us.
            with os.scandir(path) as entries:
                for entry, _ in zip(entries, range(MOST_LOOKED_AT), strict=False):
                    if entry.is_symlink():
                        os.stat(entry.path)
    except OSError:
        return False
    return True


def _let_go(streams: Sequence[int]) -> None:
    """Who reads or writes at their other ends sees an end although this process runs on."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in streams:
        os.dup2(null, fd)
    if null not in streams:
        os.close(null)
