"""PURE: the nodes of a job at its coordinator: their states, places, digests and silences.

A separate module, as all parts of the state machine (job.py) read it. Numbers are those of the host.
"""

from __future__ import annotations

from bootseer.light_stdlib import Enum
from bootseer.light_typing import NamedTuple
from launcher.rendezvous import messages


class NodeState(Enum):
    WAITING = "waiting"  # in the next world if there is room
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"  # it has a stop order, and has not answered


class Silence(Enum):
    """Why there is no message from a node."""

    CUT = "cut"  # its connection has broken
    MUTE = "mute"  # no message to it arrives
    STALLED = "stalled"  # its machine receives messages, its bootrun sends none


class SilentNode(NamedTuple):
    """A silent node that the coordinator waits for."""

    how: Silence
    reason: str
    heard_s: float
    since_s: float
    until_s: float

    def describe(self, now_s: float) -> str:
        """Return why the coordinator stops waiting, as a predicate of the node."""
        return self.reason if self.how is Silence.CUT else f"was silent for {now_s - self.heard_s:.0f} s"


class Node:
    __slots__ = ("digest", "environment", "join", "place", "port", "state")

    def __init__(self, join: messages.Join) -> None:
        self.join = join
        self.state = NodeState.WAITING
        self.place: int | None = None  # its node rank in the current or last attempt
        self.port = join.master_port
        self.digest: str | None = None if join.has_identity else ""  # of its Python environment
        self.environment: messages.Distributions | None = None

    @property
    def name(self) -> str:
        """Return the node's name for messages."""
        rank = f", node rank {self.place}" if self.place is not None else ""
        return f"{self.join.host} (pid {self.join.pid}{rank})"


class JobNodes:
    """All nodes of a job.

    States are counted incrementally: with 10,000 nodes a scan at each message would take minutes.
    """

    def __init__(self, is_static: bool) -> None:
        """Args: is_static: a node claims node rank 0 by default; otherwise none."""
        self.by_number: dict[int, Node] = {}
        self.silent: dict[int, SilentNode] = {}  # nodes that may send again
        self.counts = dict.fromkeys(NodeState, 0)
        self.unidentified = 0  # nodes without a digest
        self._is_static = is_static
        self._by_node_rank: dict[int, int] = {}  # explicit node rank: node

    # ---- changes ---------------------------------------------------------------------------------------------

    def add(self, number: int, join: messages.Join) -> Node:
        """Add a node; the first one that claims a node rank keeps the claim."""
        node = self.by_number[number] = Node(join)
        self.counts[node.state] += 1
        self.unidentified += node.digest is None
        claimed = self._claimed_rank(join)
        if claimed >= 0:
            self._by_node_rank.setdefault(claimed, number)
        return node

    def remove(self, number: int) -> Node | None:
        """Remove a node, and return it; None if it is unknown."""
        node = self.by_number.pop(number, None)
        self.silent.pop(number, None)
        if node is not None:
            self.counts[node.state] -= 1
            self.unidentified -= node.digest is None
            claimed = self._claimed_rank(node.join)
            if self._by_node_rank.get(claimed) == number:
                del self._by_node_rank[claimed]
        return node

    def set_state(self, node: Node, state: NodeState) -> None:
        self.counts[node.state] -= 1
        self.counts[state] += 1
        node.state = state

    def set_digest(self, node: Node, digest: str | None) -> None:
        """Set the digest of a node's environment; None: unknown again."""
        self.unidentified += (digest is None) - (node.digest is None)
        node.digest = digest

    # ---- queries ---------------------------------------------------------------------------------------------

    def find_claimant(self, join: messages.Join) -> int:
        """Return the node that has claimed the node rank of `join`; -1 for none."""
        return self._by_node_rank.get(self._claimed_rank(join), -1)

    def _claimed_rank(self, join: messages.Join) -> int:
        """Return the node rank that a node claims, -1 for none."""
        return max(0, join.node_rank) if self._is_static else join.node_rank

    def count_reachable(self) -> int:
        return len(self.by_number) - len(self.silent)

    def count_able(self, without: int = -1) -> int:
        """Count the nodes that are not silent and have sent their digest, except for `without`."""
        apart = self.by_number.keys() & {*self.silent, without}
        left_out = sum(self.by_number[each].digest is not None for each in apart)
        return len(self.by_number) - self.unidentified - left_out

    def count_at_work(self) -> int:
        """Count the nodes that run ranks, have run them, or stop them."""
        return len(self.by_number) - self.counts[NodeState.WAITING]

    def hosts(self) -> dict[int, str]:
        return {number: node.join.host for number, node in self.by_number.items()}

    def placed(self) -> dict[int, Node]:
        """Return the remaining nodes of the current or last attempt."""
        return {number: node for number, node in self.by_number.items() if node.place is not None}

    def placed_hosts(self) -> dict[int, str]:
        """Return the hosts of the remaining nodes of the current or last attempt, by node."""
        return {number: node.join.host for number, node in self.placed().items()}

    def in_rank_order(self) -> list[int]:
        """Return the remaining nodes of the current or last attempt, in the order of their ranks."""
        placed = sorted((node.place, number) for number, node in self.by_number.items() if node.place is not None)
        return [number for _, number in placed]

    def count_ranks(self) -> int:
        """Count the ranks of the remaining nodes of the current or last attempt."""
        return sum(node.join.local_world_size for node in self.placed().values())

    def digests(self) -> dict[int, str]:
        """Return the digests of all nodes, by node; "" where it is unknown or not compared."""
        return {number: node.digest or "" for number, node in self.by_number.items()}
