"""A device shown as a file: exact bytes whatever it does, and errors, never zeros, at any end of its server."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.logs import sent_to
from bootseer.mounts.device import fuse_wire as wire
from bootseer.mounts.device.file import FlatFile
from bootseer.mounts.device.metadata_memory import MetadataMemory
from bootseer.mounts.device.server import FILE, Done, Server, SharedDescriptor
from tests.integration import flat_stack
from tests.integration.flat_stack import TOP, Stack, wait_until_blocked, wait_until_far
from tests.support import wait_until

stack, data = flat_stack.stack, flat_stack.data

# What programs see when the server is gone or fails.
GONE = {"ENOTCONN", "ECONNABORTED", "EIO", "SIGBUS", "ENODEV"}
HOW = ("direct", "buffered", "mapped")


class Memory:
    """A device in memory; what is `missing` is answered later, by the test."""

    def __init__(self, data: bytes, *, is_missing: bool = False) -> None:
        self.data, self.size, self.is_missing = data, len(data), is_missing
        self.asked: list[tuple[int, int, Done]] = []

    def try_read(self, offset: int, target: memoryview) -> bool:
        if self.is_missing:
            return False
        target[:] = self.data[offset : offset + len(target)]
        return True

    def read_later(self, offset: int, length: int, done: Done) -> None:
        self.asked.append((offset, length, done))


# ---- through the kernel --------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("behaviour", [["here"], ["here", "late"], ["late"], ["here", "late", "twice"]])
def test_exact_bytes_for_several_programs(stack: Stack, behaviour: list[str]) -> None:
    server = stack.serve(*behaviour)
    readers = [stack.read(server.path, how, seed=seed) for seed, how in enumerate(HOW * 2)]
    assert [reader.end() for reader in readers] == ["OK"] * 6
    seen = server.end()
    assert seen["errors"] == seen["waiting"] == 0
    assert seen["requests"] > 600 and seen["bytes"] > 20 << 20
    assert (seen["late"] > 0) == ("late" in behaviour) and (seen["late"] < seen["requests"]) == (
        "here" in behaviour
    )


@pytest.mark.system
def test_large_reads_arrive_whole(stack: Stack) -> None:
    server = stack.serve()
    fd = os.open(server.path, os.O_RDONLY | os.O_DIRECT)
    try:
        subprocess.run(
            ["dd", "iflag=direct", "bs=1M", "status=none", f"if={server.path}", "of=/dev/null"], check=True
        )
    finally:
        os.close(fd)
    assert server.end()["requests"] == flat_stack.DATA_BYTES >> 20


@pytest.mark.system
def test_what_is_shown(stack: Stack) -> None:
    server = stack.serve(metadata=stack.metadata())
    assert sorted(os.listdir(server.folder)) == ["device", "metadata"]
    for path, original in ((server.path, stack.data), (server.metadata_path, Path(stack.metadata()))):
        seen = os.stat(path)
        assert (seen.st_size, seen.st_uid, seen.st_nlink) == (original.stat().st_size, os.getuid(), 1)
        assert stat.S_ISREG(seen.st_mode) and stat.S_IMODE(seen.st_mode) == 0o400
        assert Path(path).read_bytes() == original.read_bytes()
    assert stat.S_IMODE(os.stat(server.folder).st_mode) == 0o500
    assert os.statvfs(server.folder).f_files == 2
    with pytest.raises(FileNotFoundError):
        os.stat(server.path + "s")
    for change in (
        lambda: os.unlink(server.path),
        lambda: os.truncate(server.path, 1),
        lambda: os.mkdir(server.path + "s"),
    ):
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError) as caught:
        os.getxattr(server.path, "user.x")
    assert caught.value.errno == errno.ENOTSUP
    [found] = kernel.mounts_below(server.folder)
    assert set(found.options.split(",")) >= {"ro", "nosuid", "nodev", "noexec", "noatime"}
    assert (found.fstype, found.minor) == ("fuse.bootseer", server.connection)
    server.end()


@pytest.mark.system
@pytest.mark.parametrize("fault", ["none", "short", "long", "raise", "raise-later"])
@pytest.mark.parametrize("how", HOW)
def test_a_device_that_fails_gives_errors(stack: Stack, fault: str, how: str) -> None:
    server = stack.serve(fault)
    assert stack.read(server.path, how).end() in ("EIO", "SIGBUS")
    seen = server.end()
    assert seen["errors"] > 0 and seen["bytes"] == 0
    assert ("bug" in server.program.stderr) == ("raise" in fault)


@pytest.mark.system
def test_a_device_that_fails_now_and_then_gives_no_wrong_bytes(stack: Stack) -> None:
    server = stack.serve("here", "here", "here", "late", "none", "short", "raise")
    ends = {stack.read(server.path, how, seed=seed).end() for seed in range(4) for how in HOW}
    assert ends <= {"EIO", "SIGBUS", "OK"} and "EIO" in ends
    server.end()


@pytest.mark.system
@pytest.mark.parametrize("how", HOW)
def test_stop_ends_readers_that_wait_for_ever(stack: Stack, how: str) -> None:
    server = stack.serve("never")
    readers = [stack.read(server.path, how, seed=seed) for seed in range(3)]
    wait_until(lambda: all(reader.lines for reader in readers), what="they read")
    seen = server.end(10)
    assert seen["stop_s"] < 3
    assert {reader.end(5) for reader in readers} <= GONE
    assert not os.listdir(server.folder)


@pytest.mark.system
@pytest.mark.parametrize("how", ["buffered", "mapped"])
def test_a_reader_can_be_killed_while_it_waits(stack: Stack, how: str) -> None:
    """Not one that reads directly: the kernel waits for the device's deadline then."""
    server = stack.serve("never")
    reader = stack.read(server.path, how)
    wait_until(lambda: reader.lines, what="it reads")
    wait_until_blocked(reader)
    reader.program.signal(signal.SIGKILL)
    assert reader.end(5) == "SIGKILL"
    server.end()


