"""The watch at the coordinator: asks once, concludes by answers or by time, and what it says fits the wire."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hangs.calls import Call, Group
from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.collectives.accelerators import DeviceUse, pack_uses
from launcher.monitor.collectives.ring import RankRing, pack_rings
from launcher.monitor.failure.record import describe_hang, format_record
from launcher.monitor.hang.settings import HangSettings
from launcher.monitor.samples.stacks import Frame, RankStacks, Source, group_stacks
from launcher.monitor.watch import (
    ENOUGH_SAMPLES,
    ROUNDS,
    STACKS_S,
    TRACE_ADVICE,
    HangFinding,
    HangWatch,
    StackQuery,
    WatchMessage,
    blame_by_stacks,
    describe,
    find_groups_in,
    pack_stacks,
    sample_interval_s,
    unpack_stacks,
)


def stack(rank: int, line: int, depth: int = 1) -> RankStacks:
    frames = tuple(Frame("/job/train.py", line + number, f"step{number * line}") for number in range(depth))
    return RankStacks(rank, 100 + rank, Source.HANDLER, main=frames, state="S", kernel=("futex_wait",))


def tell(watch: HangWatch, facts: list[RankFacts], nodes: int, now_s: float) -> list[WatchMessage]:
    """Each node tells of its ranks, one after the other, and time passes."""
    said: list[WatchMessage] = []
    each = len(facts) // nodes
    for node in range(nodes):
        said += watch.looked(node, facts[node * each : (node + 1) * each], now_s)
    return said + watch.tick(now_s)


class Job:
    """Ranks that step once a second until they stand still, idle; looked at every two seconds."""

    def __init__(self, world_size: int = 4, nodes: int = 2) -> None:
        self.watch = HangWatch(HangSettings())
        self.now_s = 1000.0
        self.world_size, self.nodes = world_size, nodes
        self.steps = 0
        self.cpu_s = 0.0
        self.watch.attempt_began(world_size, nodes, self.now_s)

    def run(self, seconds: float, *, steps: bool = True) -> list[WatchMessage]:
        said: list[WatchMessage] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            if steps:
                self.steps += 1
                self.cpu_s += 0.9
                self.step_at_s = self.now_s
            facts = [
                RankFacts(rank, self.now_s, self.steps, self.step_at_s, 0, self.cpu_s, 0, "S", "futex_wait")
                for rank in range(self.world_size)
            ]
            said += tell(self.watch, facts, self.nodes, self.now_s)
        return said


def test_a_healthy_job_is_not_asked() -> None:
    assert Job().run(600) == []


def test_a_hang_is_asked_about_and_reported_when_all_have_answered() -> None:
    job = Job()
    job.run(60)
    assert job.run(40, steps=False) == [StackQuery(0)] or job.watch.last is not None
    job = Job()
    job.run(60)
    said: list[WatchMessage] = []
    while not said:
        said = job.run(1, steps=False)
        assert job.now_s < 1100
    assert said == [StackQuery(0)]
    answers = [
        pack_stacks({rank: stack(rank, 7 if rank == 3 else 9) for rank in ranks}, 10_000)
        for ranks in ((0, 1), (2, 3))
    ]
    assert job.watch.answered(0, 0, answers[0]) == []
    (finding,) = job.watch.answered(1, 0, answers[1])
    assert job.watch.last is not None and job.watch.last.ranks == (3,)
    assert isinstance(finding, HangFinding) and "apart by their stacks: rank 3" in finding.line
    assert isinstance(finding, HangFinding)
    assert "hangs (all-idle)" in finding.line
    assert "train.py" in finding.text
    record = json.loads(zlib.decompress(finding.data))
    assert sorted(len(group["ranks"]) for group in record["groups"]) == [1, 3]
    assert len(record["seen"]) == 4
    assert job.run(120, steps=False) == [], "it is told once"


BUSY = Hang(HangKind.ONE_APART, 5.0, (1,), 15.0, 0.1, "no rank has made a step for 16 s; rank 1 busy, rank 0 idle")


@pytest.mark.parametrize(
    ("ranks", "odd", "blamed"),
    [
        ((), (2,), (2,)),  # all wait idle, and one of them elsewhere
        ((1,), (2,), (2,)),  # threads of the rest differ in what they use while they wait
        ((1,), (0, 1), (1,)),  # both tell of one
        ((1,), (), (1,)),  # all are in the same place
        ((0, 1), (0, 1), (0, 1)),
    ],
)
def test_stacks_tell_who_is_apart_better_than_what_ranks_use(
    ranks: tuple[int, ...], odd: tuple[int, ...], blamed: tuple[int, ...]
) -> None:
    groups = group_stacks({rank: stack(rank, 7 + 10 * rank if rank in odd else 9) for rank in range(5)})
    told = blame_by_stacks(BUSY._replace(ranks=ranks), groups)
    assert told.ranks == blamed
    assert ("by their stacks" in told.why) == (blamed != ranks)
    frozen = BUSY._replace(kind=HangKind.FROZEN)
    assert blame_by_stacks(frozen, groups) == frozen, "the state of a process is certain"


TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"), Frame("/job/train.py", 35, "main"))
REDUCE = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce"), Frame("/job/train.py", 37, "main"))
LOCK = (Frame("/job/train.py", 21, "wait_for_lock"), Frame("/job/train.py", 33, "main"))
READ = (Frame("/job/data.py", 8, "read"), Frame("/job/train.py", 30, "main"))
PLACES = {"b": BACKWARD, "r": REDUCE, "l": LOCK, "f": READ}


def find_hang(places: str) -> tuple[Hang, HangFinding]:
    """Return the report of a job whose ranks hang at these places, one letter each."""
    job = Job(len(places), 1)
    job.run(60)
    said: list[WatchMessage] = []
    while not said:
        said = job.run(1, steps=False)
    stacks = {rank: stack(rank, 1)._replace(main=PLACES[place]) for rank, place in enumerate(places)}
    (finding,) = job.watch.answered(0, 0, pack_stacks(stacks, 10_000))
    assert isinstance(finding, HangFinding) and job.watch.last is not None
    return job.watch.last, finding


@pytest.mark.parametrize(
    ("places", "ranks", "sure", "evidence"),
    [
        ("bl", (1,), "guess", "the other ranks are in backward"),
        ("rl", (1,), "guess", "the other ranks are in torch.distributed, and no stack is that of most"),
        ("rrll", (2, 3), "guess", "the other ranks are in torch.distributed, and no stack is that of most"),
        ("rrrl", (3,), "likely", "the stacks of these ranks differ"),
        ("bb", (), "guess", "no rank differs"),
        ("lf", (), "guess", "no stack is that of most ranks (2 stacks)"),
        ("br", (), "guess", "no stack is that of most ranks (2 stacks)"),
        ("bbl", (2,), "likely", "the stacks of these ranks differ"),
        ("brl", (2,), "guess", "the other ranks are in backward"),
        ("blf", (), "guess", "no stack is that of most ranks (3 stacks)"),
        ("bbbbbbbl", (7,), "likely", "the stacks of these ranks differ"),
        ("bbbbrrlf", (6, 7), "guess", "the other ranks are in backward"),
        ("bbblllll", (0, 1, 2), "guess", "the stacks of these ranks differ"),
    ],
)
def test_the_verdict_on_ranks_by_their_places(
    places: str, ranks: tuple[int, ...], sure: str, evidence: str
) -> None:
    hang, finding = find_hang(places)
    assert hang.ranks == ranks
    record = describe_hang(hang, finding.line)
    assert record["culprit_sure"] == sure
    assert record["culprit_sure_why"].startswith(evidence)
    assert json.loads(zlib.decompress(finding.data))["ranks"] == list(ranks)
    text = format_record(record)
    assert "no rank differs from" not in text
    assert ("no rank is named" in text) == (not ranks)
    assert (finding.text.endswith(f"\n{TRACE_ADVICE}\n")) == (sure == "guess")


def test_the_line_has_the_users_lines() -> None:
    _, finding = find_hang("bl")
    assert finding.line.startswith(
        "the job hangs (all-idle): 2 ranks have 2 different stacks: rank 0 is in backward, called at train.py:35"
        " (DDP and FSDP communicate there), rank 1 is in wait_for_lock (train.py:21); guess: rank 0"
        " waits for rank 1; no rank has made a step for "
    )


def test_a_rank_that_only_its_use_of_the_cpu_sets_apart_has_no_other_stack() -> None:
    told = blame_by_stacks(BUSY, group_stacks({rank: stack(rank, 9) for rank in range(2)}))
    assert "stack" not in describe_hang(told, "")["culprit_sure_why"]


def test_who_does_not_answer_is_waited_for_a_moment() -> None:
    job = Job()
    job.run(60)
    said: list[WatchMessage] = []
    while not said:
        said = job.run(1, steps=False)
    asked_s = job.now_s
    found: list[WatchMessage] = []
    while not found:
        found = job.run(1, steps=False)
    assert isinstance(found[0], HangFinding)
    assert job.now_s - asked_s <= STACKS_S + 1
    assert job.watch.answered(1, 0, pack_stacks({}, 100)) == [], "too late"


def test_another_attempt_begins_again_and_knows_the_jobs_gaps() -> None:
    job = Job()
    job.run(60)
    job.watch.attempt_over()
    assert job.watch.deadline_s() is None
    job.watch.attempt_began(4, 2, job.now_s)
    job.steps = 0
    assert job.run(600) == []


def test_large_jobs_look_more_rarely() -> None:
    assert sample_interval_s(1) == sample_interval_s(500) == 2.0
    assert sample_interval_s(10_000) == 40.0


@given(st.binary(max_size=200))
def test_anything_may_come_as_stacks(data: bytes) -> None:
    unpack_stacks(data)
    unpack_stacks(zlib.compress(data))


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 999), max_size=9))
def test_stacks_survive_the_way(lines: dict[int, int]) -> None:
    stacks = {rank: stack(rank, line) for rank, line in lines.items()}
    assert unpack_stacks(pack_stacks(stacks, 100_000)) == stacks


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_may_come_as_stacks(value: object) -> None:
    unpack_stacks(zlib.compress(json.dumps([{"rank": value, "frames": value, "source": value}, value]).encode()))


def test_stacks_fit_whatever_their_size() -> None:
    stacks = {rank: stack(rank, 7919 * rank, depth=200) for rank in range(200)}
    packed = pack_stacks(stacks, 20_000)
    assert len(packed) <= 20_000
    assert set(unpack_stacks(packed)) == set(stacks)
    assert pack_stacks(stacks, 100) == zlib.compress(b"[]")


class Alone(Job):
    """The last rank is busy while the rest waits for it; asked, it is at `calls`, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []
        self.alone_s = 0.0  # of computing
        self.calls = ["endless"]
        self.silent: set[int] = set()  # nodes that do not answer
        self.looks, self.comes_along = 1, False  # within one question

    def run(self, seconds: float, *, steps: bool = True) -> list[WatchMessage]:
        said: list[WatchMessage] = []
        end_s = self.now_s + seconds
        last = self.world_size - 1
        while self.now_s < end_s:
            self.now_s += 0.5
            self.cpu_s += 0.45 if steps else 0.0
            self.steps += steps
            self.step_at_s = self.now_s if steps else self.step_at_s
            self.alone_s += 0.0 if steps else 0.5
            facts = [
                RankFacts(rank, self.now_s, self.steps, self.step_at_s, 0, cpu_s, 0, "S", "futex_wait")
                for rank in range(self.world_size)
                for cpu_s in [self.cpu_s + (self.alone_s if rank == last else 0.0)]
            ]
            for each in tell(self.watch, facts, self.nodes, self.now_s):
                said += self.answer(each) if isinstance(each, StackQuery) else [each]
        return said

    def answer(self, ask: StackQuery) -> list[WatchMessage]:
        call = self.calls[len(self.asked) % len(self.calls)]
        self.asked.append(self.now_s)
        said: list[WatchMessage] = []
        last = self.world_size - 1
        for node in set(range(self.nodes)) - self.silent:
            stacks = {
                rank: stack(rank, 9)._replace(
                    main=(Frame("/job/train.py", 1, call if rank == last else "wait"),),
                    looks=self.looks if rank == last else 1,
                    comes_along=self.comes_along and rank == last,
                )
                for rank in range(2 * node, 2 * node + 2)
            }
            said += self.watch.answered(node, ask.number, pack_stacks(stacks, 10_000))
        return said


