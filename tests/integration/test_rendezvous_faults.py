"""A coordinator's port and what comes to it: garbage, slow ones, wrong secrets, wrong versions, silence."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from launcher.coordinator import server as coordinator
from launcher.coordinator.server import Limits
from launcher.rendezvous.messages import Environment, Join, Ping, Refused, Welcome, World
from launcher.rendezvous.wire import MAGIC, PROTOCOL, Established, Reply, Wire
from tests import support
from tests.integration.rendezvous_parts import SECRET, Bed, Node, Server, make_join, raw, settings

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.close()


def read_all(bed: Bed, sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    sock.setblocking(False)
    data = bytearray()

    def ended() -> bool:
        try:
            piece = sock.recv(65536)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        data.extend(piece)
        return not piece

    bed.until(ended)
    return bytes(data)


def join_by_hand(bed: Bed, sock: socket.socket, secret: bytes | None = SECRET, join: Join | None = None) -> Wire:
    """The member's side of a handshake on a plain socket; then its Join, if one is given."""
    wire = Wire(False, secret, "1.0", os.urandom(32))
    sock.sendall(wire.greeting())
    sock.setblocking(False)
    events: list[object] = []

    def step() -> bool:
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return False
        for event in wire.receive(data) if data else wire.end():
            events.append(event)
            if isinstance(event, Reply):
                sock.sendall(event.data)
        return not data or Established() in events

    bed.until(step)
    assert wire.is_open, events
    if join is not None:
        sock.sendall(wire.pack(join))
    return wire


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), "TLS"),
        (os.urandom(3).hex().encode() * 2000, "does not speak"),
        (MAGIC + b"\x00\x09\x032.5 and all that", "bootseer 2.5 (protocol 9)"),
        (MAGIC + b"\x00\x01\xff", "impossible length"),
    ],
)
def test_strangers_are_named_and_the_job_starts_all_the_same(bed: Bed, data: bytes, words: str) -> None:
    server = Server(bed)
    with raw(server.port, data) as sock:
        read_all(bed, sock)
        assert words in bed.lines[0] and "127.0.0.1" in bed.lines[0]
        assert server.count("strange") == 1
        nodes = [Node(bed, settings(server.port, is_host=False), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))


def test_many_strangers_are_one_line(bed: Bed) -> None:
    server = Server(bed)
    for _ in range(20):
        with raw(server.port, b"GET / HTTP/1.1\r\n\r\n") as sock:
            read_all(bed, sock)
    assert server.count("strange") == 20
    assert len(bed.lines) == 1


def test_a_probe_that_closes_at_once_is_not_worth_a_line(bed: Bed) -> None:
    server = Server(bed)
    with raw(server.port):
        bed.until(lambda: server.count("accepted") == 1)
    bed.until(lambda: server.count("pending") == 0)
    assert bed.lines == [] and server.count("strange") == 0


def test_a_slow_hello_has_its_time_and_no_more(bed: Bed) -> None:
    server = Server(bed, limits=Limits(hello_s=0.4, goodbye_s=0.4))
    with raw(server.port, MAGIC) as sock:
        bed.until(lambda: server.count("accepted") == 1)
        for byte in b"\x00\x01\x031.0":  # a byte now and then does not buy more time
            bed.run_for(0.1)
            sock.send(bytes([byte]))
        read_all(bed, sock)
        bed.until(lambda: server.count("ending") == 0)
    assert "did not join within 0.4 s" in bed.lines[0]


def test_without_a_join_there_is_no_place(bed: Bed) -> None:
    server = Server(bed, limits=Limits(hello_s=0.5, goodbye_s=0.4))
    with raw(server.port) as sock:
        join_by_hand(bed, sock)
        read_all(bed, sock)
        assert server.count("members") == 0
    with raw(server.port) as sock:
        wire = join_by_hand(bed, sock)
        sock.sendall(wire.pack(Ping(1)))
        read_all(bed, sock)
    assert server.count("members") == 0 and server.count("strange") == 2


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_huge_length_is_refused_at_once(bed: Bed, secret: bytes | None) -> None:
    server = Server(bed, secret=secret)
    with raw(server.port) as sock:
        join_by_hand(bed, sock, secret)
        sock.sendall(struct.pack(">IB", 2**31, 1))
        read_all(bed, sock)
    assert "Join message of 2147483648 bytes" in bed.lines[0]