@pytest.mark.system
def test_killed_at_random_moments(stack: Stack) -> None:
    """Whatever a reader was at, it ends, with right bytes until then; the mount can be taken away."""
    pick = random.Random(7)
    for _ in range(6):
        server = stack.serve("here", "late")
        readers = [stack.read(server.path, how, seed=pick.randrange(99), most=1_000_000) for how in HOW]
        wait_until_far(readers, pick.randrange(2, 12))
        server.kill()
        assert {reader.end(10) for reader in readers} <= GONE
        assert kernel.clear(server.folder) == 1
        assert os.listdir(server.folder) == []


@pytest.mark.system
@pytest.mark.parametrize("behaviour", ["here", "never"])
def test_a_stopped_server_is_ended_from_outside(stack: Stack, behaviour: str) -> None:
    server = stack.serve(behaviour)
    readers = [stack.read(server.path, how, most=1_000_000) for how in HOW]
    wait_until(lambda: all(reader.lines for reader in readers), what="they read")
    server.program.signal(signal.SIGSTOP)
    for reader in readers:
        wait_until_blocked(reader)
    assert kernel.clear(server.folder) == 1
    assert {reader.end(10) for reader in readers} <= GONE
    server.program.signal(signal.SIGCONT)
    server.end()


@pytest.mark.system
def test_abort_by_the_number_of_the_connection(stack: Stack) -> None:
    with _fusectl():
        server = stack.serve("never")
        reader = stack.read(server.path)
        wait_until(lambda: reader.lines, what="it reads")
        server.program.signal(signal.SIGSTOP)
        assert kernel.abort(server.connection)
        assert reader.end(10) in GONE
        server.program.signal(signal.SIGCONT)
        server.end()


def test_abort_of_a_number_that_nobody_has() -> None:
    assert not kernel.abort(1 << 20)  # more than a minor can be


