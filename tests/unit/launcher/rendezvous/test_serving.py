"""Who serves bytes to whom: nodes are told of their own group, soon after it has changed."""

from __future__ import annotations

from launcher.base.loop import Loop
from launcher.rendezvous.messages import PeerNodes, PeerServes
from launcher.rendezvous.serving import GROUP_NODES, ServingNodes


class Bed:
    def __init__(self) -> None:
        self.loop = Loop()
        self.told: list[tuple[int, PeerNodes]] = []
        self.serving = ServingNodes(self.loop, lambda node, found: self.told.append((node, found)))

    def serve(self, node: int, port: int = 7000, address: str = "10.0.0.1") -> None:
        self.serving.receive(node, PeerServes(f"host{node}", address, port))

    def settle(self) -> list[tuple[int, PeerNodes]]:
        """What nodes are told next; [] when nothing is planned."""
        while not self.told and self.serving._timer is not None:
            self.loop.run_once()
        told, self.told = self.told, []
        return told


def test_all_that_serve_are_reported_of_each_other_once() -> None:
    bed = Bed()
    for node in (2, 0, 5):
        bed.serve(node, 7000 + node)
    told = bed.settle()
    assert [node for node, _ in told] == [0, 2, 5]
    assert [found.own for _, found in told] == ["host0.0", "host2.2", "host5.5"]
    assert {tuple(each.id for each in found.nodes) for _, found in told} == {("host0.0", "host2.2", "host5.5")}
    assert [each.port for each in told[0][1].nodes] == [7000, 7002, 7005]
    bed.serve(2, 7002)  # no news
    assert bed.settle() == []


def test_who_goes_is_no_longer_reported_of() -> None:
    bed = Bed()
    for node in range(3):
        bed.serve(node)
    bed.settle()
    bed.serving.left(1)
    bed.serve(2, port=0)
    told = bed.settle()
    assert [(node, [each.id for each in found.nodes]) for node, found in told] == [(0, ["host0.0"])]
    bed.serving.left(7)  # never served
    assert bed.settle() == []


def test_who_names_no_address_does_not_serve() -> None:
    bed = Bed()
    bed.serve(0)
    bed.serve(1, address="head.example")
    bed.serve(2, address="")
    assert [node for node, _ in bed.settle()] == [0]
    bed.serve(0, address="fe80::1%eth0")
    assert [found.nodes[0].address for _, found in bed.settle()] == ["fe80::1%eth0"]


def test_groups_are_bounded_and_stay() -> None:
    bed = Bed()
    for node in range(GROUP_NODES + 2):
        bed.serve(node)
    told = dict(bed.settle())
    assert len(told[0].nodes) == GROUP_NODES
    other = [each.id for each in told[GROUP_NODES].nodes]
    assert other == [f"host{n}.{n}" for n in (GROUP_NODES, GROUP_NODES + 1)]
    bed.serving.left(3)
    assert {node for node, _ in bed.settle()} == set(range(GROUP_NODES)) - {3}  # the other group hears nothing


def test_nothing_is_reported_when_all_have_gone() -> None:
    bed = Bed()
    for node in range(2):
        bed.serve(node)
    for node in range(2):
        bed.serving.left(node)
    assert bed.settle() == []