def test_only_who_was_asked_may_send_an_environment(bed: Bed) -> None:
    from launcher.rendezvous.messages import Distributions

    server = Server(bed)
    with raw(server.port) as sock:
        wire = join_by_hand(bed, sock, join=make_join(1))
        bed.until(lambda: server.count("members") == 1)
        sock.sendall(wire.pack(Environment(Distributions("3.11", ("a==1",)))))
        bed.until(lambda: server.count("members") == 0)
    assert server.count("ended") == 1


def test_a_second_join_ends_it(bed: Bed) -> None:
    server = Server(bed, nodes=3)
    with raw(server.port) as sock:
        wire = join_by_hand(bed, sock, join=make_join(1, 3))
        sock.sendall(wire.pack(make_join(2, 3)))
        bed.until(lambda: server.count("ended") == 1)


def test_another_secret_is_refused_in_words(bed: Bed) -> None:
    server = Server(bed)
    node = Node(bed, settings(server.port, is_host=False, secret=b"another secret, as long"), make_join(1))
    bed.until(lambda: node.lost)
    assert f"cannot join the job at 127.0.0.1:{server.port}" in node.lost[0]
    assert "another secret than this node" in node.lost[0] and "BOOTSEER_SECRET_FILE" in node.lost[0]
    assert "another secret" in bed.lines[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "told", "said"),
    [
        (SECRET, None, "has a secret, this node has none", "has no secret, this node has one"),
        (None, SECRET, "has no secret, this node has one", "has a secret, this node has none"),
    ],
)
def test_a_secret_on_one_side_only(
    bed: Bed, ours: bytes | None, theirs: bytes | None, told: str, said: str
) -> None:
    server = Server(bed, secret=ours)
    node = Node(bed, settings(server.port, is_host=False, secret=theirs), make_join(1))
    bed.until(lambda: node.lost and bed.lines)
    assert told in node.lost[0]
    assert said in bed.lines[0]


def test_another_version_is_named_on_both_sides(bed: Bed) -> None:
    server = Server(bed)
    with raw(server.port, MAGIC + (PROTOCOL + 1).to_bytes(2, "big") + b"\x039.9" + bytes(33)) as sock:
        answer = read_all(bed, sock)
    assert answer == MAGIC + PROTOCOL.to_bytes(2, "big") + b"\x031.0"
    assert f"bootseer 9.9 (protocol {PROTOCOL + 1})" in bed.lines[0]
    assert f"1.0 (protocol {PROTOCOL})" in bed.lines[0]


