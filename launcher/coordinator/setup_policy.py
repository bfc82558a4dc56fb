"""PURE: which environment the nodes of a job use, decided once at its coordinator.

    LOOKING --all nodes have searched, or timeout--> USING --all have fetched it--> SHOWN
       |  no node has it                              ^  |one cannot fetch it
       +--> BUILDING (one node) ----published---------+  |
       |        |not published, or timeout               |one cannot, or timeout
       +--------+---------------------------> OWN <------+

Nodes fetch before they change anything, and show the fetched environment only when all nodes can. If one node
cannot fetch it, all nodes run set-up from the same initial state, so that environments do not differ. A damaged
tree in the store is rebuilt, once. Between attempts a node with an unreadable mount fetches its tree again. If
that tree is damaged, all nodes begin as at the start, without it. In: SetupReport of nodes, lost nodes, the time.
Out: SetupOrders. The Job decides which ranks run, and checks that the final environments are equal.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from launcher.rendezvous.messages import SetupOrder, SetupReport

MAX_NAMED = 4
DECIDE_AFTER_S = 5.0  # after a node's first message: the decision waits no longer for the others


class SetupPhase(Enum):
    LOOKING = "looking"
    USING = "using"
    BUILDING = "building"
    SHOWN = "shown"
    OWN = "own"


class NodePhase(Enum):
    """The last known activity of a node."""

    LOOKED = "looked"
    FETCHING = "fetching"
    FETCHED = "fetched"
    SHOWN = "shown"
    WAITING = "waiting"  # for the builder
    BUILDING = "building"
    MADE = "made"  # it runs set-up, or has run it


class NodeOrder(NamedTuple):
    node: int
    order: SetupOrder


class _Node:
    __slots__ = ("cannot", "key", "name", "part", "tree")

    def __init__(self, name: str, key: str, tree: str, cannot: str) -> None:
        self.name = name
        self.key = key
        self.tree = tree  # the tree that it has found, or fetches
        self.cannot = cannot  # why it could not publish a tree
        self.part = NodePhase.LOOKED


class JobSetup:
    """Which environment the nodes of a job use. Times are seconds of one monotonic clock."""

    def __init__(self, least: int, wait_s: float, use_s: float = math.inf) -> None:
        """Args: least: the number of nodes that the job needs. wait_s: limit for a builder. use_s: limit for all
        nodes to fetch a kept environment, beyond the rest of `wait_s`.
        """
        self._least = least
        self._wait_s = wait_s
        self._use_s = use_s
        self._nodes: dict[int, _Node] = {}
        self._phase = SetupPhase.LOOKING
        self._key = ""
        self._tree = ""
        self._decide_at_s: float | None = None
        self._wait_until_s: float | None = None
        self._use_until_s: float | None = None
        self._has_tried_again = False
        self._damaged = ""  # a tree of the store, which the builder is to replace
        self._unreadable: dict[int, str] = {}  # nodes with an unreadable mount in this attempt, and why
        self._recovering: set[int] = set()  # nodes that must fetch it again before the next attempt
        self._orders: list[NodeOrder] = []

    @property
    def phase(self) -> SetupPhase:
        return self._phase

    @property
    def mending(self) -> frozenset[int]:
        """Nodes for which the next attempt waits."""
        return frozenset(self._recovering)

    def deadline_s(self) -> float | None:
        """Return when to call `tick` next; None for no time."""
        if self._phase is SetupPhase.LOOKING:
            return self._decide_at_s
        if self._phase is SetupPhase.USING:
            return self._use_until_s
        return self._wait_until_s if self._phase is SetupPhase.BUILDING else None

    # ---- facts -----------------------------------------------------------------------------------------------

    def receive(self, number: int, name: str, news: SetupReport, now_s: float) -> list[NodeOrder]:
        """Handle news of a node; `name` is for messages. The Job handles a failed set-up command."""
        node = self._nodes.get(number)
        if news.what == "looked":
            if node is not None:
                self._on_new_service(number, node, news, now_s)
            else:
                self._on_looked(number, _Node(name, news.key, news.tree, news.text), now_s)
        elif node is not None:
            match news.what:
                case "fetched":
                    self._on_fetched(number, node, news.tree)
                case "unfetched":
                    self._on_unfetched(number, node, news.text)
                case "damaged":
                    self._on_damaged(number, node, news, now_s)
                case "published" | "found":
                    self._on_built(number, node, news)
                case "unpublished":
                    self._on_unpublished(node, news.text)
                case "unreadable":
                    if node.part is NodePhase.SHOWN and news.tree == node.tree:
                        self._unreadable[number] = news.text
                case "ready":
                    self._recovering.discard(number)
        return self._take()

    def between_attempts(self, now_s: float) -> list[NodeOrder]:
        """Order nodes with an unreadable mount to fetch again; no ranks run on any node."""
        unreadable, self._unreadable = self._unreadable, {}
        for number in unreadable:
            node = self._nodes.get(number)
            if node is not None and node.part is NodePhase.SHOWN and self._phase is SetupPhase.SHOWN:
                self._recovering.add(number)
        if self._recovering and self._phase is SetupPhase.SHOWN:
            self._phase = SetupPhase.USING
            self._use_until_s = self._until(now_s + self._wait_s)
            for number in self._recovering:
                self._use(number, self._nodes[number], self._tree)
        return self._take()

    def _begin_again(self, damaged: str) -> None:
        """Begin as at the start of the job, without the damaged tree; no ranks run meanwhile."""
        self._damaged, self._tree = damaged, ""
        self._phase, self._decide_at_s, self._use_until_s, self._wait_until_s = (
            SetupPhase.LOOKING,
            None,
            None,
            None,
        )
        numbers = list(self._nodes)
        self._nodes.clear()
        self._recovering, self._least = set(numbers), len(numbers)
        for number in numbers:
            self._tell(number, SetupOrder("renew", damaged, ""))

    def lost(self, number: int, now_s: float) -> list[NodeOrder]:
        """Handle the loss of a node."""
        self._recovering.discard(number)
        self._unreadable.pop(number, None)
        node = self._nodes.pop(number, None)
        if node is None:
            return []
        if self._phase is SetupPhase.BUILDING and node.part is NodePhase.BUILDING:
            self._choose_builder(now_s)
        elif self._phase is SetupPhase.USING:
            self._try_show()
        elif self._phase is SetupPhase.LOOKING and not self._nodes:
            self._decide_at_s = None
        return self._take()

    def tick(self, now_s: float) -> list[NodeOrder]:
        """Handle timeouts; may be called at any time."""
        if self._phase is SetupPhase.LOOKING and self._decide_at_s is not None and now_s >= self._decide_at_s:
            self._decide(now_s)
        elif self._phase is SetupPhase.BUILDING and self._wait_until_s is not None and now_s >= self._wait_until_s:
            self._go_own(f"the environment was not built within {self._wait_s:g} s (--setup-wait)")
        elif self._phase is SetupPhase.USING and self._use_until_s is not None and now_s >= self._use_until_s:
            self._give_up_using()
        return self._take()

    def try_again(self) -> list[NodeOrder]:
        """Order all nodes to run set-up, once, because their environments differ; later calls return no orders."""
        if self._has_tried_again or not self._nodes:
            return []
        self._has_tried_again = True
        self._phase = SetupPhase.OWN
        for number, node in self._nodes.items():
            node.part = NodePhase.MADE
            text = "the environments of the nodes differ: every node runs set-up, once"
            self._tell(number, SetupOrder("again", "", text))
        return self._take()

    # ---- deciding --------------------------------------------------------------------------------------------

    def _on_looked(self, number: int, node: _Node, now_s: float) -> None:
        self._nodes[number] = node
        if self._phase is not SetupPhase.LOOKING:
            self._add_late_node(number, node, now_s)
            return
        if node.tree and node.tree != self._damaged:
            self._use(number, node, node.tree)  # fetching changes nothing, so it need not wait for the others
        if self._decide_at_s is None:
            self._decide_at_s = now_s + DECIDE_AFTER_S
        if len(self._nodes) >= self._least:
            self._decide(now_s)

    def _on_new_service(self, number: int, node: _Node, news: SetupReport, now_s: float) -> None:
        """Handle a node whose environment service has failed, and whose new service has searched."""
        part = node.part
        node.cannot = news.text or node.cannot
        if part is NodePhase.BUILDING:
            node.part = NodePhase.MADE
            self._tell(number, SetupOrder("own", "", ""))
            self._on_unpublished(node, "the service that built it has failed", is_known=True)
        elif part in (NodePhase.FETCHING, NodePhase.FETCHED) and self._phase in (
            SetupPhase.LOOKING,
            SetupPhase.USING,
        ):
            self._on_unfetched(number, node, "the service that fetched it has failed")
        elif self._phase is SetupPhase.LOOKING:
            node.key, node.tree = news.key, news.tree
        else:
            self._own(number, node, "")
        if self._phase is SetupPhase.LOOKING and len(self._nodes) >= self._least:
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        self._decide_at_s = None
        counts: dict[str, int] = {}
        for node in self._nodes.values():
            counts[node.key] = counts.get(node.key, 0) + 1
        self._key = max(counts, key=lambda key: (key != "", counts[key], key))
        for number, node in self._nodes.items():
            if node.key != self._key:
                self._leave_out(number, node)
        group = self._group()
        trees = [node.tree for node in group.values() if node.tree and node.tree != self._damaged]
        if trees:
            self._tree = max(trees, key=lambda tree: (trees.count(tree), tree))
            self._phase = SetupPhase.USING
            self._use_until_s = self._until(now_s + self._wait_s) if len(group) > 1 else None
            for number, node in group.items():
                if node.tree != self._tree or node.part is NodePhase.LOOKED:
                    self._use(number, node, self._tree)
            self._try_show()
        else:
            self._choose_builder(now_s)

    def _choose_builder(self, now_s: float) -> None:
        group = self._group()
        able = [number for number, node in group.items() if not node.cannot]
        if not able:
            self._go_own("")
            return
        builder = min(able)
        self._phase, self._use_until_s = SetupPhase.BUILDING, None
        self._wait_until_s = now_s + self._wait_s if len(group) > 1 else None
        again = " again, since the stored one is damaged" if self._damaged else ""
        for number, node in group.items():
            if number == builder:
                node.part = NodePhase.BUILDING
                self._tell(number, SetupOrder("build", self._damaged, "others" if len(group) > 1 else ""))
            else:
                node.part = NodePhase.WAITING
                self._tell(number, SetupOrder("wait", "", f"{group[builder].name} builds the environment{again}"))

    def _add_late_node(self, number: int, node: _Node, now_s: float) -> None:
        """Give orders to a node that joins after the decision."""
        if node.key != self._key:
            self._leave_out(number, node)
        elif self._phase in (SetupPhase.USING, SetupPhase.SHOWN):
            if self._use_until_s is None:
                self._use_until_s = self._until(now_s + self._wait_s)
            self._use(number, node, self._tree)
        elif self._phase is SetupPhase.BUILDING:
            node.part = NodePhase.WAITING
            if self._wait_until_s is None:
                self._wait_until_s = now_s + self._wait_s
            builder = next(
                (each.name for each in self._nodes.values() if each.part is NodePhase.BUILDING), "a node"
            )
            self._tell(number, SetupOrder("wait", "", f"{builder} builds the environment"))
        else:
            self._own(number, node, "")

    # ---- news of nodes ---------------------------------------------------------------------------------------

    def _on_fetched(self, number: int, node: _Node, tree: str) -> None:
        if node.part is not NodePhase.FETCHING or tree != node.tree:
            return
        node.part = NodePhase.FETCHED
        if self._phase is SetupPhase.SHOWN:
            self._show(number, node)
        elif self._phase is SetupPhase.USING:
            self._try_show()

    def _on_damaged(self, number: int, node: _Node, news: SetupReport, now_s: float) -> None:
        """Order a rebuild of a damaged tree: otherwise every start would find it damaged and run set-up."""
        is_again = number in self._recovering and self._phase is SetupPhase.USING and news.tree == self._tree
        if is_again and node.part is NodePhase.FETCHING and news.tree != self._damaged:
            self._begin_again(news.tree)
            return
        if self._damaged or node.part is not NodePhase.FETCHING or news.tree != node.tree:
            self._on_unfetched(number, node, news.text)
            return
        if self._phase is SetupPhase.LOOKING:
            self._damaged, node.tree, node.part = node.tree, "", NodePhase.LOOKED
            if len(self._nodes) >= self._least:
                self._decide(now_s)
            return
        group = self._group().values()
        is_made = any(each.part in (NodePhase.MADE, NodePhase.SHOWN) for each in group)
        if self._phase is not SetupPhase.USING or is_made or all(each.cannot for each in group):
            self._on_unfetched(number, node, news.text)
            return
        self._damaged = node.tree
        self._choose_builder(now_s)

    def _on_unfetched(self, number: int, node: _Node, why: str) -> None:
        if node.part in (NodePhase.WAITING, NodePhase.BUILDING):
            return  # it has an order for another tree meanwhile
        if self._phase is SetupPhase.SHOWN:
            self._own(number, node, "")
        elif self._phase is SetupPhase.LOOKING:
            node.tree, node.part, node.cannot = "", NodePhase.LOOKED, why
            if len(self._nodes) >= self._least:
                self._go_own(f"{node.name} cannot fetch the kept environment: {why}")
        elif self._phase is SetupPhase.USING:
            self._go_own(f"{node.name} cannot fetch the kept environment: {why}")
        else:
            self._own(number, node, "")

    def _on_built(self, number: int, node: _Node, news: SetupReport) -> None:
        if self._phase is not SetupPhase.BUILDING or node.part is not NodePhase.BUILDING:
            if news.what == "found":
                self._own(number, node, "")
            return
        self._phase, self._tree = SetupPhase.USING, news.tree
        self._use_until_s, self._wait_until_s = self._until(self._wait_until_s), None
        node.part = NodePhase.MADE
        for each, other in self._group().items():
            if each != number or news.what == "found":
                self._use(each, other, news.tree)
        self._try_show()

    def _on_unpublished(self, node: _Node, why: str, *, is_known: bool = False) -> None:
        if self._phase is SetupPhase.BUILDING and (is_known or node.part is NodePhase.BUILDING):
            node.part = NodePhase.MADE
            others = len(self._group()) > 1
            self._go_own(f"{node.name} could not publish the environment: {why}" if others else "")

    # ---- orders ----------------------------------------------------------------------------------------------

    def _group(self) -> dict[int, _Node]:
        """Return the nodes that have the job's key."""
        return {number: node for number, node in self._nodes.items() if node.key == self._key}

    def _until(self, moment_s: float | None) -> float | None:
        """Return `use_s` after a moment; None: no node waits, or there is no limit."""
        return None if moment_s is None or self._use_s == math.inf else moment_s + self._use_s

    def _give_up_using(self) -> None:
        slow = [node.name for node in self._group().values() if node.part is NodePhase.FETCHING]
        more = f" and {len(slow) - MAX_NAMED} more" if len(slow) > MAX_NAMED else ""
        self._go_own(f"the kept environment was not fetched in time on {', '.join(slow[:MAX_NAMED])}{more}")

    def _use(self, number: int, node: _Node, tree: str) -> None:
        node.part, node.tree = NodePhase.FETCHING, tree
        self._tell(number, SetupOrder("use", tree, ""))

    def _try_show(self) -> None:
        group = self._group()
        if any(node.part is NodePhase.FETCHING for node in group.values()):
            return
        self._phase = SetupPhase.SHOWN
        for number, node in group.items():
            if node.part is NodePhase.FETCHED:
                self._show(number, node)

    def _show(self, number: int, node: _Node) -> None:
        node.part = NodePhase.SHOWN
        self._tell(number, SetupOrder("show", node.tree, ""))

    def _go_own(self, why: str) -> None:
        text = f"{why}; every node runs set-up itself" if why else ""
        self._phase, self._wait_until_s, self._use_until_s, self._decide_at_s = SetupPhase.OWN, None, None, None
        for number, node in self._nodes.items():
            if node.part not in (NodePhase.MADE, NodePhase.BUILDING):
                self._own(number, node, text)

    def _leave_out(self, number: int, node: _Node) -> None:
        if node.part is not NodePhase.MADE:
            text = "the inputs of set-up differ from those of other nodes; set-up is run"
            self._own(number, node, text if node.key else "")  # a node without a key has printed why

    def _own(self, number: int, node: _Node, text: str) -> None:
        node.part, node.tree = NodePhase.MADE, ""
        self._tell(number, SetupOrder("own", "", text))

    def _tell(self, number: int, order: SetupOrder) -> None:
        self._orders.append(NodeOrder(number, order))

    def _take(self) -> list[NodeOrder]:
        orders, self._orders = self._orders, []
        return orders
