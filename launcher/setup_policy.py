"""PURE: which environment the nodes of a job take, decided once at its coordinator.

    LOOKING --all nodes have looked, or a while has passed--> USING --all have it at hand--> SHOWN
       |  nobody has it                                         ^  |one cannot have it
       +--> BUILDING (one node) ----published-------------------+  |
       |        |not published, or too late                        |one cannot, or it takes too long
       +--------+------------------------------------> OWN <-------+

Nodes fetch before anything of theirs is changed, and show what they fetched only when all can: a node that cannot
have it makes all run set-up for themselves, from the same beginning, so that no two environments come of it. What
is damaged in the store is built anew, once. Between attempts a node that could not read its mount has that tree
again; where that is damaged all nodes begin as at the start, without it. In: SetupNews of nodes, lost nodes, the
time. Out: SetupOrders. Which ranks run, and whether environments are the same in the end, is the Job's business.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from launcher.rendezvous.messages import SetupNews, SetupOrder

MOST_NAMED = 4
SETTLE_S = 5.0  # after the first word of a node: the others are not waited for longer before it is decided


class Phase(Enum):
    LOOKING = "looking"
    USING = "using"
    BUILDING = "building"
    SHOWN = "shown"
    OWN = "own"


class Part(Enum):
    """What a node does, as far as is known."""

    LOOKED = "looked"
    FETCHING = "fetching"
    FETCHED = "fetched"
    SHOWN = "shown"
    WAITING = "waiting"  # for the builder
    BUILDING = "building"
    MADE = "made"  # it runs set-up, or has run it


class Order(NamedTuple):
    """This to that node."""

    node: int
    order: SetupOrder


class _Node:
    __slots__ = ("cannot", "key", "name", "part", "tree")

    def __init__(self, name: str, key: str, tree: str, cannot: str) -> None:
        self.name = name
        self.key = key
        self.tree = tree  # that it has found, or fetches
        self.cannot = cannot  # why it could not publish what it builds
        self.part = Part.LOOKED


class JobSetup:
    """See the module's docstring. Times are seconds of one monotonic clock."""

    def __init__(self, least: int, wait_s: float, use_s: float = math.inf) -> None:
        """Args: least: nodes without which the job does not start. wait_s: for a builder.

        use_s: for all nodes to have what is kept, on top of what of `wait_s` no builder needed.
        """
        self._least = least
        self._wait_s = wait_s
        self._use_s = use_s
        self._nodes: dict[int, _Node] = {}
        self._phase = Phase.LOOKING
        self._key = ""
        self._tree = ""
        self._decide_at_s: float | None = None
        self._wait_until_s: float | None = None
        self._use_until_s: float | None = None
        self._has_tried_again = False
        self._damaged = ""  # a tree of the store, which the builder is to replace
        self._unreadable: dict[int, str] = {}  # nodes whose mount could not be read in this attempt, and why
        self._mending: set[int] = set()  # nodes that have to have theirs anew before the next attempt
        self._orders: list[Order] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def mending(self) -> frozenset[int]:
        """Nodes without which the next attempt does not begin."""
        return frozenset(self._mending)

    def deadline_s(self) -> float | None:
        """The next moment at which `tick` may have something to do."""
        if self._phase is Phase.LOOKING:
            return self._decide_at_s
        if self._phase is Phase.USING:
            return self._use_until_s
        return self._wait_until_s if self._phase is Phase.BUILDING else None

    # ---- facts -----------------------------------------------------------------------------------------------

    def receive(self, number: int, name: str, news: SetupNews, now_s: float) -> list[Order]:
        """News of a node; `name` is for people. A set-up command that failed is not for here."""
        node = self._nodes.get(number)
        if news.what == "looked":
            if node is not None:
                self._begin_anew(number, node, news, now_s)
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
                    if node.part is Part.SHOWN and news.tree == node.tree:
                        self._unreadable[number] = news.text
                case "ready":
                    self._mending.discard(number)
        return self._take()

    def between_attempts(self, now_s: float) -> list[Order]:
        """Nothing runs on any node: what could not be read is had anew."""
        unreadable, self._unreadable = self._unreadable, {}
        for number in unreadable:
            node = self._nodes.get(number)
            if node is not None and node.part is Part.SHOWN and self._phase is Phase.SHOWN:
                self._mending.add(number)
        if self._mending and self._phase is Phase.SHOWN:
            self._phase = Phase.USING
            self._use_until_s = self._until(now_s + self._wait_s)
            for number in self._mending:
                self._use(number, self._nodes[number], self._tree)
        return self._take()

    def _begin_again(self, damaged: str) -> None:
        """As at the start of the job, but for one tree that is not what it should be: nothing runs meanwhile."""
        self._damaged, self._tree = damaged, ""
        self._phase, self._decide_at_s, self._use_until_s, self._wait_until_s = Phase.LOOKING, None, None, None
        numbers = list(self._nodes)
        self._nodes.clear()
        self._mending, self._least = set(numbers), len(numbers)
        for number in numbers:
            self._tell(number, SetupOrder("renew", damaged, ""))

    def lost(self, number: int, now_s: float) -> list[Order]:
        """A node has gone."""
        self._mending.discard(number)
        self._unreadable.pop(number, None)
        node = self._nodes.pop(number, None)
        if node is None:
            return []
        if self._phase is Phase.BUILDING and node.part is Part.BUILDING:
            self._choose_builder(now_s)
        elif self._phase is Phase.USING:
            self._try_show()
        elif self._phase is Phase.LOOKING and not self._nodes:
            self._decide_at_s = None
        return self._take()

    def tick(self, now_s: float) -> list[Order]:
        """The time has come that `deadline_s` named, or any other."""
        if self._phase is Phase.LOOKING and self._decide_at_s is not None and now_s >= self._decide_at_s:
            self._decide(now_s)
        elif self._phase is Phase.BUILDING and self._wait_until_s is not None and now_s >= self._wait_until_s:
            self._go_own(f"the environment was not built within {self._wait_s:g} s (--setup-wait)")
        elif self._phase is Phase.USING and self._use_until_s is not None and now_s >= self._use_until_s:
            self._give_up_using()
        return self._take()

    def try_again(self) -> list[Order]:
        """The nodes' environments differ: all run set-up for themselves. Once: then there are no orders."""
        if self._has_tried_again or not self._nodes:
            return []
        self._has_tried_again = True
        self._phase = Phase.OWN
        for number, node in self._nodes.items():
            node.part = Part.MADE
            text = "the environments of the nodes differ: every node runs set-up, once"
            self._tell(number, SetupOrder("again", "", text))
        return self._take()

    # ---- deciding --------------------------------------------------------------------------------------------

    def _on_looked(self, number: int, node: _Node, now_s: float) -> None:
        self._nodes[number] = node
        if self._phase is not Phase.LOOKING:
            self._bring_in(number, node, now_s)
            return
        if node.tree and node.tree != self._damaged:
            self._use(number, node, node.tree)  # fetching changes nothing, so it need not wait for the others
        if self._decide_at_s is None:
            self._decide_at_s = now_s + SETTLE_S
        if len(self._nodes) >= self._least:
            self._decide(now_s)

    def _begin_anew(self, number: int, node: _Node, news: SetupNews, now_s: float) -> None:
        """The process that did it on a node has failed; another one has looked."""
        part = node.part
        node.cannot = news.text or node.cannot
        if part is Part.BUILDING:
            node.part = Part.MADE
            self._tell(number, SetupOrder("own", "", ""))
            self._on_unpublished(node, "the process that built it has failed", is_known=True)
        elif part in (Part.FETCHING, Part.FETCHED) and self._phase in (Phase.LOOKING, Phase.USING):
            self._on_unfetched(number, node, "the process that fetched it has failed")
        elif self._phase is Phase.LOOKING:
            node.key, node.tree = news.key, news.tree
        else:
            self._own(number, node, "")
        if self._phase is Phase.LOOKING and len(self._nodes) >= self._least:
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
            self._phase = Phase.USING
            self._use_until_s = self._until(now_s + self._wait_s) if len(group) > 1 else None
            for number, node in group.items():
                if node.tree != self._tree or node.part is Part.LOOKED:
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
        self._phase, self._use_until_s = Phase.BUILDING, None
        self._wait_until_s = now_s + self._wait_s if len(group) > 1 else None
        anew = " anew, as what is kept is damaged" if self._damaged else ""
        for number, node in group.items():
            if number == builder:
                node.part = Part.BUILDING
                self._tell(number, SetupOrder("build", self._damaged, "others" if len(group) > 1 else ""))
            else:
                node.part = Part.WAITING
                self._tell(number, SetupOrder("wait", "", f"{group[builder].name} builds the environment{anew}"))

    def _bring_in(self, number: int, node: _Node, now_s: float) -> None:
        """A node that comes when it is decided."""
        if node.key != self._key:
            self._leave_out(number, node)
        elif self._phase in (Phase.USING, Phase.SHOWN):
            if self._use_until_s is None:
                self._use_until_s = self._until(now_s + self._wait_s)
            self._use(number, node, self._tree)
        elif self._phase is Phase.BUILDING:
            node.part = Part.WAITING
            if self._wait_until_s is None:
                self._wait_until_s = now_s + self._wait_s
            builder = next((each.name for each in self._nodes.values() if each.part is Part.BUILDING), "a node")
            self._tell(number, SetupOrder("wait", "", f"{builder} builds the environment"))
        else:
            self._own(number, node, "")

    # ---- what nodes say --------------------------------------------------------------------------------------

    def _on_fetched(self, number: int, node: _Node, tree: str) -> None:
        if node.part is not Part.FETCHING or tree != node.tree:
            return
        node.part = Part.FETCHED
        if self._phase is Phase.SHOWN:
            self._show(number, node)
        elif self._phase is Phase.USING:
            self._try_show()

    def _on_damaged(self, number: int, node: _Node, news: SetupNews, now_s: float) -> None:
        """What the store has is damaged: if no node replaced it, every start would find it so, and install."""
        is_again = number in self._mending and self._phase is Phase.USING and news.tree == self._tree
        if is_again and node.part is Part.FETCHING and news.tree != self._damaged:
            self._begin_again(news.tree)
            return
        if self._damaged or node.part is not Part.FETCHING or news.tree != node.tree:
            self._on_unfetched(number, node, news.text)
            return
        if self._phase is Phase.LOOKING:
            self._damaged, node.tree, node.part = node.tree, "", Part.LOOKED
            if len(self._nodes) >= self._least:
                self._decide(now_s)
            return
        group = self._group().values()
        is_made = any(each.part in (Part.MADE, Part.SHOWN) for each in group)
        if self._phase is not Phase.USING or is_made or all(each.cannot for each in group):
            self._on_unfetched(number, node, news.text)
            return
        self._damaged = node.tree
        self._choose_builder(now_s)

    def _on_unfetched(self, number: int, node: _Node, why: str) -> None:
        if node.part in (Part.WAITING, Part.BUILDING):
            return  # for another tree than the one that it tried
        if self._phase is Phase.SHOWN:
            self._own(number, node, "")
        elif self._phase is Phase.LOOKING:
            node.tree, node.part, node.cannot = "", Part.LOOKED, why
            if len(self._nodes) >= self._least:
                self._go_own(f"{node.name} cannot have the kept environment: {why}")
        elif self._phase is Phase.USING:
            self._go_own(f"{node.name} cannot have the kept environment: {why}")
        else:
            self._own(number, node, "")

    def _on_built(self, number: int, node: _Node, news: SetupNews) -> None:
        if self._phase is not Phase.BUILDING or node.part is not Part.BUILDING:
            if news.what == "found":
                self._own(number, node, "")
            return
        self._phase, self._tree = Phase.USING, news.tree
        self._use_until_s, self._wait_until_s = self._until(self._wait_until_s), None
        node.part = Part.MADE
        for each, other in self._group().items():
            if each != number or news.what == "found":
                self._use(each, other, news.tree)
        self._try_show()

    def _on_unpublished(self, node: _Node, why: str, *, is_known: bool = False) -> None:
        if self._phase is Phase.BUILDING and (is_known or node.part is Part.BUILDING):
            node.part = Part.MADE
            others = len(self._group()) > 1
            self._go_own(f"{node.name} could not publish the environment: {why}" if others else "")

    # ---- orders ----------------------------------------------------------------------------------------------

    def _group(self) -> dict[int, _Node]:
        """Nodes that have the job's key."""
        return {number: node for number, node in self._nodes.items() if node.key == self._key}

    def _until(self, moment_s: float | None) -> float | None:
        """`use_s` after a moment; None: nobody waits, or without a bound."""
        return None if moment_s is None or self._use_s == math.inf else moment_s + self._use_s

    def _give_up_using(self) -> None:
        slow = [node.name for node in self._group().values() if node.part is Part.FETCHING]
        more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
        self._go_own(f"the kept environment was not in time on {', '.join(slow[:MOST_NAMED])}{more}")

    def _use(self, number: int, node: _Node, tree: str) -> None:
        node.part, node.tree = Part.FETCHING, tree
        self._tell(number, SetupOrder("use", tree, ""))

    def _try_show(self) -> None:
        group = self._group()
        if any(node.part is Part.FETCHING for node in group.values()):
            return
        self._phase = Phase.SHOWN
        for number, node in group.items():
            if node.part is Part.FETCHED:
                self._show(number, node)

    def _show(self, number: int, node: _Node) -> None:
        node.part = Part.SHOWN
        self._tell(number, SetupOrder("show", node.tree, ""))

    def _go_own(self, why: str) -> None:
        text = f"{why}; every node runs set-up for itself" if why else ""
        self._phase, self._wait_until_s, self._use_until_s, self._decide_at_s = Phase.OWN, None, None, None
        for number, node in self._nodes.items():
            if node.part not in (Part.MADE, Part.BUILDING):
                self._own(number, node, text)

    def _leave_out(self, number: int, node: _Node) -> None:
        if node.part is not Part.MADE:
            text = "set-up begins with something else here than on other nodes: it is run"
            self._own(number, node, text if node.key else "")  # without one it has said why

    def _own(self, number: int, node: _Node, text: str) -> None:
        node.part, node.tree = Part.MADE, ""
        self._tell(number, SetupOrder("own", "", text))

    def _tell(self, number: int, order: SetupOrder) -> None:
        self._orders.append(Order(number, order))

    def _take(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