def test_a_rank_that_spins_is_asked_a_few_times_and_reported() -> None:
    job = Alone()
    assert job.run(60) == []
    said = job.run(25, steps=False)
    assert len(said) == 1 and isinstance(said[0], HangFinding)
    assert json.loads(zlib.decompress(said[0].data))["ranks"] == [3]
    assert len(job.asked) == ROUNDS


def test_a_rank_that_comes_along_is_not_reported_until_it_does_not() -> None:
    job = Alone()
    job.calls = ["forward", "loss", "forward", "linear"]
    job.run(60)
    assert job.run(50, steps=False) == []
    assert 4 <= len(job.asked) <= 6  # twice each time, and more rarely
    job.calls = ["endless"]
    assert len(job.run(60, steps=False)) == 1


def test_a_rank_that_was_looked_at_often_enough_is_asked_less() -> None:
    job = Alone()
    job.looks = ENOUGH_SAMPLES // 3
    job.run(60)
    assert len(job.run(25, steps=False)) == 1
    assert len(job.asked) == 3


def test_looks_are_many_enough_for_an_evaluation_of_few_functions() -> None:
    """One that makes its data in a loop was measured to be in that function at 88 of 100 looks."""
    assert 0.88**ENOUGH_SAMPLES < 1e-4


def test_a_node_that_says_nothing_does_not_make_a_rank_that_comes_along_hang() -> None:
    job = Alone()
    job.looks, job.comes_along, job.silent = 12, True, {0}
    job.run(60)
    assert job.run(90, steps=False) == []
    assert job.asked
    job.comes_along = False
    assert len(job.run(90, steps=False)) == 1


