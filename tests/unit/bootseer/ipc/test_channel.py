"""Messages between processes: whole, in order, bounded; no end waits for ever for the other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, ConfigError, IntegrityError, StorageError
from bootseer.ipc import channel as module
from bootseer.ipc import unix_sockets
from bootseer.ipc.channel import Channel
from bootseer.ipc.client import Client, GoneError
from bootseer.ipc.framing import InvalidMessageError, LineBuffer, decode, encode
from bootseer.ipc.replies import from_error, read_reply, to_error

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.settimeout(20)
    channel = Channel(ours, max_bytes=1000)
    yield channel, theirs
    channel.close()
    theirs.close()


# ---- framing ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9)), max_size=9), st.lists(st.integers(1, 40))
)
def test_messages_are_the_same_however_they_are_cut(messages: list[dict[str, str]], cuts: list[int]) -> None:
    data, buffer, found = b"".join(map(encode, messages)), LineBuffer(10_000), []
    for count in [*cuts, len(data)]:
        found += buffer.feed(data[:count])
        data = data[count:]
    found += buffer.feed(data)
    assert [decode(line) for line in found] == messages


def test_a_line_may_have_as_many_bytes_as_were_agreed() -> None:
    assert LineBuffer(4).feed(b"1234\n56") == [b"1234"]
    buffer = LineBuffer(4)
    assert buffer.feed(b"123") == []
    with pytest.raises(InvalidMessageError, match="more than 4 bytes"):
        buffer.feed(b"45")


@pytest.mark.parametrize("line", [b"", b"nothing", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_a_line_that_is_no_message(line: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        decode(line)


# ---- a connection ----------------------------------------------------------------------------------------------


def test_messages_come_in_order_and_one_at_a_time(ends: Ends) -> None:
    channel, other = ends
    other.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
    assert channel.receive() == {"a": 1}
    other.sendall(b": 3}\n")
    assert channel.receive() == {"b": 2}
    assert channel.receive() == {"c": 3}
    other.close()
    assert channel.receive() is None
    assert channel.receive_ready() is None


def test_what_has_arrived_is_received_without_waiting(ends: Ends) -> None:
    channel, other = ends
    assert channel.receive_ready() == []
    other.sendall(b"{}\n{}\n{")
    assert channel.receive_ready() == [{}, {}]


def test_waiting_has_a_limit(ends: Ends) -> None:
    ends[1].sendall(b"{")
    with pytest.raises(TimeoutError):
        ends[0].receive(0.01)
    ends[1].sendall(b"}\n")
    assert ends[0].receive(20) == {}


@pytest.mark.parametrize("line", [b"nothing\n", b"[]\n", b"x" * 1001])
def test_an_invalid_message_ends_it(line: bytes, ends: Ends) -> None:
    ends[1].sendall(line)
    assert ends[0].receive(20) is None
    ends[1].sendall(b"{}\n")
    assert ends[0].receive(20) is None


def test_a_valid_message_before_an_invalid_one_of_the_same_read_ends_it_too(ends: Ends) -> None:
    ends[1].sendall(b"{}\nnothing\n")
    assert ends[0].receive(20) is None


def test_an_end_that_does_not_read_is_given_up() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(0.05)
        channel = Channel(ours)
        channel.send({"long": "x" * (8 << 20)})
        channel.send({"next": 1})
        assert channel.receive() is None
        data = bytearray()
        while chunk := theirs.recv(1 << 20):
            data += chunk
        assert data and b"next" not in data


def test_messages_of_several_threads_do_not_mix(ends: Ends) -> None:
    channel, other = ends
    threads = [threading.Thread(target=channel.send, args=({"text": str(each) * 500},)) for each in range(8)]
    for thread in threads:
        thread.start()
    buffer, found = LineBuffer(10_000), []
    while len(found) < 8:
        found += buffer.feed(other.recv(100))
    for thread in threads:
        thread.join()
    assert sorted(decode(line)["text"][0] for line in found) == list("01234567")


def test_descriptors_come_with_messages() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender, receiver = Channel(ours), Channel(theirs, takes_descriptors=True)
    reading, writing = os.pipe()
    sender.send({"do": "attach"}, [writing])
    os.close(writing)
    assert receiver.receive(20) == {"do": "attach"}
    (fd,) = receiver.descriptors
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    os.close(fd)
    assert os.read(reading, 2) == b"x"
    os.close(reading)
    assert receiver.receive_ready() == []
    for each in (sender, receiver):
        each.close()


def test_two_pipes_are_a_channel() -> None:
    there, here = os.pipe(), os.pipe()
    channel = Channel.of_streams(there[0], here[1])
    os.write(there[1], b"{}\n")
    assert channel.receive() == {}
    channel.send({"x": 1})
    assert os.read(here[0], 100) == b'{"x": 1}\n'
    channel.close()
    os.close(there[1])
    os.close(here[0])


@pytest.fixture
def pipes() -> Iterator[tuple[Channel, int]]:
    """A channel over pipes, and the end that reads what it sends."""
    there, here = os.pipe(), os.pipe()
    channel = Channel.of_streams(there[0], here[1])
    yield channel, here[0]
    channel.close()
    os.close(there[1])
    os.close(here[0])


def test_an_end_of_a_pipe_that_does_not_read_is_given_up(
    pipes: tuple[Channel, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEND_LIMIT_S", 0.02)
    thread = threading.Thread(target=pipes[0].send, args=({"long": "x" * (1 << 20)},), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    pipes[0].send({"next": 1})
    assert pipes[0].is_broken and pipes[0].receive() is None
    assert b"next" not in os.read(pipes[1], 1 << 20)


def test_a_long_message_goes_through_a_pipe(pipes: tuple[Channel, int]) -> None:
    thread = threading.Thread(target=pipes[0].send, args=({"long": "x" * (1 << 20)},))
    thread.start()
    buffer, found = LineBuffer(2 << 20), list[bytes]()
    while not found:
        found = buffer.feed(os.read(pipes[1], 1000))
    thread.join()
    assert decode(found[0]) == {"long": "x" * (1 << 20)}
    assert not pipes[0].is_broken


# ---- replies, and the other end --------------------------------------------------------------------------------


def test_a_reply_is_its_content_or_its_error() -> None:
    assert read_reply({"ok": {"a": 1}}, "x") == {"a": 1}
    with pytest.raises(ConfigError, match=r"^no such tree$"):
        read_reply(from_error(ConfigError("no such\n tree")), "x")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (IntegrityError("block 3 is damaged"), IntegrityError, ["block 3 is damaged"]),
        (
            FileNotFoundError(2, "No such file or directory", "/proc/self/mountinfo"),
            StorageError,
            ["/proc/self/mountinfo"],
        ),
        (OSError(28, "No space left on device", "/run/a", None, "/run/b"), StorageError, ["/run/a", "/run/b"]),
        (KeyError("name"), StorageError, ["internal error", "KeyError", "name"]),
    ],
)
def test_an_error_keeps_its_kind_and_what_it_names(
    error: Exception, kind: type[BootseerError], words: list[str]
) -> None:
    found = to_error(from_error(error), "the daemon")
    assert type(found) is kind
    assert all(each in str(found) for each in words), str(found)


@pytest.mark.parametrize("reply", [None, [], {}, {"ok": 1}, {"error": 1}])
def test_an_invalid_reply(reply: object) -> None:
    with pytest.raises(StorageError, match="x: the daemon's answer is invalid"):
        read_reply(reply, "x")


@pytest.mark.parametrize("kind", ["", "OSError", "annotations", "BaseException"])
def test_an_error_of_an_unknown_class_is_a_storage_error(kind: str) -> None:
    with pytest.raises(StorageError, match=r"^text$"):
        read_reply({"error": "text", "kind": kind}, "x")


def test_the_kernel_names_the_other_end(ends: Ends) -> None:
    assert unix_sockets.peer_of(ends[1]) == (os.getpid(), os.geteuid())
    assert unix_sockets.is_own(ends[1])
    assert unix_sockets.is_own_or_root(unix_sockets.Peer(1, 0))
    assert not unix_sockets.is_own_or_root(unix_sockets.Peer(1, os.geteuid() + 1))


def test_an_invalid_answer_is_not_the_end_of_a_server() -> None:
    """A server that has ended is replaced; one that answers nonsense is not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, Client(ours, "x") as client:
        theirs.sendall(b"nonsense\n")
        with pytest.raises(StorageError, match="x: the daemon's answer is invalid") as raised:
            client.ask("status")
    assert not isinstance(raised.value, GoneError)