@pytest.mark.system
def test_a_number_is_not_used_after_its_connection(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next FUSE mount of the machine gets it: whoever aborted it would end somebody else's."""
    aborted: list[int] = []
    monkeypatch.setattr(kernel, "abort", aborted.append)
    flat = FlatFile(stack.folder())
    flat.start(Memory(bytes(4096)))
    flat.abort()
    assert aborted == [flat.connection]
    kernel.unmount(flat.folder)
    flat.abort()
    flat.stop()
    flat.abort()
    assert aborted == [flat.connection]


@pytest.mark.system
def test_a_fork_does_not_keep_the_connection(stack: Stack) -> None:
    server = stack.serve("here", is_forking=True)
    reader = stack.read(server.path, most=1_000_000)
    wait_until(lambda: reader.lines > 3, what="it reads")
    server.kill()
    try:
        assert reader.end(10) in GONE
    finally:
        os.kill(server.child, signal.SIGKILL)
    assert kernel.clear(server.folder) == 1


# ---- in this process -----------------------------------------------------------------------------------------


@pytest.mark.system
def test_states(stack: Stack) -> None:
    device = Memory(random.Random(3).randbytes(1 << 20))
    flat = FlatFile(stack.folder())
    flat.stop()
    assert not flat.is_serving()
    flat.start(device)
    assert flat.is_serving() and Path(flat.path).read_bytes() == device.data
    flat.stop()
    assert flat.statistics().bytes == 1 << 20
    flat.stop()
    assert not flat.is_serving() and os.listdir(flat.folder) == []


@pytest.mark.system
def test_unmounted_from_outside(stack: Stack) -> None:
    flat = FlatFile(stack.folder())
    flat.start(Memory(bytes(4096)))
    assert kernel.clear(flat.folder) == 1
    wait_until(lambda: not flat.is_serving(), what="its threads end")
    flat.stop()


@pytest.mark.system
def test_stops_below_another_mount(stack: Stack) -> None:
    """What is still in use is taken out of sight; its user gets errors."""
    flat = FlatFile(stack.folder())
    flat.start(Memory(b"x" * 8192))
    fd = os.open(flat.path, os.O_RDONLY)
    try:
        flat.stop()
        assert os.listdir(flat.folder) == []
        with pytest.raises(OSError):
            os.pread(fd, 4096, 0)
    finally:
        close(fd)


@pytest.mark.system
def test_late_answers_after_the_end_go_nowhere(stack: Stack) -> None:
    device = Memory(b"x" * 4096, is_missing=True)
    flat = FlatFile(stack.folder())
    flat.start(device)
    ends: list[int] = []

    def read() -> None:
        fd = os.open(flat.path, os.O_RDONLY)
        try:
            os.pread(fd, 4096, 0)
        except OSError as caught:
            ends.append(caught.errno or 0)
        finally:
            close(fd)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: device.asked and flat.statistics().waiting, what="it reads")
    flat.stop()
    reader.join(5)
    assert ends and errno.errorcode[ends[0]] in GONE
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]  # some have the numbers of what was closed
    for _, length, done in device.asked:
        done(bytes(length))
    for fd in taken:
        os.close(fd)
    assert flat.statistics().requests == 0