def test_a_rank_that_comes_along_within_one_question_is_not_reported() -> None:
    job = Alone()
    job.looks, job.comes_along = 12, True  # each time it is found in the same function
    job.run(60)
    assert job.run(50, steps=False) == []
    job.comes_along = False
    (said,) = job.run(60, steps=False)
    assert isinstance(said, HangFinding)
    lasts_s = int(said.line.partition("made a step for ")[2].partition(" s")[0])
    assert lasts_s > 50, "as long as it lasts by now"


def test_progress_ends_what_was_held_back() -> None:
    job = Alone()
    job.calls = ["forward", "loss"]
    job.run(60)
    job.run(30, steps=False)
    asked = len(job.asked)
    assert asked and job.run(200) == []
    assert len(job.asked) == asked


def test_who_computes_for_very_long_is_reported_at_last() -> None:
    job = Alone()
    job.calls = ["forward", "loss"]
    job.run(60)
    said = job.run(2400, steps=False)
    assert [type(each) for each in said] == [HangFinding]


WORLD = Group("0", "", 1, (0, 1, 2, 3))


def called(rank: int, calls: int, *, is_open: bool) -> RankRing:
    """So many all_reduces, one a second; the last of them still goes on, or not."""
    return RankRing(
        rank,
        tuple(
            Call(seq, WORLD, "all_reduce", seq, -1, 0, 4, "float32", (1,), 1, seq * 10**9, left_ns, True)
            for seq in range(1, calls + 1)
            for left_ns in (0 if is_open and seq == calls else seq * 10**9 + 1,)
        ),
        False,
    )


