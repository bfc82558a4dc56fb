"""PURE: who gets which place and which ranks. Nodes in, places and Worlds out.

Rule: a node keeps its place over restarts; who steps in for a lost node takes the place that is free; otherwise
explicit node ranks first, then natural order of host name and address (node2 before node10). Ours: torchrun
sorts addresses as strings and forgets places at each restart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bootseer.light_typing import NamedTuple
from launcher.rendezvous.messages import Join, World

_DIGITS = re.compile(r"(\d+)")


class Candidate(NamedTuple):
    """A node that can take part."""

    node: int
    join: Join
    place: int | None  # the place it has had


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which node2 comes before node10."""
    parts = _DIGITS.split(text)
    return tuple((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts)


def order_key(candidate: Candidate) -> tuple[object, ...]:
    """Order of newcomers: explicit node ranks, then natural order, then pid (agents on one host)."""
    join = candidate.join
    explicit = (0, join.node_rank) if join.node_rank >= 0 else (1, 0)
    return (explicit, natural_key(join.host), natural_key(_plain(join.address)), join.pid, candidate.node)


def _plain(address: str) -> str:
    """Addresses of one host that only it uses are all the same."""
    return "" if address in ("localhost", "::1") or address.startswith("127.") else address


def choose_places(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most `most` nodes in the order of their places; who has a place goes before who has none."""
    holders = sorted((c for c in candidates if c.place is not None), key=lambda c: c.place or 0)[:most]
    newcomers = sorted((c for c in candidates if c.place is None), key=order_key)[: most - len(holders)]
    size = len(holders) + len(newcomers)
    if not holders:
        return newcomers
    seats: list[Candidate | None] = [None] * size
    late: list[Candidate] = []
    for holder in holders:
        place = holder.place
        if place is not None and place < size and seats[place] is None:
            seats[place] = holder
        else:
            late.append(holder)  # the world has shrunk below its place
    rest = iter(late + newcomers)
    return [seat if seat is not None else next(rest) for seat in seats]


def make_worlds(
    members: Sequence[Candidate], attempt: int, restart_count: int, master: tuple[str, int]
) -> list[World]:
    """The World of each member, members given in the order of their places."""
    world_size = sum(member.join.local_world_size for member in members)
    role_sizes: dict[str, int] = {}
    for member in members:
        role_sizes[member.join.role] = role_sizes.get(member.join.role, 0) + member.join.local_world_size
    worlds: list[World] = []
    first_rank = 0
    first_role_rank: dict[str, int] = {}
    for place, member in enumerate(members):
        role, count = member.join.role, member.join.local_world_size
        worlds.append(
            World(
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


def explicit_ranks_clash(joins: Mapping[int, Join]) -> bool:
    """Whether two nodes were given the same node rank."""
    given = [join.node_rank for join in joins.values() if join.node_rank >= 0]
    return len(given) != len(set(given))