def test_a_node_of_another_version_names_the_coordinators(bed: Bed, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as future:
        node = Node(bed, settings(free_port, is_host=False), make_join(1))
        future.setblocking(False)
        bed.until(lambda: node.member._connection)
        bed.run_for(0.1)
        with future.accept()[0] as sock:
            sock.sendall(MAGIC + (PROTOCOL + 1).to_bytes(2, "big") + b"\x039.9" + bytes(33))
            bed.until(lambda: node.lost)
    assert f"the coordinator runs bootseer 9.9 (protocol {PROTOCOL + 1}), this node" in node.lost[0]


def test_a_node_that_falls_silent_is_lost_within_the_limit(bed: Bed) -> None:
    server = Server(bed, limits=Limits(heartbeat_s=1.0, goodbye_s=0.5), least=1, max_restarts=0, last_call_s=30.0)
    node = Node(bed, settings(server.port, is_host=False, keep_alive_interval_s=0.2), make_join(1, 2, least=1))
    bed.until(lambda: node.last(Welcome))
    with raw(server.port) as sock:
        join_by_hand(bed, sock, join=make_join(2, 2, least=1))
        bed.until(lambda: node.last(World))
        began_s = bed.loop.time()
        bed.until(lambda: node.last(World).attempt == 1)
        assert 0.9 < bed.loop.time() - began_s < 5.0  # and not the 30 of the last call
        assert node.last(World).group_world_size == 1


def test_a_killed_node_is_noticed_at_once(bed: Bed) -> None:
    server = Server(bed, least=1)
    node = Node(bed, settings(server.port, is_host=False), make_join(1, 2, least=1))
    bed.until(lambda: node.last(Welcome))
    with raw(server.port) as sock:
        join_by_hand(bed, sock, join=make_join(2, 2, least=1))
        bed.until(lambda: node.last(World))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    began_s = bed.loop.time()
    bed.until(lambda: node.last(World).attempt == 1)
    assert bed.loop.time() - began_s < 5.0, "it fell silent 15 s ago at the earliest"


def test_a_closed_connection_does_not_tell_when_its_node_failed(bed: Bed) -> None:
    """Only that it was there when it was heard of: what failed shortly before may be its victim."""
    server = Server(bed)
    lost: list[float] = []
    server.host.unheard = lambda _node, _how, _why, heard_s, _limit_s: lost.append(heard_s)  # type: ignore[method-assign]
    with raw(server.port) as sock:
        join_by_hand(bed, sock, join=make_join(1))
        bed.until(lambda: server.count("members") == 1)
        joined_s = bed.loop.time()
        time.sleep(0.05)  # this process was at something else
        sock.shutdown(socket.SHUT_WR)
        bed.until(lambda: lost)
    assert lost[0] <= joined_s


def test_a_node_that_never_reads_does_not_hold_up_the_others(bed: Bed) -> None:
    server = Server(bed, nodes=2)
    with raw(server.port) as sock:
        join_by_hand(bed, sock, join=make_join(2))
        bed.until(lambda: server.count("members") == 1)
        peer = next(iter(server.coordinator._members.values()))
        from launcher.rendezvous.messages import Note

        began_s = bed.loop.time()
        for number in range(5000):
            peer.deliver(Note(f"{number} " + "x" * 4000))
        bed.until(lambda: server.count("members") == 0)
        assert bed.loop.time() - began_s < 5.0
        assert server.count("ended") == 1


def test_the_address_of_a_node_is_that_of_its_connection(bed: Bed) -> None:
    server = Server(bed)
    nodes = [Node(bed, settings(server.port, is_host=False), make_join(n)) for n in range(2)]
    bed.until(lambda: all(node.last(World) for node in nodes))
    assert {node.last(World).master_addr for node in nodes} == {"127.0.0.1"}


def test_a_refusal_arrives_before_the_connection_closes(bed: Bed) -> None:
    server = Server(bed)
    node = Node(bed, settings(server.port, is_host=False), make_join(1)._replace(run_id="other"))
    bed.until(lambda: node.last(Refused))
    assert "serves job 'run', not 'other'" in node.last(Refused).reason
    assert node.lost == []
    bed.until(lambda: server.count("ending") == 0)


def test_strangers_beyond_the_room_wait_or_make_room(bed: Bed) -> None:
    server = Server(bed, limits=Limits(max_pending=20, goodbye_s=1.0))
    socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        bed.until(lambda: server.count("accepted") == 20)
        bed.run_for(0.2)
        assert server.count("accepted") == 20
        nodes = [Node(bed, settings(server.port, is_host=False), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        assert server.count("pending") <= 20
    finally:
        for sock in socks:
            sock.close()


# With a limit of 200, no setting of this user can allow more than 200 open files.
FEW_FILES = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from launcher.rendezvous.messages import World
from tests.integration.rendezvous_parts import Bed, Node, Server, make_join, settings
bed = Bed()
server = Server(bed)
nodes = [Node(bed, settings(server.port, is_host=False), make_join(number)) for number in range(2)]
bed.until(lambda: all(node.last(World) for node in nodes))
bed.close()
print(json.dumps(bed.lines))
"""


def test_nodes_join_where_few_files_may_be_open(program: support.Programs) -> None:
    done = program(*support.python("-c", FEW_FILES), deadline_s=60, env={"PYTHONPATH": TOP})
    assert done.status == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_nodes_for_which_no_file_is_left_are_reported(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "raise_file_limit", lambda: 2)
    server = Server(bed)
    first = Node(bed, settings(server.port, is_host=False), make_join(0))
    bed.until(lambda: first.last(Welcome))
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    bed.until(lambda: bed.lines)
    bed.run_for(0.2)
    (line,) = bed.lines
    assert line.startswith("warning: no more nodes can connect: the limit of 2 open files is reached; ")
    for sock in waiting:
        sock.close()