class Spinning:
    """Ranks that use their CPUs in steps and out of them, as those that wait for a GPU; asked, they answer."""

    step_s, step_cpu_s, cores = 1.0, 0.0, 1.0
    state, wait, others = "R", "", "synchronize"

    def __init__(self) -> None:
        self.watch, self.now_s = HangWatch(HangSettings()), 1000.0
        self.watch.attempt_began(4, 2, self.now_s)
        self.steps, self.asked, self.cpu_s = 0, 0, 0.0
        self.rings: list[RankRing] = []
        self.calls = ["loop"]  # rank 3 is in one of these when it is asked
        self.uses = ["", ""]  # of accelerators, by node
        self.silent: set[int] = set()  # nodes that do not answer

    def run(self, seconds: float, *, steps: bool = True) -> list[tuple[float, HangFinding]]:
        told: list[tuple[float, HangFinding]] = []
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.now_s += 0.25
            self.cpu_s += 0.25 * self.cores
            if steps and self.now_s % self.step_s == 0.0:
                self.steps += 1
                self.cpu_s += self.step_cpu_s
                self.step_at_s = self.now_s
            said = tell(self.watch, self.facts(), 2, self.now_s) if self.steps else []
            while said:
                now = said.pop(0)
                if isinstance(now, HangFinding):
                    told.append((self.now_s - began_s, now))
                    continue
                self.asked += 1
                for node in sorted({0, 1} - self.silent):
                    stacks = {rank: self.stack(rank) for rank in (2 * node, 2 * node + 1)}
                    rings = pack_rings([each for each in self.rings if each.rank // 2 == node], 0, 60000)
                    data = pack_stacks(stacks, 10_000)
                    said += self.watch.answered(node, now.number, data, rings, "", self.uses[node])
        return told

    def facts(self) -> list[RankFacts]:
        seen = (self.now_s, self.steps, self.step_at_s, 0, self.cpu_s, 0, self.state, self.wait)
        return [RankFacts(rank, *seen) for rank in range(4)]

    def stack(self, rank: int) -> RankStacks:
        function = self.calls[self.asked % len(self.calls)] if rank == 3 else self.others
        frames = (Frame("/job/train.py", 1, function),)
        return stack(rank, 9)._replace(main=frames, state=self.state, looks=5)


class Resting(Spinning):
    """Ranks with a step of 15 s, which an accelerator makes, and threads that use as much as their part in it."""

    step_s, step_cpu_s, cores = 15.0, 0.2, 0.004
    state, wait, others = "S", "futex_wait", "all_reduce"


def test_all_that_spin_are_reported_when_their_calls_say_for_whom_they_wait() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 60 + (rank != 3), is_open=rank != 3) for rank in range(4)]
    [(after_s, told)] = job.run(1200, steps=False)
    assert after_s <= 16.0
    assert "hangs (all-spin): rank 3 has not entered all_reduce #61" in told.line
    assert "wait for rank 3" in told.line
    record = json.loads(zlib.decompress(told.data))
    assert (record["kind"], record["ranks"]) == ("all-spin", [3])
    assert job.watch.last is not None
    job.run(10)
    assert job.watch.last is None


