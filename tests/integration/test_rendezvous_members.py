"""Nodes on their way into a job and out of it: who hosts, retries, losses, ends; as objects and as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.coordinator.server import Limits
from launcher.rendezvous.messages import DroppedFromJob, Finish, Leave, Note, Refused, Started, Welcome, World
from tests import support
from tests.integration import rendezvous_parts
from tests.integration.rendezvous_parts import SECRET, Bed, Node, Server, make_join, settings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.close()


def start_node(program: support.Programs, port: int, number: int, **values: Any) -> support.Program:
    """A node as a process."""
    words = [f"{name}={json.dumps(value)}" for name, value in {"port": port, "number": number, **values}.items()]
    return program.start(sys.executable, rendezvous_parts.__file__, *words, env={"PYTHONPATH": ROOT})


def told(node: support.Program, name: str) -> list[list[Any]]:
    lines = [json.loads(line) for line in node.stdout.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line[0] == name]


def await_worlds(node: support.Program, count: int) -> None:
    support.wait_until(lambda: len(told(node, "World")) == count, 20.0)


class TestMeeting:
    @pytest.mark.parametrize("secret", [None, SECRET])
    def test_the_first_one_hosts_and_all_get_their_world(
        self, bed: Bed, free_port: int, secret: bytes | None
    ) -> None:
        nodes = [Node(bed, settings(free_port, secret=secret), make_join(n, 3)) for n in range(3)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        assert [node.last(World).group_rank for node in nodes] == [0, 1, 2]
        assert sum(node.member.is_local for node in nodes) == 1
        for node in nodes:
            node.succeed()
        bed.until(lambda: all(node.last(Finish) for node in nodes))
        assert {node.last(Finish).status for node in nodes} == {0}

    def test_clocks_are_mapped_soon(self, bed: Bed, free_port: int) -> None:
        nodes = [Node(bed, settings(free_port), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        member = nodes[1].member
        bed.until(lambda: member.to_job_clock(time.monotonic_ns())[1] < 20_000_000, 2.0)
        now_ns = time.monotonic_ns()
        mapped_ns, error_ns = member.to_job_clock(now_ns)
        assert abs(mapped_ns - now_ns) <= error_ns  # one machine: its clock is the coordinator's

    def test_a_node_waits_for_a_coordinator_that_comes_later(self, bed: Bed, free_port: int) -> None:
        node = Node(bed, settings(free_port, is_host=False), make_join(1))
        bed.run_for(0.3)
        assert node.told == [] and node.lost == []
        Server(bed, port=free_port)
        bed.until(lambda: node.last(Welcome), 2.0)

    def test_what_is_sent_early_arrives_after_the_join(self, bed: Bed, free_port: int) -> None:
        node = Node(bed, settings(free_port, is_host=False), make_join(1, 2, least=1))
        node.member.send(Leave("changed my mind"))
        server = Server(bed, port=free_port, least=1, last_call_s=60.0)
        bed.until(lambda: node.last(Welcome))
        bed.until(lambda: server.host.job.statistics()["nodes"] == 0)

    def test_nobody_there_is_reported_with_the_reason(self, bed: Bed, free_port: int) -> None:
        node = Node(bed, settings(free_port, is_host=False, join_timeout_s=0.5), make_join(1))
        bed.until(lambda: node.lost, 3.0)
        assert node.lost == [
            f"no coordinator at 127.0.0.1:{free_port} within 0.5 s (join_timeout): connection refused"
        ]

    def test_a_name_that_nobody_knows_is_reported(self, bed: Bed, free_port: int) -> None:
        node = Node(
            bed, settings(free_port, join_timeout_s=1.0)._replace(host="no-such-host.invalid"), make_join(1)
        )
        bed.until(lambda: node.lost, 30.0)
        assert f"no-such-host.invalid:{free_port}" in node.lost[0] and "cannot be resolved" in node.lost[0]

    def test_a_long_name_of_the_job_is_refused_before_anything_happens(self, bed: Bed) -> None:
        from bootseer.errors import UsageError

        with pytest.raises(UsageError, match="--rdzv-id"):
            Node(bed, settings(1), make_join(1)._replace(run_id="x" * 257))

    def test_static_is_hosted_by_node_rank_0(self, bed: Bed, free_port: int) -> None:
        first = Node(bed, settings(free_port, backend="static"), make_join(1, rank=1))
        bed.run_for(0.2)
        assert not first.member.is_local
        second = Node(bed, settings(free_port, backend="static"), make_join(0, rank=0))
        bed.until(lambda: first.last(World) and second.last(World))
        assert second.member.is_local

    def test_the_hosts_address_is_the_endpoints_name(self, bed: Bed, free_port: int) -> None:
        nodes = [Node(bed, settings(free_port)._replace(host="localhost"), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        assert nodes[1].last(World).master_addr == "localhost"

    def test_closing_before_anything_came_of_it(self, bed: Bed, free_port: int) -> None:
        node = Node(bed, settings(free_port)._replace(host="no-such-host.invalid"), make_join(1))
        bed.run_for(0.02)
        node.member.close()
        assert node.member.is_closed
        bed.run_for(0.1)
        assert node.lost == []


class TestTakenPort:
    def test_a_node_that_must_host_says_so(self, bed: Bed, free_port: int) -> None:
        with socket.create_server(("127.0.0.1", free_port)):
            node = Node(bed, settings(free_port, is_host=True), make_join(1))
            bed.until(lambda: node.lost, 5.0)
        assert f"cannot host the coordinator at 127.0.0.1:{free_port}" in node.lost[0]
        assert "taken by another process" in node.lost[0]

    def test_another_program_is_named_by_what_it_says(self, bed: Bed, free_port: int) -> None:
        with socket.create_server(("127.0.0.1", free_port)) as server:
            server.setblocking(False)
            node = Node(bed, settings(free_port), make_join(1))

            def serve() -> list[str]:
                try:
                    with server.accept()[0] as sock:
                        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except BlockingIOError:
                    pass
                return node.lost

            bed.until(serve, 10.0)
        assert f"127.0.0.1:{free_port} is taken by another program: it answered in HTTP" in node.lost[0]

    @pytest.mark.slow
    def test_a_program_that_says_nothing_is_an_error_too(self, bed: Bed, free_port: int) -> None:
        with socket.create_server(("127.0.0.1", free_port)):
            node = Node(bed, settings(free_port, join_timeout_s=60.0), make_join(1))
            bed.until(lambda: node.lost, 15.0)
        assert f"127.0.0.1:{free_port} is taken by another program: it did not answer" in node.lost[0]

    def test_the_port_of_a_job_that_ended_is_free_for_the_next(self, bed: Bed, free_port: int) -> None:
        nodes = [Node(bed, settings(free_port), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        for node in nodes:
            node.succeed()
        bed.until(lambda: all(node.last(Finish) for node in nodes))
        again = [Node(bed, settings(free_port), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in again), 2.0)


class TestLosses:
    def test_the_coordinator_closes_without_a_word(self, bed: Bed) -> None:
        server = Server(bed)
        node = Node(bed, settings(server.port, is_host=False), make_join(1))
        bed.until(lambda: node.last(Welcome))
        server.coordinator._acceptor.stop()
        server.coordinator._drop(next(iter(server.coordinator._members.values())))
        bed.until(lambda: node.lost)
        assert f"the coordinator at 127.0.0.1:{server.port} is gone: it closed the connection" in node.lost[0]
        assert "and nothing listens there any more" in node.lost[0]

    def test_the_host_leaves_and_says_why(self, bed: Bed, free_port: int) -> None:
        nodes = [Node(bed, settings(free_port), make_join(n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        nodes[0].member.send(Leave("out of disk"))
        nodes[0].close()
        bed.until(lambda: nodes[1].last(Refused))
        assert "node0, the node of the coordinator, has left the job: out of disk" in nodes[1].last(Refused).reason

    def test_a_silent_coordinator_is_given_up_within_the_limit(self, bed: Bed, free_port: int) -> None:
        server = Server(bed)
        quick = {"keep_alive_interval_s": 0.1, "keep_alive_max_attempt": 3, "join_timeout_s": 1.5}
        node = Node(bed, settings(server.port, is_host=False, **quick), make_join(1))
        bed.until(lambda: node.last(Welcome))
        # Deaf: its loop does not look any more.
        bed.loop.remove_reader(server.coordinator._poll.fileno())
        began_s = time.monotonic()
        bed.until(lambda: node.lost, 5.0)
        assert time.monotonic() - began_s > 1.3
        assert "although its machine answers; the ranks of this node continue" in bed.lines[-1]
        assert f"no message from the coordinator at 127.0.0.1:{server.port} for 2 s" in node.lost[0]
        bed.loop.add_reader(server.coordinator._poll.fileno(), server.coordinator._poll.poll)

    def test_standing_still_oneself_loses_nobody(self, bed: Bed) -> None:
        server = Server(bed, limits=Limits(heartbeat_s=1.0, goodbye_s=0.5))
        quick = settings(server.port, is_host=False, keep_alive_interval_s=0.2, keep_alive_max_attempt=5)
        node = Node(bed, quick, make_join(1))
        bed.until(lambda: node.last(Welcome))
        time.sleep(2.5)  # all of them stand still, as in a suspended virtual machine
        bed.run_for(1.5)
        assert node.lost == [] and server.count("members") == 1


class TestProcesses:
    def test_who_is_first_to_listen_hosts(self, program: support.Programs, free_port: int) -> None:
        nodes = [start_node(program, free_port, n, nodes=6) for n in range(6)]
        for node in nodes:
            await_worlds(node, 1)
        worlds = [told(node, "World")[0] for node in nodes]
        assert sorted(world[3] for world in worlds) == list(range(6))
        for node in nodes:
            node.signal(signal.SIGTERM)
            node.wait()

    def test_a_killed_coordinator_ends_the_others_at_once(self, program: support.Programs, free_port: int) -> None:
        host = start_node(program, free_port, 0, is_host=True)
        node = start_node(program, free_port, 1, is_host=False)
        support.wait_until(lambda: told(node, "World"), 20.0)
        host.signal(signal.SIGKILL)
        run = node.wait(5.0)
        assert run.status == 1 and run.seconds < 20
        assert f"the coordinator at 127.0.0.1:{free_port} is gone: it " in told(node, "lost")[0][1]

    def test_a_stopped_coordinator_ends_the_others_within_the_limit(
        self, program: support.Programs, free_port: int
    ) -> None:
        quick = {"keep_alive_interval_s": 0.1, "keep_alive_max_attempt": 4, "join_timeout_s": 2.0}
        host = start_node(program, free_port, 0, is_host=True, **quick)
        node = start_node(program, free_port, 1, is_host=False, **quick)
        support.wait_until(lambda: told(node, "World"), 20.0)
        host.signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            node.wait(6.0)
            assert time.monotonic() - began_s < 6.0
            assert "no message from the coordinator" in told(node, "lost")[0][1]
        finally:
            host.signal(signal.SIGKILL)
            host.process.wait()

    def test_a_stopped_node_is_replaced_in_the_world(self, program: support.Programs, free_port: int) -> None:
        quick = {"keep_alive_interval_s": 0.1, "keep_alive_max_attempt": 4, "least": 2, "nodes": 3}
        nodes = [start_node(program, free_port, n, is_host=n == 0, **quick) for n in range(3)]
        for node in nodes:
            await_worlds(node, 1)
        nodes[2].signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            for node in nodes[:2]:
                await_worlds(node, 2)
            assert time.monotonic() - began_s < 4.0
            assert told(nodes[1], "World")[1][4] == 2
        finally:
            nodes[2].signal(signal.SIGKILL)
            nodes[2].process.wait()
        for node in nodes[:2]:
            node.signal(signal.SIGTERM)
            node.wait()


class Relay:
    """Between a node and its coordinator, as a proxy or a firewall is; it can cut what goes through it."""

    def __init__(self, bed: Bed, target: int) -> None:
        self._bed, self._target = bed, target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self.is_open = True
        bed.loop.add_reader(self._server.fileno(), self._accept)
        bed.at_end(self.close)

    def _accept(self) -> None:
        one, _ = self._server.accept()
        if not self.is_open:
            one.close()
            return
        other = socket.create_connection(("127.0.0.1", self._target))
        for here, there in ((one, other), (other, one)):
            self._pairs[here] = there
            self._bed.loop.add_reader(here.fileno(), self._pass_on, here)

    def _pass_on(self, here: socket.socket) -> None:
        try:
            data = here.recv(65536)
        except ConnectionResetError:
            data = b""
        if data:
            self._pairs[here].sendall(data)
        else:
            self._end(here)

    def _end(self, here: socket.socket) -> None:
        for each in (here, self._pairs.pop(here)):
            self._pairs.pop(each, None)
            self._bed.loop.remove_reader(each.fileno())
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            each.close()

    def cut(self) -> None:
        for here in list(self._pairs):
            if here in self._pairs:
                self._end(here)

    def close(self) -> None:
        self.cut()
        self._bed.loop.remove_reader(self._server.fileno())
        self._server.close()


class TestCutConnections:
    """Connections that break although both ends live."""

    def start(self, bed: Bed, server: Server, least: int = 2) -> tuple[Relay, list[Node]]:
        """The second one comes through a relay."""
        relay = Relay(bed, server.port)
        ports = (server.port, relay.port)
        nodes = [Node(bed, settings(port, is_host=False), make_join(n, 2, least)) for n, port in enumerate(ports)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        return relay, nodes

    def test_a_node_goes_on_with_another_connection(self, bed: Bed) -> None:
        server = Server(bed)
        relay, nodes = self.start(bed, server)
        for _ in range(3):
            relay.cut()
            bed.run_for(0.05)
            nodes[1].member.send(Started(0, 0.0))
        bed.until(lambda: server.count("members") == 2)
        for node in nodes:
            node.succeed()
        bed.until(lambda: all(node.last(Finish) for node in nodes))
        assert {node.last(Finish).status for node in nodes} == {0}
        assert all(node.lost == [] and sum(isinstance(m, World) for m in node.told) == 1 for node in nodes)

    def test_what_is_said_while_there_is_no_connection_arrives_on_both_sides(self, bed: Bed) -> None:
        server = Server(bed)
        relay, nodes = self.start(bed, server)
        relay.is_open = False
        relay.cut()
        nodes[1].succeed()
        nodes[0].succeed()
        next(peer for peer in server.coordinator._members.values() if peer.node == 1).deliver(
            Note("said meanwhile")
        )
        bed.run_for(0.3)
        relay.is_open = True
        bed.until(lambda: all(node.last(Finish) for node in nodes))
        assert sum(isinstance(m, Note) and m.text == "said meanwhile" for m in nodes[1].told) == 1
        assert {node.last(Finish).status for node in nodes} == {0}

    def test_who_is_not_back_in_time_joins_again(self, bed: Bed) -> None:
        """Of an elastic job, which goes on without it at once."""
        server = Server(bed, least=1)
        relay, nodes = self.start(bed, server, least=1)
        relay.cut()
        bed.until(lambda: nodes[0].last(World).group_world_size == 1)
        bed.until(lambda: nodes[1].last(DroppedFromJob))
        nodes[1].member.rejoin(40007)
        bed.until(lambda: nodes[0].last(World).group_world_size == 2)
        bed.until(lambda: nodes[1].last(World).attempt == nodes[0].last(World).attempt == 2)
        assert nodes[1].lost == []

    def test_another_job_at_the_same_place_does_not_take_it(self, bed: Bed) -> None:
        server = Server(bed)
        relay, nodes = self.start(bed, server)
        other = Server(bed)
        relay._target = other.port
        relay.cut()
        bed.until(lambda: nodes[1].last(Refused))
        assert "the job of this node has ended, and another job uses its endpoint" in nodes[1].last(Refused).reason
        assert other.count("members") == 0
