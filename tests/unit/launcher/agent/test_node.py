"""What a node does around its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from bootseer.errors import ConfigError
from launcher.agent.node import MAX_STEPS, Node
from launcher.agent.node_checks import MAX_CHECKS_SHOWN
from launcher.base.loop import Loop
from launcher.cli.parser import parse
from launcher.in_rank.bootstrap import map_file
from launcher.in_rank.tracer import LOW_SERIAL, RECORD_BYTES, RECORDS_AT, RING_END, Ring
from launcher.monitor.collectives.ring import NEW_RING, traces_of, unpack_rings
from launcher.monitor.failure.record import FORMAT, pack
from launcher.ranks.group import Rank, RankGroup, RankState
from launcher.ranks.output.console import Console
from launcher.ranks.output.logs import RankLogs
from launcher.ranks.stats_page import StatsPage
from launcher.ranks.stats_page import StatsPages as RankPages
from launcher.rendezvous.messages import CheckReport, RecoveryStep, World
from launcher.spec import build_spec
from launcher.supervisor.client import Exited, SupervisorClient


def make_node(loop: Loop, *flags: str) -> Node:
    environ = {"OMP_NUM_THREADS": "1"}
    spec = build_spec(parse(["--fork-ranks", "off", *flags, __file__], environ), environ)
    return Node(loop, Console(loop), cast(SupervisorClient, None), spec, time.monotonic_ns())


class Pages:
    """What ranks have written, be it possible or not."""

    def __init__(self, *pages: StatsPage | None) -> None:
        self.pages = pages

    def read(self) -> list[StatsPage | None]:
        return list(self.pages)


def made_page(steps: int, step: int | None, counts: bool = True) -> StatsPage:
    return StatsPage(1, 1, 3, 59, counts, steps, 1, step)


def test_how_far_ranks_have_come_is_what_the_furthest_says() -> None:
    loop = Loop()
    node = make_node(loop)
    for pages, reached in (
        ((), (-1, None)),
        ((None, made_page(0, None, counts=False)), (-1, None)),
        ((None, made_page(0, None)), (0, None)),
        ((made_page(3, 102), made_page(4, None), made_page(2, 101)), (4, 102)),
        ((made_page(2**63, 2**63),), (MAX_STEPS, None)),  # no message may hold it
    ):
        node._pages = Pages(*pages)  # type: ignore[assignment]
        assert node.reached() == reached
    node._pages = Pages(made_page(3, 102))  # type: ignore[assignment]
    node._find_observers().sampling.numbers_decrease = True
    assert node.reached() == (3, None)
    loop.close()


def test_a_command_gets_the_page_of_its_own_failure_or_none(tmp_path: Path) -> None:
    loop = Loop()
    node, pages = make_node(loop), []
    node._directories.run = str(tmp_path)
    node.say = lambda _: None  # type: ignore[method-assign]

    class Steps:
        def recover(self, _order: RecoveryStep, page: str, _began_ns: int) -> None:
            pages.append(page)

    class Agent:
        group = None

        def to_job_clock(self, time_ns: int) -> tuple[int, int]:
            return time_ns, 0

    node._steps, node.agent = Steps(), Agent()  # type: ignore[assignment]
    head = {"format": FORMAT, "run_id": "r", "attempt": 0, "number": 0, "class": "user", "class_sure": "certain"}
    known = pack({**head, "stages": {}, "next_attempt": 1})  # for which no dumps are looked for
    node.carry_out(RecoveryStep(0, "rollback", 1.0, "user", 0, known, ()))
    node.carry_out(RecoveryStep(1, "rollback", 1.0, "user", 1, b"what cannot be understood", ()))
    assert pages == [f"{tmp_path}/failure-0.json", ""]
    loop.close()


class Group:
    """Ranks that cannot be started."""

    def __init__(self) -> None:
        self.world = World(0, 0, 0, 1, 0, 1, 0, 1, "h", 1)
        self.ranks = [Rank(0, 0, RankLogs(None, None, False, False, ""), "")]
        self.is_stopping = False
        self.why: list[str] = []

    def begin_spawn(self) -> None:
        """Nothing is missing."""

    def spawn(self, *_how: object) -> None:
        raise ConfigError("--numa-binding: there is no such node")

    def cannot_start(self, why: str) -> None:
        self.why.append(why)


def test_the_exit_of_a_rank_that_ends_before_all_have_started_is_kept(tmp_path: Path) -> None:
    loop = Loop()
    node, group = make_node(loop), Group()
    node._directories.events = str(tmp_path)
    node.agent = SimpleNamespace(group=group)  # type: ignore[assignment]
    group.prepared_ns = group.spawn_began_ns = 1  # type: ignore[attr-defined]
    node.note_exit(cast(RankGroup, group), group.ranks[0], Exited(0, 7, 3, 5, 0.0, 0.1, 0))
    assert list(tmp_path.iterdir()) == [], "nothing is written while ranks start"
    node._records.started(cast(RankGroup, group))
    node._records.make()
    node.attempt_over()
    node._records.finish_last()
    events = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [event["attrs"]["status"] for event in events if event["name"] == "rank_exited"] == [3]
    loop.close()


class Checkpoint:
    """Calls back when its test says so."""

    def load(self, _world: World, then: object) -> None:
        self.then = then


def test_ranks_that_cannot_be_started_after_a_load_are_the_agents_business() -> None:
    """Nobody is above the callback but the loop."""
    loop = Loop()
    node = make_node(loop)
    group, checkpoint = Group(), Checkpoint()
    node.provisions.checkpoint = checkpoint  # type: ignore[assignment]
    node.spawn(cast(RankGroup, group))
    assert group.why == []
    checkpoint.then({})  # type: ignore[operator]
    assert group.why == ["--numa-binding: there is no such node"]
    loop.close()


def test_with_strict_no_rank_starts_after_something_has_failed() -> None:
    """However long the coordinator takes to end the job."""
    for flags, why in ((("--strict",), []), ((), ["--numa-binding: there is no such node"])):
        loop, told = Loop(), list[str]()
        node = make_node(loop, *flags)
        node.agent = SimpleNamespace(on_fell_back=told.append)  # type: ignore[assignment]
        node.say = lambda _: None  # type: ignore[method-assign]
        group, checkpoint = Group(), Checkpoint()
        node.provisions.checkpoint = checkpoint  # type: ignore[assignment]
        node.spawn(cast(RankGroup, group))
        node.provisions.fell_back("checkpoint", "it is gone")
        checkpoint.then({})  # type: ignore[operator]
        assert (group.why, told) == (why, ["it is gone"] if flags else [])
        loop.close()


def test_what_ranks_have_called_is_read_of_an_attempt_that_nobody_watches() -> None:
    """It has failed before the watch begins, or that is off."""
    loop, pages = Loop(), RankPages()
    node = make_node(loop, "--trace-collectives", "--on-hang", "off")
    (page,) = pages.renew(1, False, NEW_RING)
    with open(page.path, "r+b") as file:
        ring = Ring(map_file(file.fileno(), RING_END), __import__)
    ring.write_hooked(1)
    ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
    call = (1, 1, 4000, 10, 0, 1, 1, 1, -1, 0, 2, 10, 100, 0, 0, 0, 0, 1 & LOW_SERIAL)
    ring.put(ring.map, RECORDS_AT + RECORD_BYTES, *call)
    group = Group()
    group.world = group.world._replace(attempt=3)
    group.ranks = [SimpleNamespace(rank=0, page_file=page.path, state=RankState.FAILED)]  # type: ignore[list-item]
    node.agent = SimpleNamespace(group=group, to_job_clock=lambda _: (0, 0))  # type: ignore[assignment]
    node._find_observers()
    node.attempt_over()
    pages.close()
    assert [call.seq for call in unpack_rings(node.traces(), {})[0].calls] == [1]
    attempt, rings = node._rings()
    assert attempt == 3
    assert [call.seq for call in traces_of(rings)[0].calls] == [1]
    loop.close()


class Agent:
    def __init__(self) -> None:
        self.why: list[str] = []
        self.is_spare = False

    def on_unusable(self, why: str) -> None:
        self.why.append(why)


def told(level: str, is_own: bool = False, is_over: bool = False) -> CheckReport:
    return CheckReport(
        is_own, is_over, "pairs", level, "slow with 3 of 3 nodes", "node3", 1e6, 2e8, "bytes", "look"
    )


def test_what_the_coordinator_has_found_is_said_and_its_own_fault_makes_a_node_leave_where_asked_for() -> None:
    loop = Loop()
    for check, leaves in (("report", 0), ("fail", 1)):
        node, said, noted = make_node(loop, "--check", check), [], []
        node.agent = agent = Agent()  # type: ignore[assignment]
        node.say = said.append  # type: ignore[method-assign]
        node._events.finding = lambda found, name, noted=noted: noted.append((name, found.level))  # type: ignore
        node.carry_out(told("fail"))
        assert not noted, "it has no part in an attempt yet"
        said.clear()
        node._group_rank = 0
        for each in (told("ok"), told("fail"), told("warn", True), told("fail", True), told("fail", True, True)):
            node.carry_out(each)
        assert said[0] == "check: ok      pairs node3: slow with 3 of 3 nodes (1 MB, limit 200 MB)"
        assert said[1] == "check: fail    pairs node3: slow with 3 of 3 nodes (1 MB, limit 200 MB); look"
        assert said[4] == "check: over    pairs node3: slow with 3 of 3 nodes"
        assert noted == [("check", "fail"), ("check", "warn"), ("check", "fail"), ("check_over", "fail")]
        assert len(agent.why) == leaves and all("not fit for the job: fail    pairs" in why for why in agent.why)
        node._group_rank = 1
        node.carry_out(told("fail"))
        node._group_rank, agent.is_spare = 0, True  # it had rank 0 before
        node.carry_out(told("fail"))
        assert len(noted) == 4, "only the node with rank 0 keeps it"
        agent.is_spare = False
        said.clear()
        for _ in range(2 * MAX_CHECKS_SHOWN):
            node.carry_out(told("warn"))
        assert len(said) < MAX_CHECKS_SHOWN and "are not shown" in said[-1]
        assert len(noted) == 4 + 2 * MAX_CHECKS_SHOWN
    loop.close()