def test_all_that_compute_are_asked_more_and_more_rarely_and_not_reported_of() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 60, is_open=False) for rank in range(4)]
    assert job.run(800, steps=False) == []
    assert 2 <= job.asked <= 7
    [(_, told)] = job.run(200, steps=False)
    assert "all-busy" in told.line, "as without traces"


def test_the_one_that_computes_for_the_others_is_not_reported_of() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 60 + (rank != 3), is_open=rank != 3) for rank in range(4)]
    job.calls = ["forward", "loss", "linear"]
    assert job.run(400, steps=False) == []
    job.calls = ["endless"]
    assert len(job.run(600, steps=False)) == 1


def test_a_node_that_does_not_answer_may_have_the_one_that_works() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 60 + (rank != 3), is_open=rank != 3) for rank in range(4)]
    job.silent = {1}
    assert job.run(300, steps=False) == []
    job.silent = set()
    [(_, told)] = job.run(500, steps=False)
    assert json.loads(zlib.decompress(told.data))["ranks"] == [3]


def test_a_rank_that_is_not_traced_is_not_to_blame_for_it() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 61, is_open=True) for rank in range(3)]
    assert job.run(400, steps=False) == []


def test_an_accelerator_that_computes_is_waited_for_whatever_calls_say() -> None:
    job = Spinning()
    job.run(60)
    job.rings = [called(rank, 60 + (rank != 3), is_open=rank != 3) for rank in range(4)]
    job.uses = [uses(0, WAITS, WAITS), uses(1, WAITS, WORKS)]  # a long evaluation that rank 3 waits for
    assert job.run(400, steps=False) == []


def test_by_calls_an_attempt_may_be_ended_and_by_accelerators_alone_not() -> None:
    for by_calls in (True, False):
        job = Spinning()
        job.run(60)
        if by_calls:
            job.rings = [called(rank, 60 + (rank != 3), is_open=rank != 3) for rank in range(4)]
        job.uses = [uses(0, WAITS, WAITS), uses(1, WAITS, RESTS)]
        assert len(job.run(30, steps=False)) == 1
        assert job.watch.last is not None and job.watch.last.is_early is not by_calls


