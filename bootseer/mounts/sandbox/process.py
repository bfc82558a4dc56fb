"""The sandbox process, which keeps an image's root open for programs that enter it: `ImageSandbox` is its parent's
end.

It is a child that is forked before the parent has threads. It makes the root (root.py) and lives in it. It sends
descriptors of its namespaces to programs of this user that connect to its abstract socket (enter.py). So there is
no path that could be replaced, and no pid that could be reused. It ends with its parent; programs inside continue.

    in      {"do": "make", ...}  {"do": "look", "paths": [[path, device, inode]]}  {"do": "attach", "folder": path}
            {"do": "detach", "folder": path}
            {"do": "lay", ...}: no root of its own, directories over those of the node (layers.py)
    out     {"ok": {...}}  {"error": line, "kind": class}
"""

from __future__ import annotations

import array  # noqa: F401  (socket.send_fds imports it, when the node's files are gone already)
import os
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from bootseer.errors import BootseerError, StorageError, StorageTimeout
from bootseer.ipc.channel import Channel
from bootseer.ipc.replies import from_error, read_reply
from bootseer.ipc.unix_sockets import is_own
from bootseer.linux import mount as kernel
from bootseer.linux import namespaces
from bootseer.mounts.sandbox import enter
from bootseer.mounts.sandbox.binds import Bind
from bootseer.mounts.sandbox.environ import LOADER
from bootseer.mounts.sandbox.layers import Layer, LayersSpec, make_layers
from bootseer.mounts.sandbox.root import RootResult, RootSpec, find_program, make_root
from bootseer.mounts.tree_daemon.forked import close_others

MAX_MESSAGE_BYTES = 16 << 20
MAX_CHECKED_ENTRIES = 64  # entries of a directory
BACKLOG = 4096
GIVE_S = 5.0
ASK_S = 120.0  # an answer takes milliseconds, or as long as mounting a directory of the node
END_S = 5.0
_POLL_S = 0.002


class SandboxRoot(NamedTuple):
    """A root that programs can enter."""

    address: str  # of the abstract socket, for enter.py
    made: RootResult
    program: str  # the first existing one of those requested, "" if there is none