@pytest.mark.system
def test_what_cannot_be_mounted(stack: Stack) -> None:
    for directory, why in (
        (os.path.join(stack.top, "none"), "does not exist"),
        (str(stack.data), "not a directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            FlatFile(directory).start(Memory(b""))
    code = (
        "import os, sys; from tests.integration.test_flat_file import *\n"
        "import bootseer.mounts.log; os.setuid(65534)\n"
        "try: FlatFile(sys.argv[1]).start(Memory(b''))\n"
        "except BootseerError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code, stack.folder()], cwd=TOP, capture_output=True, text=True)
    assert "permission denied" in run.stdout or "CAP_SYS_ADMIN" in run.stdout, run.stderr
    assert run.stdout.count("\n") == 1


@pytest.mark.system
def test_unmount_tells_what_hinders(stack: Stack) -> None:
    directory = stack.folder()
    assert not kernel.unmount(directory)
    assert not kernel.unmount(directory + "/none")
    kernel.mount("tmpfs", directory, "tmpfs", kernel.NODEV)
    with open(f"{directory}/open", "wb"), pytest.raises(StorageError, match="is in use"):
        kernel.unmount(directory)
    assert kernel.unmount(directory)
    with pytest.raises(ConfigError, match="modprobe nonsense"):
        kernel.mount("x", directory, "nonsense", 0)
    with pytest.raises(StorageError, match="tmpfs of x could not be mounted: invalid argument"):
        kernel.mount("x", directory, "tmpfs", 0, "nonsense=1")
    assert kernel.try_mount("x", directory, "tmpfs", 0, "x" * 5000) == errno.E2BIG


@pytest.mark.system
def test_mounts_below_in_the_order_of_their_end(stack: Stack) -> None:
    top = stack.folder("a folder\twith\\odd\nname ")
    os.mkdir(f"{top}/in")
    kernel.mount("tmpfs", f"{top}/in", "tmpfs", 0)
    for name in ("b", "b/c", "a"):
        os.mkdir(f"{top}/in/{name}")
        kernel.mount(name, f"{top}/in/{name}", "tmpfs", 0)
    kernel.mount("above", f"{top}/in/a", "tmpfs", 0)
    found = [each.source for each in kernel.mounts_below(top)]
    assert sorted(found) == ["a", "above", "b", "b/c", "tmpfs"]
    assert found.index("above") < found.index("a") and found.index("b/c") < found.index("b")
    assert found[-1] == "tmpfs"
    assert [each.source for each in kernel.mounts_below(f"{top}/")] == found
    os.symlink(top, f"{stack.top}/link")
    assert [each.source for each in kernel.mounts_below(f"{stack.top}/link/in")] == found
    assert len(kernel.mounts_below("/")) == len(kernel.mounts())
    assert kernel.mounts_below(f"{top}/i") == []
    assert kernel.clear(top) == 5 and os.listdir(f"{top}/in") == []


def test_the_list_of_mounts() -> None:
    text = (
        rb"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:2 - ext3 /dev/ro\134ot rw,errors=continue" + b"\n"
        rb"38 36 0:52 / /mnt\0402/x ro - fuse.bootseer  rw,user_id=0" + b"\nnonsense\n1 2 x:y / / rw - a b c\n\n"
    )
    first, second = kernel.parse_mounts(text)
    assert first == (36, 35, 98, 0, "/mnt1", "/mnt 2", "rw,noatime", "ext3", "/dev/ro\\ot")
    assert second == (38, 36, 0, 52, "/", "/mnt 2/x", "ro", "fuse.bootseer", "")
    later = second._replace(number=30, target="/mnt 2/w", parent=36)
    on_first = later._replace(number=29, target="/mnt 2/x/y", parent=38)
    assert kernel.below([on_first, first, second, later], "/mnt 2") == [later, on_first, second, first]
    assert kernel.below([first, second], "/mnt") == []
    assert kernel.is_fuse(second) and not kernel.is_fuse(first)
    assert kernel.mounts() and kernel.mounts()[0].target.startswith("/")


# ---- the protocol, without the kernel ------------------------------------------------------------------------


class Wire:
    """A server at one end of a socket that keeps messages apart, as /dev/fuse does."""

    def __init__(self, device: Memory, metadata: bytes = b"") -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.lines: list[str] = []
        self._stack = ExitStack()
        self._stack.enter_context(sent_to(self.lines.append))
        link = SharedDescriptor(theirs.detach())
        self.metadata = MetadataMemory(metadata) if metadata else None
        self.server = Server(link, device, self.metadata)
        self._link = link
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def ask(self, opcode: int, body: bytes = b"", *, node: int = 1, unique: int = 7) -> tuple[int, bytes]:
        """Number of the error and payload."""
        self.ours.send(request(opcode, body, node=node, unique=unique))
        return self.answer(unique)

    def answer(self, unique: int) -> tuple[int, bytes]:
        reply = self.ours.recv(2 << 20)
        length, number, answered = wire.REPLY.unpack_from(reply)
        assert (length, answered) == (len(reply), unique)
        return -number, reply[wire.REPLY.size :]

    def close(self) -> None:
        self.ours.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.server.forget()
        self._link.let_go()
        self._stack.close()


@pytest.fixture
def served() -> Iterator[Wire]:
    made = Wire(Memory(bytes(range(256)) * 64), b"metadata" * 1000)
    yield made
    made.close()


def request(opcode: int, body: bytes = b"", *, node: int = 1, unique: int = 7, length: int | None = None) -> bytes:
    return wire.HEAD.pack(40 + len(body) if length is None else length, opcode, unique, node) + body


def read_body(offset: int, size: int) -> bytes:
    return struct.pack("<QQIIQII", 0, offset, size, 0, 0, 0, 0)


def test_records_have_the_sizes_of_the_kernel() -> None:
    answer = wire.greet(wire.Greeting(7, 45, 1 << 17, 0xFFFFFFFF))
    assert len(answer) == 64
    assert struct.unpack_from("<IIII", answer) == (7, 31, 1 << 17, wire.NEEDED | wire.PARALLEL_DIRECTORIES)
    assert (wire.HEAD.size, wire.READ_REQUEST.size, wire.REPLY.size) == (40, 80, 16)


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (wire.Greeting(7, 31, 0, wire.NEEDED), ""),
        (wire.Greeting(7, 45, 0, 0xFFFFFFFF), ""),
        (wire.Greeting(7, 30, 0, wire.NEEDED), "7.30"),
        (wire.Greeting(8, 1, 0, wire.NEEDED), "8.1"),
        (wire.Greeting(7, 40, 0, wire.NEEDED & ~wire.ASYNC_DIRECT), "asynchronous"),
        (wire.Greeting(7, 40, 0, wire.NEEDED & ~wire.MAX_PAGES), "many pages"),
    ],
)
def test_kernels_that_are_refused(greeting: wire.Greeting, why: str) -> None:
    assert why in wire.why_refused(greeting) and bool(why) == bool(wire.why_refused(greeting))


def test_greeting_is_read() -> None:
    body = struct.pack("<IIII", 7, 45, 1 << 17, 5) + bytes(48)
    assert wire.read_greeting(request(wire.INIT, body, unique=3)) == (3, (7, 45, 1 << 17, 5))
    for wrong in (b"", request(wire.INIT), request(wire.READ, body), request(wire.INIT, body, length=9)):
        assert wire.read_greeting(wrong) is None


def test_answers(served: Wire) -> None:
    number, entry = served.ask(wire.LOOKUP, b"device\0")
    assert number == 0 and len(entry) == 128 and struct.unpack_from("<Q", entry)[0] == FILE
    assert served.ask(wire.LOOKUP, b"metadata\0")[1][:8] == struct.pack("<Q", FILE + 1)
    for body, node in ((b"devic\0", 1), (b"device", 1), (b"", 1), (b"device\0", 2)):
        assert served.ask(wire.LOOKUP, body, node=node) == (errno.ENOENT, b"")
    assert len(served.ask(wire.GETATTR)[1]) == len(served.ask(wire.GETATTR, node=FILE)[1]) == 104
    assert served.ask(wire.GETATTR, node=9)[0] == errno.ENOENT
    assert len(served.ask(wire.STATFS)[1]) == 80
    assert len(served.ask(wire.OPEN, bytes(8), node=FILE)[1]) == 16
    assert served.ask(wire.OPEN, struct.pack("<II", os.O_RDWR, 0), node=FILE)[0] == errno.EROFS
    assert served.ask(wire.OPEN, b"", node=FILE)[0] == served.ask(wire.OPEN, bytes(8), node=9)[0] == errno.ENOENT
    for opcode in (wire.RELEASE, wire.RELEASEDIR, wire.DESTROY):
        assert served.ask(opcode, bytes(24)) == (0, b"")
    for opcode in (25, 34, 20, 22, 39, 45, 4999):  # flush, access, fsync ... and one that is none
        assert served.ask(opcode, bytes(24)) == (errno.ENOSYS, b"")


def test_listing_in_pieces(served: Wire) -> None:
    names, offset = [], 0
    while True:
        _, listed = served.ask(wire.READDIR, read_body(offset, 40))
        if not listed:
            break
        _, offset, length, _ = struct.unpack_from("<QQII", listed)
        names.append(listed[24 : 24 + length])
    assert names == [b".", b"..", b"device", b"metadata"]
    assert served.ask(wire.READDIR, read_body(1 << 40, 4096)) == (0, b"")
    assert served.ask(wire.READDIR, read_body(0, 4096), node=FILE)[0] == errno.ENOTDIR


def test_reads(served: Wire) -> None:
    whole = bytes(range(256)) * 64
    assert served.ask(wire.READ, read_body(4096, 8192), node=FILE) == (0, whole[4096:12288])
    assert served.ask(wire.READ, read_body(len(whole), 4096), node=FILE) == (0, b"")
    assert served.ask(wire.READ, read_body(1 << 62, 4096), node=FILE) == (0, b"")
    assert served.ask(wire.READ, read_body(8, 8), node=FILE + 1) == (0, b"metadata")
    assert served.ask(wire.READ, read_body(7996, 4096), node=FILE + 1) == (0, b"data")
    for body, node in ((read_body(0, 4096), 9), (b"", FILE), (read_body(0, 4096) + b"x", FILE)):
        assert served.ask(wire.READ, body, node=node) == (errno.EIO, b"")
    assert served.ask(wire.READ, read_body(0, 2 << 20), node=FILE + 1) == (errno.EIO, b"")


def test_metadata_that_is_not_there_yet_is_waited_for() -> None:
    """Not the others: who asks for what is there gets it meanwhile."""
    served = Wire(Memory(b"d" * 16384), b"m" * 12288)
    assert isinstance(served.metadata, MetadataMemory)
    growing = served.metadata
    growing._ready_bytes = 4096
    try:
        served.ours.send(request(wire.READ, read_body(4096, 4096), node=FILE + 1, unique=8))
        served.ours.send(request(wire.READ, read_body(8192, 8192), node=FILE + 1, unique=9))
        assert served.ask(wire.READ, read_body(0, 4096), node=FILE + 1) == (0, b"m" * 4096)
        assert served.ask(wire.READ, read_body(0, 4096), node=FILE) == (0, b"d" * 4096)
        growing.complete(12288)
        assert [served.answer(8), served.answer(9)] == [(0, b"m" * 4096)] * 2
        growing._ready_bytes = 4096
        growing.fail()
        assert served.ask(wire.READ, read_body(4096, 4096), node=FILE + 1) == (errno.EIO, b"")
        wanted = (1, 0, 4096, 1)  # of late answers only errors count; what is answered is counted afterwards

        def counted() -> bool:
            found = served.server.statistics()
            return (found.requests, found.late, found.bytes, found.errors) == wanted

        wait_until(counted, 10, f"counts of {wanted}")
    finally:
        served.close()


def test_a_link_is_closed_by_its_last_user() -> None:
    """Else an answer that comes late would be written into whatever file has its number by then."""
    reading, writing = os.pipe()
    link = SharedDescriptor(writing)
    assert link.hold() and link.hold()
    link.let_go()
    link.let_go()
    os.write(link.fd, b"x")
    link.let_go()
    assert os.read(reading, 2) == b"x" and os.read(reading, 2) == b""
    assert not link.hold()
    os.close(reading)


def test_late_answers_and_interrupts() -> None:
    served = Wire(Memory(b"x" * 8192, is_missing=True))
    try:
        device = served.server._device
        assert isinstance(device, Memory)
        for unique in (1, 2, 3, 4):
            served.ours.send(request(wire.READ, read_body(0, 4096), node=FILE, unique=unique))
        wait_until(lambda: len(device.asked) == 4)
        served.ours.send(request(wire.INTERRUPT, struct.pack("<Q", 2), unique=3))
        assert served.answer(2) == (errno.EINTR, b"")
        for number, answer in (
            (1, memoryview(b"y" * 4096)),
            (2, b"late"),
            (0, b"z" * 4096),
            (0, b"again"),
            (3, None),
        ):
            device.asked[number - 1 if number else 0][2](answer)
        # In the order of the calls: the second of a request, and that of an interrupted one, go nowhere.
        assert served.answer(1) == (0, b"y" * 4096)
        assert served.answer(3) == (errno.EIO, b"")
        wanted = (1, 1, 4096, 2, 1, 4096)
        wait_until(lambda: served.server.statistics() == wanted, 10, f"counts of {wanted}")
        device.asked[3][2](b"short")
        assert served.answer(4) == (errno.EIO, b"")
        assert "gave 5 bytes" in served.lines[-1]
        served.ours.send(request(wire.INTERRUPT, struct.pack("<Q", 99), unique=5))
        served.ours.send(request(wire.FORGET, bytes(8), unique=6))
        assert served.ask(wire.STATFS, unique=8)[0] == 0
    finally:
        served.close()


@settings(max_examples=300, deadline=None)
@given(
    garbage=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=200),
            st.builds(
                request,
                st.one_of(st.integers(0, 60), st.integers(0, (1 << 32) - 1)),
                st.binary(max_size=120),
                node=st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1)),
                unique=st.integers(10, (1 << 64) - 1),
                length=st.one_of(st.none(), st.integers(0, (1 << 32) - 1)),
            ),
            st.builds(
                lambda offset, size, node: request(wire.READ, read_body(offset, size), node=node),
                st.integers(0, (1 << 64) - 1),
                st.integers(0, (1 << 32) - 1),
                st.integers(0, 4),
            ),
        ),
        max_size=12,
    )
)
def test_no_request_ends_it(garbage: list[bytes]) -> None:
    """And each gets one answer at most."""
    made = Wire(Memory(b"d" * 16384), b"metadata")
    try:
        for each in garbage:
            made.ours.send(each)
        made.ours.send(request(wire.READ, read_body(4096, 4096), node=FILE, unique=3))
        answers = []
        while not answers or wire.REPLY.unpack_from(answers[-1])[2] != 3:
            answers.append(made.ours.recv(2 << 20))
            assert wire.REPLY.unpack_from(answers[-1])[0] == len(answers[-1])
        assert len(answers) <= len(garbage) + 1
        assert answers[-1][wire.REPLY.size :] == b"d" * 4096
        assert not made.lines
    finally:
        made.close()


# ---- inner parts ---------------------------------------------------------------------------------------------


def close(fd: int) -> None:
    """Closing tells the server, and fails without one."""
    with suppress(OSError):
        os.close(fd)


@contextmanager
def _fusectl() -> Iterator[None]:
    """The file system of FUSE's connections, where containers have none."""
    is_there = any(each.target == kernel.CONNECTIONS for each in kernel.mounts())
    if not is_there:
        try:
            kernel.mount("fusectl", kernel.CONNECTIONS, "fusectl", 0)
        except BootseerError as error:
            pytest.skip(str(error))
    try:
        yield
    finally:
        if not is_there:
            kernel.unmount(kernel.CONNECTIONS)