def uses(node: int, *busy_memory: tuple[int, int], is_known: bool = True) -> str:
    """A GPU for each rank of a node."""
    return pack_uses(
        [
            DeviceUse(place, busy, memory, 123.0, (2 * node + place,) if is_known else ())
            for place, (busy, memory) in enumerate(busy_memory)
        ]
    )


WAITS, WORKS, RESTS = (100, 0), (99, 33), (0, 0)


def test_all_that_spin_are_reported_when_their_accelerators_only_wait() -> None:
    job = Spinning()
    job.run(60)
    job.uses = [uses(0, WAITS, WAITS), uses(1, WAITS, RESTS)]
    [(after_s, told)] = job.run(1200, steps=False)
    assert after_s <= 16.0
    assert "use no memory, like waiting collectives, and those of rank 3 run none" in told.line
    record = json.loads(zlib.decompress(told.data))
    assert (record["kind"], record["ranks"]) == ("all-spin", [3])
    assert [each["busy"] for each in record["accelerators"]] == [100, 100, 100, 0]
    assert "accelerator 1 (rank 3): busy 0 %, its memory 0 %, 123 W" in told.text


def test_stacks_tell_who_is_apart_where_all_accelerators_wait() -> None:
    job = Spinning()
    job.run(60)
    job.uses = [uses(node, WAITS, WAITS, is_known=False) for node in range(2)]
    [(_, told)] = job.run(1200, steps=False)
    assert json.loads(zlib.decompress(told.data))["ranks"] == [3]


@pytest.mark.parametrize(
    "given",
    [
        [uses(0, WAITS, WAITS), uses(1, WAITS, WORKS)],  # one evaluates
        [uses(0, RESTS, RESTS), uses(1, RESTS, RESTS)],  # they compile
        [uses(0, WAITS, WAITS), ""],  # of a node nothing is known
        [uses(0, (50, 0), WAITS), uses(1, WAITS, WAITS)],
    ],
)
def test_accelerators_that_compute_are_no_hang(given: list[str]) -> None:
    job = Spinning()
    job.run(60)
    job.uses = given
    assert job.run(800, steps=False) == []
    assert 2 <= job.asked <= 7, "asked again and again"


def test_a_rank_that_comes_along_is_not_reported_of_for_its_accelerator() -> None:
    job = Spinning()
    job.run(60)
    job.uses = [uses(0, WAITS, WAITS), uses(1, WAITS, RESTS)]
    job.calls = ["tokenize", "split", "join"]
    assert job.run(400, steps=False) == []


def test_without_traces_there_is_one_question() -> None:
    job = Spinning()
    job.run(60)
    assert job.run(800, steps=False) == []
    assert job.asked == 1


def test_ranks_whose_threads_use_as_much_as_their_work_are_reported_of_by_their_stacks() -> None:
    """Each process group of gloo has a thread that uses 2 ms a second on a slow machine."""
    job = Resting()
    job.run(150)
    [(after_s, told)] = job.run(1200, steps=False)
    assert after_s <= 45.0, "three times a step"
    record = json.loads(zlib.decompress(told.data))
    assert (record["kind"], record["ranks"]) == ("all-idle", [3])
    assert "all use little of their CPUs" in told.line
    assert job.asked <= ROUNDS
    assert job.watch.last is not None and not job.watch.last.is_early, "an attempt may be ended for it"
    job.run(30)
    assert job.watch.last is None


def test_one_that_comes_along_with_little_cpu_is_waited_for() -> None:
    job = Resting()
    job.run(150)
    job.calls = ["forward", "loss", "linear"]
    assert job.run(500, steps=False) == []
    job.calls = ["sleep"]
    assert len(job.run(600, steps=False)) == 1


def test_with_little_cpu_nothing_is_reported_before_all_have_answered() -> None:
    job = Resting()
    job.run(150)
    job.silent = {1}
    assert job.run(300, steps=False) == []
    job.silent = set()
    assert len(job.run(30, steps=False)) == 1