class ImageSandbox:
    """Parent's end of the sandbox process. Calls block for at most `ask_s`; `close` ends the process."""

    def __init__(self, *, ask_s: float = ASK_S) -> None:
        """Fork the process. Raises: StorageError."""
        self._ask_s = ask_s
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.pid = os.fork()
        except OSError as error:
            self._connection.close()
            theirs.close()
            raise StorageError(f"the image's sandbox process cannot be started: {error.strerror}") from error
        if self.pid == 0:
            _run_sandbox(theirs)
        theirs.close()
        self._connection.settimeout(ask_s)
        self._channel = Channel(self._connection)

    def make(
        self, spec: RootSpec, *, loader: Mapping[str, str], programs: Sequence[str] = (), path: str = ""
    ) -> SandboxRoot:
        """Make the root. Args: loader: variables of LOADER inside; programs, path: what to search for there.

        Raises: ConfigError, StorageError.
        """
        found = self._ask({
            "do": "make",
            "spec": [spec.lowers, spec.writable, spec.binds, spec.links, spec.users, spec.groups, spec.places],
            "loader": dict(loader),
            "programs": list(programs),
            "path": path,
        })  # fmt: skip
        made = RootResult(found["has_overlay"], found["has_user_namespace"], tuple(found["notes"]))
        return SandboxRoot(found["address"], made, found["program"])

    def lay(self, spec: LayersSpec) -> str:
        """Lay directories over directories of the node, for programs that enter; return the address for enter.py.

        Raises: ConfigError, StorageError.
        """
        address: str = self._ask({"do": "lay", "layers": spec.layers, "scratch": spec.scratch})["address"]
        return address

    def look(self, paths: Sequence[str]) -> list[str]:
        """Return the paths of the node that are not visible inside, or lead to another file there."""
        wanted = []
        for path in paths:
            found = os.stat(path)
            wanted.append((path, found.st_dev, found.st_ino))
        missing: list[str] = self._ask({"do": "look", "paths": wanted})["missing"]
        return missing

    def attach(self, directory: str, fd: int) -> None:
        """Attach the copy of a mount (namespaces.copy_mount) inside. Raises: StorageError, ConfigError."""
        self._ask({"do": "attach", "folder": directory}, fd)

    def detach(self, directory: str) -> None:
        """Detach the mount that was attached there, if any, which reveals what it covers. Raises: as `attach`."""
        self._ask({"do": "detach", "folder": directory})

    def is_over(self) -> bool:
        """Return whether its process has ended, for any reason."""
        try:
            if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
                self.pid = 0
        except ChildProcessError:
            self.pid = 0
        return not self.pid

    def close(self) -> None:
        """End it and wait for its end; kill it if necessary. One that is stuck in the kernel is left behind."""
        self._connection.close()
        if self.pid and not self._wait():
            os.kill(self.pid, signal.SIGKILL)  # it was not waited for, so the pid is its own
            self._wait()
        self.pid = 0

    def _wait(self) -> bool:
        """Return whether it has ended within END_S."""
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

    def _ask(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        self._channel.send(request, descriptors)
        try:
            found = self._channel.receive(self._ask_s)
        except TimeoutError as error:
            if not self.is_over():
                os.kill(self.pid, signal.SIGKILL)  # its late answer must not count for the next request
            raise StorageTimeout(
                f"the image's sandbox process has not answered for {self._ask_s:g} s:"
                " does a directory of this node hang (a network file system)?"
            ) from error
        if found is None:
            raise StorageError("the image's sandbox process has ended")
        return read_reply(found, "the image's sandbox process")


# ---- the process ---------------------------------------------------------------------------------------------


def _run_sandbox(connection: socket.socket) -> NoReturn:
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _close_streams((0, 1))
        close_others({0, 1, 2, connection.fileno()})
        _Process(connection).run()
        status = 0
    finally:
        os._exit(status)


class _Process:
    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection, max_bytes=MAX_MESSAGE_BYTES, takes_descriptors=True)
        self._listener: socket.socket | None = None
        self._frame = b""
        self._fds: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._attached: set[str] = set()  # directories: any other mounts there belong to the root

    def run(self) -> None:
        """Serve requests until the parent has ended."""
        self._selector.register(self._channel.fd, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._send_descriptors()
                elif not self._serve():
                    return

    def _serve(self) -> bool:
        """Answer the requests that have arrived; return False when the parent has ended."""
        requests = self._channel.receive_ready()
        for request in requests or ():
            try:
                self._channel.send({"ok": self._do(request)})
            except BootseerError as error:
                self._channel.send(from_error(error))
            except OSError as error:
                self._channel.send(from_error(StorageError(f"the image: {error}")))
        return requests is not None

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "make":
                return self._make(request)
            case "lay":
                layers = [Layer(*each) for each in request["layers"]]
                return {
                    "address": self._open_entrance(lambda: make_layers(LayersSpec(layers, request["scratch"])))[0]
                }
            case "look":
                return {"missing": [path for path, *place in request["paths"] if not _is_seen(path, tuple(place))]}
            case "attach":
                fd = self._channel.descriptors.pop(0)
                try:
                    self._detach(request["folder"])  # of an earlier attempt; its server has ended
                    namespaces.attach(fd, request["folder"])
                    self._attached.add(request["folder"])
                finally:
                    os.close(fd)
                return {}
            case "detach":
                self._detach(request["folder"])
                return {}
        raise StorageError(f"{request['do']} is not a known request")

    def _detach(self, directory: str) -> None:
        """Detach a directory; programs keep the files that they have open."""
        if directory in self._attached:
            kernel.unmount(directory, kernel.DETACH)
            self._attached.remove(directory)

    def _make(self, request: dict[str, Any]) -> dict[str, Any]:
        lowers, writable, binds, links, users, groups, places = request["spec"]
        spec = RootSpec(
            lowers,
            writable,
            [Bind(*each) for each in binds],
            [(text, target) for text, target in links],
            users,
            groups,
            places,
        )
        address, made = self._open_entrance(lambda: make_root(spec), request["loader"])
        program = find_program(request["programs"], request["path"])
        return {**made._asdict(), "address": address, "program": program}

    def _open_entrance(
        self, make: Callable[[], RootResult], loader: Mapping[str, str] | None = None
    ) -> tuple[str, RootResult]:
        """Move this process into the root that `make` makes, and let others in. Returns: the address for them."""
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
        _close_streams((2,))
        return address, made

    def _send_descriptors(self) -> None:
        """Send descriptors to one program that wants to enter."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection:
            try:
                if is_own(connection):
                    connection.settimeout(GIVE_S)
                    socket.send_fds(connection, [self._frame], self._fds)
            except OSError:
                pass  # it has ended


def _make_frame(has_user_namespace: bool, loader: Mapping[str, str] | None) -> bytes:
    """Return the message for enter.py. `loader`: variables of LOADER inside, others are unset; None: no change."""
    fields = [enter.NEEDS_USER if has_user_namespace else enter.NO_USER]
    for name in LOADER if loader is not None else ():
        assert loader is not None
        fields.append(os.fsencode(f"{name}={loader[name]}" if name in loader else name))
    data = b"\0".join(fields)
    if 4 + len(data) > enter.MAX_FRAME_BYTES:
        raise StorageError("the variables of an image's loader are too long")
    return len(data).to_bytes(4, "little") + data


def _is_seen(path: str, place: tuple[int, int]) -> bool:
    """Return whether a path of the node leads to the same file here, and its entries can be reached."""
    try:
        found = os.stat(path)
        if (found.st_dev, found.st_ino) != place:
            return False
        if stat.S_ISDIR(found.st_mode):
            # Links into the memory of another process (checkpoints) can be refused to this process.
            with os.scandir(path) as entries:
                for entry, _ in zip(entries, range(MAX_CHECKED_ENTRIES), strict=False):
                    if entry.is_symlink():
                        os.stat(entry.path)
    except OSError:
        return False
    return True


def _close_streams(streams: Sequence[int]) -> None:
    """Close standard streams, so that their other ends see an end while this process continues."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in streams:
        os.dup2(null, fd)
    if null not in streams:
        os.close(null)
