"""Who hosts and where it listens: own addresses and others, names, the port given away and taken back."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launcher.rendezvous.endpoint import HostVerdict, is_loopback, owns, plain_address, try_to_host
from launcher.rendezvous.messages import Started, Succeeded, Welcome, World
from launcher.rendezvous.resolve import Address, address_literal, resolve
from tests import support
from tests.integration.rendezvous_parts import Bed, Node, Server, make_join, settings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOOPBACK = Address(socket.AF_INET, "127.0.0.1")
FOREIGN = Address(socket.AF_INET, "192.0.2.1")  # documentation only: nobody has it


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.close()


def test_own_and_foreign_addresses() -> None:
    assert owns(LOOPBACK)
    assert not owns(FOREIGN)
    assert not owns(Address(socket.AF_INET6, "2001:db8::1"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.1.2.3", Address(socket.AF_INET, "10.1.2.3")),
        ("[::1]", Address(socket.AF_INET6, "::1")),
        ("2001:0DB8:0::1", Address(socket.AF_INET6, "2001:db8::1")),
        ("localhost", LOOPBACK),
        ("node1", None),
        ("10.1", None),
    ],
)
def test_literals(text: str, expected: Address | None) -> None:
    assert address_literal(text) == expected


def test_loopback_and_plain_addresses() -> None:
    assert [is_loopback(a) for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "node1")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"


def listened(bound_to: list[socket.socket]) -> set[str]:
    return {sock.getsockname()[0] for sock in bound_to}


def test_what_the_endpoint_names_is_listened_on_and_no_more() -> None:
    bound = try_to_host("127.0.0.1", [LOOPBACK], 0, False)
    assert bound.verdict is HostVerdict.HOST and bound.listener is not None
    assert listened(bound.listener.sockets) == {"127.0.0.1"}
    bound.listener.close()


def test_a_foreign_endpoint_is_not_ours_unless_ordered(free_port: int) -> None:
    assert try_to_host("192.0.2.1", [FOREIGN], free_port, False).verdict is HostVerdict.NOT_OWN
    bound = try_to_host("192.0.2.1", [FOREIGN], free_port, True)  # behind address translation
    assert bound.listener is not None
    assert listened(bound.listener.sockets) <= {"::", "0.0.0.0"}
    with socket.create_connection(("127.0.0.1", free_port)):
        pass
    bound.listener.close()


def test_a_name_that_is_loopback_only_here_listens_everywhere(free_port: int) -> None:
    """As /etc/hosts of Debian has it for the host's own name; other nodes know another address."""
    bound = try_to_host("thishost.example", [Address(socket.AF_INET, "127.0.1.1")], free_port, False)
    assert bound.listener is not None
    assert listened(bound.listener.sockets) <= {"::", "0.0.0.0"}
    bound.listener.close()


def test_two_hosts_race_and_one_wins(free_port: int) -> None:
    first = try_to_host("127.0.0.1", [LOOPBACK], free_port, False)
    second = try_to_host("127.0.0.1", [LOOPBACK], free_port, False)
    wide = try_to_host("thishost", [LOOPBACK], free_port, False)
    assert first.listener is not None
    assert second.verdict is wide.verdict is HostVerdict.TAKEN
    assert str(free_port) in second.reason
    first.listener.close()


def test_a_port_that_is_held_but_not_listened_on_can_be_hosted(free_port: int) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", free_port))
        bound = try_to_host("127.0.0.1", [LOOPBACK], free_port, False)
        assert bound.listener is not None
        bound.listener.close()


def test_names_are_looked_up_in_a_child(bed: Bed) -> None:
    answers: list[tuple[list[Address], str]] = []
    resolve(bed.loop, socket.gethostname(), lambda *answer: answers.append(answer))
    resolve(bed.loop, "no-such-host.invalid", lambda *answer: answers.append(answer))
    resolve(bed.loop, "x" * 70 + ".example", lambda *answer: answers.append(answer))
    bed.until(lambda: len(answers) == 3)
    assert sum(bool(addresses) for addresses, _ in answers) <= 1
    assert all(bool(addresses) != bool(reason) for addresses, reason in answers)