PEERS = (
    Frame("/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "init_process_group"),
    Frame("/job/train.py", 3, "main"),
)
ELSEWHERE = (Frame("/job/data.py", 40, "wait_for_it"), Frame("/job/train.py", 2, "main"))


class Idle:
    """Ranks that do nothing from their start on, or from the end of the others on."""

    def __init__(self, wait: str, absent: tuple[int, ...] = (2,), ended: tuple[int, ...] = ()) -> None:
        self.watch, self.now_s = HangWatch(HangSettings()), 1000.0
        self.wait, self.absent, self.gone = wait, absent, ended
        self.watch.attempt_began(4, 2, self.now_s)

    def run(self, seconds: float) -> list[tuple[float, HangFinding]]:
        told: list[tuple[float, HangFinding]] = []
        for half in range(int(2 * seconds)):
            now_s = self.now_s + half / 2
            facts = [
                RankFacts(
                    rank,
                    now_s,
                    7 if self.gone else -1,
                    self.now_s if self.gone else -1.0,
                    0,
                    1.0,
                    0,
                    "X" if rank in self.gone else "S",
                    self.wait if rank in self.absent else "futex_do_wait",
                )
                for rank in range(4)
            ]
            waiting = tell(self.watch, facts, 2, now_s)
            while waiting:
                each = waiting.pop()
                if isinstance(each, HangFinding):
                    told.append((now_s - self.now_s, each))
                else:
                    waiting += self.answer(each)
        return told

    def answer(self, ask: StackQuery) -> list[WatchMessage]:
        said: list[WatchMessage] = []
        for node in range(2):
            stacks = {
                rank: RankStacks(rank, 9, Source.NOTHING)
                if rank in self.gone
                else stack(rank, 9)._replace(main=ELSEWHERE if rank in self.absent else PEERS)
                for rank in (2 * node, 2 * node + 1)
            }
            said += self.watch.answered(node, ask.number, pack_stacks(stacks, 10_000))
        return said


def test_before_the_first_step_it_is_reported_once_who_sleeps_while_others_wait() -> None:
    job = Idle("hrtimer_nanosleep")
    [(at_s, finding)] = job.run(400)
    assert at_s <= 16 and "3 ranks (0-1, 3) wait for rank 2" in finding.line
    assert json.loads(zlib.decompress(finding.data))["ranks"] == [2]
    assert job.watch.last is not None and job.watch.last.is_early, "no job is ended for it"


@pytest.mark.parametrize("wait", ["sk_wait_data", "ep_poll", "futex_do_wait", ""])
def test_before_the_first_step_nothing_is_reported_of_who_may_be_served_late(wait: str) -> None:
    """A download, a server that has no requests."""
    assert Idle(wait).run(2000) == []


def test_a_job_that_has_begun_is_not_reported_as_not_started() -> None:
    job = Idle("sk_wait_data")
    assert job.run(20) == []  # asked about, and held back
    for half in range(1, 200):
        now_s = job.now_s + 20 + half / 2
        facts = [
            RankFacts(rank, now_s, half, now_s, 0, 1.0 + half / 4, 0, "S", "hrtimer_nanosleep")
            for rank in range(4)
        ]
        for each in tell(job.watch, facts, 2, now_s):
            assert isinstance(each, StackQuery) and job.answer(each) == []


def test_what_is_found_while_something_else_is_asked_about_is_reported_after_it() -> None:
    """Two ranks are stopped, one after the other, and no node answers."""
    watch = HangWatch(HangSettings())
    said: list[HangFinding] = []
    watch.attempt_began(4, 2, 0.0)
    for half in range(80):
        now_s = half / 2
        states = {1: "T" if now_s >= 20 else "S", 2: "T" if now_s >= 22 else "S"}
        facts = [
            RankFacts(rank, now_s, min(half, 40), 20.0, 0, 9.0, 0, states.get(rank, "S"), "") for rank in range(4)
        ]
        said += [each for each in tell(watch, facts, 2, now_s) if isinstance(each, HangFinding)]
    assert [json.loads(zlib.decompress(each.data))["ranks"] for each in said] == [[1], [1, 2]]


@pytest.mark.parametrize("value", [1e999, -1e999, None, [], {}])
@pytest.mark.parametrize("field", ["rank", "pid", "frames", "kernel"])
def test_odd_numbers_in_answers_end_nothing(field: str, value: object) -> None:
    record = json.loads(zlib.decompress(pack_stacks({0: stack(0, 7)}, 10_000)))[0]
    assert isinstance(unpack_stacks(zlib.compress(json.dumps([{**record, field: value}]).encode())), dict)
    record["frames"] = [["x" * 100_000, 7, "y" * 100_000]]
    found = unpack_stacks(zlib.compress(json.dumps([record]).encode()))
    assert [(len(frame.file), len(frame.function)) for frame in found[0].main] == [(4096, 300)]


def asked_about(job: Job) -> Job:
    """A job that stands still, at the first question."""
    job.run(60)
    while not job.run(1, steps=False):
        pass
    return job


def test_a_node_answers_for_its_own_ranks_once() -> None:
    job = asked_about(Job())
    alien = pack_stacks({rank: stack(rank, 7) for rank in (0, 1, 2, 3)}, 10_000)
    assert job.watch.answered(0, 0, alien) == [] == job.watch.answered(0, 0, alien)
    (finding,) = job.watch.answered(1, 0, pack_stacks({3: stack(3, 8)}, 10_000))
    assert isinstance(finding, HangFinding)
    groups = json.loads(zlib.decompress(finding.data))["groups"]
    assert sorted(rank for group in groups for rank in group["ranks"]) == [0, 1, 3]


def test_a_node_whose_ranks_end_is_not_waited_for() -> None:
    job = asked_about(Job())
    assert job.watch.answered(0, 0, pack_stacks({0: stack(0, 7), 1: stack(1, 7)}, 10_000)) == []
    job.watch.node_ended(1)
    assert [type(each) for each in job.watch.tick(job.now_s + 0.1)] == [HangFinding]


def test_before_the_first_step_nothing_is_reported_where_nobody_waits_in_a_collective() -> None:
    assert Idle("hrtimer_nanosleep", absent=(0, 1, 2, 3)).run(400) == []
    assert Idle("hrtimer_nanosleep", absent=(0, 1, 2)).run(400) == [], "most are elsewhere"
    assert Idle("hrtimer_nanosleep", absent=()).run(400) == []


def test_a_rank_that_sleeps_while_others_have_ended_is_named() -> None:
    found = Idle("hrtimer_nanosleep", absent=(2,), ended=(0, 1, 3)).run(100)
    [(at_s, finding)] = found
    assert at_s <= 15 and "3 of 4 have ended; rank 2 sleeps" in finding.line
    assert Idle("sk_wait_data", absent=(2,), ended=(0, 1, 3)).run(100) == [], "it may send its results"


def test_ranks_that_wait_in_a_collective_for_one_that_has_ended() -> None:
    [(at_s, finding)] = Idle("hrtimer_nanosleep", absent=(), ended=(1,)).run(100)
    assert (
        at_s <= 15 and "1 of 4 have ended; 3 ranks (0, 2-3) wait in torch.distributed, for rank 1" in finding.line
    )
    assert json.loads(zlib.decompress(finding.data))["ranks"] == [1]


def test_all_ranks_of_a_node_have_ended() -> None:
    job = Idle("hrtimer_nanosleep", absent=(2,), ended=())
    job.run(5)
    assert job.watch.answered(1, 0, b"") == [], "nothing was asked"
    job.watch.node_ended(0)
    job.watch.node_ended(0)
    facts = [RankFacts(rank, 1010.0, -1, -1.0, 0, 1.0, 0, "S", "") for rank in (2, 3)]
    assert job.watch.looked(1, facts, 1010.0) == []
    assert job.watch.deadline_s() == 1012.0, "the other node is not waited for"


def test_the_ranks_apart_are_mapped_onto_the_layout_of_the_job() -> None:
    stacks = {rank: stack(rank, 7 if rank in (4, 6) else 40) for rank in range(8)}
    line = "pp,dp,tp;2,2,2;0:8:1"
    hang = Hang(HangKind.ALL_IDLE, 1.0, (4, 6), 15.0, 0.2, "no rank has made a step")
    found = describe(0, hang, stacks, {}, layout=find_groups_in([], line))
    assert found.text.splitlines()[-1] == (
        "apart from the rest: ranks 4, 6; all of them share dp group 2, pipeline stage 1"
    )
    shared = json.loads(zlib.decompress(found.data))["shared"]
    assert [(each["name"], each["number"]) for each in shared] == [("dp", 2), ("pipeline stage", 1)]
    assert find_groups_in([b"junk"], "junk") == {} == find_groups_in([], "")
