"""PURE: the assignment of places and ranks. In: nodes. Out: places and Worlds.

Rule: a node keeps its place over restarts. A node that replaces a lost one takes the free place. Otherwise
explicit node ranks come first, then the natural order of host name and address (node2 before node10). This differs
from torchrun, which sorts addresses as strings and forgets places at each restart.
"""

from __future__ import annotations

import itertools

from bootseer.light_typing import Mapping, NamedTuple, Sequence
from launcher.rendezvous import messages


class Candidate(NamedTuple):
    """A node that can take part."""

    node: int
    join: messages.Join
    place: int | None  # its previous place


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which node2 comes before node10."""
    parts = ["".join(group) for _, group in itertools.groupby(text, str.isdecimal)]
    if text[:1].isdecimal():
        parts.insert(0, "")  # each key begins with a part that is no number
    return tuple((1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts)


def order_key(candidate: Candidate) -> tuple[object, ...]:
    """Return the sort key of new nodes: explicit node ranks, then natural order, then pid (agents on one host)."""
    join = candidate.join
    explicit = (0, join.node_rank) if join.node_rank >= 0 else (1, 0)
    return (explicit, natural_key(join.host), natural_key(_plain(join.address)), join.pid, candidate.node)


def _plain(address: str) -> str:
    """Treat all addresses that only the host itself uses as equal."""
    return "" if address in ("localhost", "::1") or address.startswith("127.") else address


def choose_places(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Choose at most `most` nodes, in the order of their places; nodes with a place come first."""
    sandboxes = sorted((c for c in candidates if c.place is not None), key=lambda c: c.place or 0)[:most]
    newcomers = sorted((c for c in candidates if c.place is None), key=order_key)[: most - len(sandboxes)]
    size = len(sandboxes) + len(newcomers)
    if not sandboxes:
        return newcomers
    seats: list[Candidate | None] = [None] * size
    late: list[Candidate] = []
    for sandbox in sandboxes:
        place = sandbox.place
        if place is not None and place < size and seats[place] is None:
            seats[place] = sandbox
        else:
            late.append(sandbox)  # the world has shrunk below its place
    rest = iter(late + newcomers)
    return [seat if seat is not None else next(rest) for seat in seats]


def make_worlds(
    members: Sequence[Candidate], attempt: int, restart_count: int, master: tuple[str, int]
) -> list[messages.World]:
    """Make the World of each member; members are given in the order of their places."""
    world_size = sum(member.join.local_world_size for member in members)
    role_sizes: dict[str, int] = {}
    for member in members:
        role_sizes[member.join.role] = role_sizes.get(member.join.role, 0) + member.join.local_world_size
    worlds: list[messages.World] = []
    first_rank = 0
    first_role_rank: dict[str, int] = {}
    for place, member in enumerate(members):
        role, count = member.join.role, member.join.local_world_size
        worlds.append(
            messages.World(
                attempt=attempt,
                restart_count=restart_count,
                group_rank=place,
                group_world_size=len(members),
                first_rank=first_rank,
                world_size=world_size,
                first_role_rank=first_role_rank.get(role, 0),
                role_world_size=role_sizes[role],
                master_addr=master[0],
                master_port=master[1],
            )
        )
        first_rank += count
        first_role_rank[role] = first_role_rank.get(role, 0) + count
    return worlds


def explicit_ranks_clash(joins: Mapping[int, messages.Join]) -> bool:
    """Return whether two nodes were given the same node rank."""
    given = [join.node_rank for join in joins.values() if join.node_rank >= 0]
    return len(given) != len(set(given))