def test_without_another_process_there_is_an_answer(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    answers: list[tuple[list[Address], str]] = []
    before = support.open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        question = resolve(bed.loop, "no-such-host.invalid", lambda *answer: answers.append(answer))
    assert (question, answers, support.open_descriptors()) == (None, [], before)
    bed.until(lambda: answers)
    assert answers == [([], "no process can be started: Resource temporarily unavailable")]


def test_a_look_up_can_be_given_up(bed: Bed) -> None:
    question = resolve(bed.loop, "no-such-host.invalid", lambda *_: pytest.fail("called"))
    assert question is not None
    question.cancel()
    bed.run_for(0.05)


class TestPortGivenAway:
    """Static jobs: rank 0 listens on the coordinator's own port while ranks run."""

    def start(self, bed: Bed) -> tuple[Server, list[Node]]:
        server = Server(bed, static=True, frees_endpoint=True)
        nodes = [Node(bed, settings(server.port, is_host=False), make_join(n, rank=n)) for n in range(2)]
        bed.until(lambda: all(node.last(World) for node in nodes))
        return server, nodes

    def check_alive(self, bed: Bed, server: Server, nodes: list[Node]) -> None:
        sent = server.count("bytes_in")
        for node in nodes:
            node.member.send(Started(0, 0.0))
        bed.until(lambda: server.count("bytes_in") > sent)
        assert server.count("members") == 2 and not any(node.lost for node in nodes)

    def test_another_socket_listens_while_nodes_stay_connected(self, bed: Bed) -> None:
        server, nodes = self.start(bed)
        with socket.create_server(("127.0.0.1", server.port)) as rank0:  # sets SO_REUSEADDR
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                accepted, _ = rank0.accept()
                with accepted:
                    client.sendall(b"x")
                    assert accepted.recv(1) == b"x"
            self.check_alive(bed, server, nodes)
            # Taken back before rank 0 is gone: tried until it works.
            server.coordinator.set_listening(True)
            bed.run_for(0.3)
        late = Node(bed, settings(server.port, is_host=False), make_join(2, rank=1))
        bed.until(lambda: late.told)
        assert "already taken" in late.told[0].reason  # type: ignore[union-attr]
        self.check_alive(bed, server, nodes)

    def test_a_late_node_waits_while_rank_0_has_the_port(self, bed: Bed) -> None:
        server, _ = self.start(bed)
        with socket.create_server(("127.0.0.1", server.port)) as rank0:
            late = Node(bed, settings(server.port, is_host=False), make_join(2, rank=1))
            rank0.setblocking(False)

            def closed_one() -> bool:
                try:
                    rank0.accept()[0].close()  # as TCPStore does with what it does not know
                except BlockingIOError:
                    return False
                return True

            for _ in range(3):
                bed.until(closed_one)
            assert late.lost == [] and late.told == []
        server.coordinator.set_listening(True)
        bed.until(lambda: late.told)

    @pytest.mark.slow
    def test_a_real_tcpstore_listens_there(self, bed: Bed, program: support.Programs) -> None:
        server, nodes = self.start(bed)
        code = (
            "import sys, torch.distributed as d\n"
            f"store = d.TCPStore('127.0.0.1', {server.port}, 1, True)\n"
            "store.set('key', 'value')\n"
            "print(store.get('key'), flush=True)\n"
            "sys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            bed.until(lambda: process.stdout.read() == b"b'value'\n" if process.stdout else False, 60.0)
            self.check_alive(bed, server, nodes)
            # A late node knocks at the store: neither of them may come to harm.
            late = Node(bed, settings(server.port, is_host=False), make_join(2, rank=1))
            bed.run_for(1.0)
            assert late.lost == [] and late.told == [] and process.poll() is None
        finally:
            process.communicate(timeout=20)
        server.coordinator.set_listening(True)
        bed.until(lambda: late.told)
        self.check_alive(bed, server, nodes)


def test_a_job_on_a_static_endpoint_ends_well(bed: Bed) -> None:
    server = Server(bed, static=True, frees_endpoint=True)
    nodes = [Node(bed, settings(server.port, is_host=False), make_join(n, rank=n)) for n in range(2)]
    bed.until(lambda: all(node.last(World) for node in nodes))
    for node in nodes:
        assert node.last(Welcome)
        node.member.send(Succeeded(0))
    bed.until(lambda: all(node.member.is_closed for node in nodes))


needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"), reason="needs root, unshare and ip"
)


@pytest.mark.system
@needs_namespaces
class TestNamespaces:
    """In a network namespace of its own, where addresses can be made as needed."""

    def run(self, program: support.Programs, shell: str, code: str) -> str:
        modules = "launcher.rendezvous.endpoint", "launcher.rendezvous.resolve"
        prelude = "import socket\n" + "".join(f"from {module} import *\n" for module in modules)
        script = f'ip link set lo up; {shell}; exec "$0" -c "$1"'
        run = program(
            "unshare", "--net", "sh", "-ec", script, sys.executable, prelude + code, env={"PYTHONPATH": ROOT}
        )
        assert run.status == 0, run.stderr
        return run.stdout.strip()

    def test_binding_to_anything_does_not_make_it_ours(self, program: support.Programs) -> None:
        said = self.run(
            program,
            "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind; ip addr add 10.9.9.1/24 dev lo",
            "s = socket.socket(); s.bind(('10.9.9.7', 0))\n"
            "print(owns(Address(socket.AF_INET, '10.9.9.7')), owns(Address(socket.AF_INET, '10.9.9.1')))",
        )
        assert said == "False True"

    def test_every_card_of_a_node_is_its_own(self, program: support.Programs) -> None:
        said = self.run(
            program,
            "ip link add c0 type veth peer name c1; ip link set c0 up; ip link set c1 up;"
            "ip addr add 10.9.1.1/24 dev c0; ip addr add 10.9.2.1/24 dev c1",
            "for host in ('10.9.1.1', '10.9.2.1', '10.9.3.1'):\n"
            "    bound = try_to_host(host, [Address(socket.AF_INET, host)], 29400, False)\n"
            "    sockets = bound.listener.sockets if bound.listener else []\n"
            "    print(bound.verdict.value, *[s.getsockname()[0] for s in sockets])\n"
            "    [s.close() for s in sockets]",
        )
        assert said.splitlines() == ["host 10.9.1.1", "host 10.9.2.1", "not ours"]

    def test_ranks_are_reported_an_address_of_this_node(self, program: support.Programs) -> None:
        """Whatever the endpoint is: its own, a service's, the same under a name, a name that is loopback here."""
        said = self.run(
            program,
            "ip link add c0 type veth peer name c1; ip link set c0 up; ip link set c1 up;"
            "ip addr add 10.9.1.1/24 dev c0; ip addr add 10.9.2.1/24 dev c1; ip route add default via 10.9.2.2;"
            "ip -6 addr add fd09::1/64 dev c0 nodad",
            "for host, *found in (('10.9.1.1', '10.9.1.1'), ('10.96.0.1', '10.96.0.1'), ('svc', '10.9.1.7'),\n"
            "    ('head', '127.0.1.1'), ('head', '10.9.1.1'), ('head', '127.0.1.1', '10.9.1.1'), ('gone',),\n"
            "    ('localhost', '127.0.0.1'), ('::1', '::1'), ('fd09::7', 'fd09::7')):\n"
            "    families = [socket.AF_INET6 if ':' in each else socket.AF_INET for each in found]\n"
            "    print(*find_own_address(host, [Address(*both) for both in zip(families, found)]))",
        )
        assert said.splitlines() == [
            "10.9.1.1 True",
            "10.9.2.1 False",
            "10.9.1.1 False",
            "10.9.2.1 False",
            "10.9.1.1 True",
            "10.9.1.1 True",
            "10.9.2.1 False",
            "localhost True",
            "::1 True",
            "fd09::1 False",
        ]

    def test_without_ipv6_the_wildcard_is_that_of_ipv4(self, program: support.Programs) -> None:
        said = self.run(
            program,
            "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
            "bound = try_to_host('thishost', [Address(socket.AF_INET, '127.0.1.1')], 29400, False)\n"
            "s = socket.create_connection(('127.0.0.1', 29400)); print(bound.verdict.value)",
        )
        assert said == "host"
