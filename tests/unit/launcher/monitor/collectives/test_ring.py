"""The ring of calls: both ends of it, torn reads, the way to the coordinator, and what stands in a report."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.hangs.calls import Call, Group
from launcher.base.facts import Hang, HangKind
from launcher.in_rank import bootstrap as inside
from launcher.in_rank import tracer
from launcher.monitor.collectives.ring import (
    NEW_RING,
    RankRing,
    copy_ring,
    pack_rings,
    parse_ring,
    read_ring,
    select_newest,
    traces_of,
    unpack_rings,
)
from launcher.monitor.samples.stacks import RankStacks, Source
from launcher.monitor.watch import describe, find_causes_in
from launcher.ranks.stats_page import PAGE_BYTES, RING_MAGIC, StatsPageFile, StatsPages, head_bytes
from tests import support

# Ranks of one process, without a network: a store in memory, and gloo with itself.
ALONE = """
import os, sys
sys.path.insert(0, sys.argv[2])
from launcher.in_rank import bootstrap as inside
page = inside.open_page(sys.argv[1])
first_step = inside.FirstStep(inside.Events("", "run", "node", 0, 0), page)
first_step.install()
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.fixture
def page() -> Iterator[StatsPageFile]:
    pages = StatsPages()
    yield pages.renew(1, False, NEW_RING)[0]
    pages.close()


def make_ring(fd: int) -> tracer.Ring:
    return tracer.Ring(inside.map_file(fd, tracer.RING_END), __import__)


def put(ring: tracer.Ring, number: int, left_ns: int = 0, flags: int = 0, op: int = 1) -> None:
    """A call of group 0 with this number in the group."""
    serial = ring.serial = ring.serial + 1
    at = tracer.RECORDS_AT + serial % tracer.SLOTS * tracer.RECORD_BYTES
    what = (serial, number, 4000, 10 * number, 0, op, 1, 1, -1, 0, 2, 10, 100, 0, 0)
    ring.put(ring.map, at, *what, left_ns, flags, serial & tracer.LOW_SERIAL)


def test_both_ends_know_the_same_format() -> None:
    assert struct.calcsize(tracer.RECORD_FORMAT) == tracer.RECORD_BYTES
    assert struct.calcsize("<QQQQHBBHiiB4I") == tracer.LEFT_AT
    assert struct.calcsize("<QQQQHBBHiiB4IQB") == tracer.END_AT
    assert inside.RING_MAGIC == RING_MAGIC == NEW_RING[:8] == tracer.RING_HEAD[:8]
    assert len(NEW_RING) + PAGE_BYTES == tracer.RING_END


def test_stacks_come_behind_the_ring(page: StatsPageFile) -> None:
    with open(page.path, "rb") as file:
        assert head_bytes(file.fileno()) == tracer.RING_END == os.fstat(file.fileno()).st_size
    pages = StatsPages()
    try:
        with open(pages.renew(1, False)[0].path, "rb") as file:
            assert head_bytes(file.fileno()) == PAGE_BYTES
    finally:
        pages.close()


def test_what_is_written_is_read_and_the_oldest_goes(page: StatsPageFile) -> None:
    with open(page.path, "r+b") as file:
        ring = make_ring(file.fileno())
        assert read_ring(page.path, 3) is None, "nothing is traced yet"
        ring.write_hooked(20)
        assert ring.add_group(b"0\t1\t7\tdp\t2:2:1,9:1:1\n")
        for number in range(1, tracer.SLOTS + 3):
            put(ring, number, left_ns=number, flags=tracer.WAITED_FOR)
        put(ring, tracer.SLOTS + 3)
        found = read_ring(page.path, 3, ended=True)
        assert found is not None
        assert (found.rank, found.ended, len(found.calls)) == (3, True, tracer.SLOTS)
        assert [call.seq for call in found.calls] == [*range(4, tracer.SLOTS + 4)]
        last = found.calls[-1]
        assert (last.group, last.op, last.dtype, last.shape) == (
            Group("7", "dp", 1, (2, 3, 9)),
            "all_reduce",
            "float32",
            (10, 100),
        )
        assert (last.is_open(), last.waited_for) == (True, False)
        assert not found.calls[0].is_open()
        ring.forget()
        put(ring, 1)
        again = read_ring(page.path, 3, ended=True)
        assert again == found, "a forked child writes nothing"


def test_a_copy_is_read_when_the_ring_is_gone() -> None:
    pages = StatsPages()
    path = pages.renew(1, False, NEW_RING)[0].path
    with open(path, "r+b") as file:
        ring = make_ring(file.fileno())
    ring.write_hooked(1)
    ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
    put(ring, 1)
    copy = copy_ring(path)
    pages.close()
    assert copy_ring(path) == b""
    (trace,) = traces_of({4: copy, 5: b""})
    assert (trace.rank, trace.ended, [each.seq for each in trace.calls]) == (4, True, [1])


def test_a_group_for_which_there_is_no_room_is_not_kept(page: StatsPageFile) -> None:
    with open(page.path, "r+b") as file:
        ring = make_ring(file.fileno())
        line = b"0\t1\t7\t" + b"x" * 1000 + b"\t2:2:1\n"
        assert sum(ring.add_group(line) for _ in range(100)) == tracer.GROUPS_BYTES // len(line)


class Work:
    """A collective on a GPU."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.is_over = False

    def is_completed(self) -> bool:
        self.asked.release()
        return self.is_over


class Library:
    """What there is of CUDA: the mode of a thread."""

    def __init__(self, status: int) -> None:
        self.plain = ctypes.CDLL
        self.modes: list[int] = []
        self.status = status
        self.is_asked = threading.Event()

    def __call__(self, name: str | None) -> Library | ctypes.CDLL:
        if name is None:
            return self.plain(None)
        assert name == "libcuda.so.1"
        return self

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        self.is_asked.set()
        return self.status


def make_tracer(page: StatsPageFile, fd: int, monkeypatch: pytest.MonkeyPatch, library: Library) -> tracer.Tracer:
    monkeypatch.setattr(tracer, "WATCH_S", 0.001)
    monkeypatch.setattr(ctypes, "CDLL", library)
    c10d = SimpleNamespace(ProcessGroup=SimpleNamespace(unbox=None), Work=SimpleNamespace(unbox=None))
    return tracer.Tracer(make_ring(fd), SimpleNamespace(), c10d)


def test_works_of_a_gpu_are_seen_to_end_while_the_rank_waits(
    page: StatsPageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(0)
    with open(page.path, "r+b") as file:
        traced = make_tracer(page, file.fileno(), monkeypatch, library)
        traced._ring.write_hooked(1)
        traced._ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
        works = [Work(), Work()]
        for number, work in enumerate(works, 1):
            put(traced._ring, number)
            traced._follow(number, work, 0, False)
        for work in works:
            assert work.asked.acquire(timeout=10), "also behind one that has not ended"
        works[1].is_over = True
        support.wait_until(lambda: works[1] not in traced._pending)
        traced._ring.serial += 1  # calls are made again, and look themselves
        found = read_ring(page.path, 0)
        works[0].is_over = True  # ends the thread's work
        support.wait_until(lambda: not traced._pending)
    assert found is not None
    assert [call.is_open() for call in found.calls] == [True, False]
    assert library.modes == [tracer.RELAXED], "one thread, whose questions end no capture"


def test_works_are_left_to_the_next_call_where_a_question_could_end_a_capture(
    page: StatsPageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(1)
    with open(page.path, "r+b") as file:
        traced = make_tracer(page, file.fileno(), monkeypatch, library)
        works = [Work(), Work()]
        put(traced._ring, 1)
        traced._follow(1, works[0], 0, False)
        assert library.is_asked.wait(10)
        put(traced._ring, 2)
        traced._follow(2, works[1], 0, False)
    assert library.modes == [tracer.RELAXED]
    assert not works[0].asked.acquire(blocking=False)


class Event:
    """Of CUDA."""

    def __init__(self) -> None:
        self.is_over: bool | None = None
        self.streams: list[str] = []

    def record(self, stream: str) -> None:
        self.is_over = False
        self.streams.append(stream)

    def query(self) -> bool | None:
        return self.is_over


FLAGS = tracer.WAITED_FOR | tracer.ON_DEVICE


def test_a_call_of_a_gpu_for_which_there_is_no_work_is_seen_to_end(
    page: StatsPageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL gives none of calls that the stream waits for."""
    events: list[Event] = []

    def make() -> Event:
        events.append(Event())
        return events[-1]

    cuda = SimpleNamespace(Event=make, current_stream=lambda device: f"stream of {device.index}")
    first = SimpleNamespace(device=SimpleNamespace(index=5))
    with open(page.path, "r+b") as file:
        traced = make_tracer(page, file.fileno(), monkeypatch, Library(1))
        traced._torch.cuda = cuda
        traced._ring.write_hooked(1)
        traced._ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
        for number in (1, 2):
            put(traced._ring, number, flags=FLAGS)
            traced._follow(number, None, FLAGS, False, first)
        events[0].is_over = True
        traced._look_after(7)
        found = read_ring(page.path, 0)
        put(traced._ring, 3, flags=FLAGS)
        traced._follow(3, None, FLAGS, False, first)
        assert [each.is_over for each in events] == [False, False], "used again"
        assert {stream for each in events for stream in each.streams} == {"stream of 5"}, "where the tensor is"
        put(traced._ring, 4, flags=tracer.ON_DEVICE)  # of several that are begun together: not in this stream yet
        traced._follow(4, None, tracer.ON_DEVICE, False, first)
        again = read_ring(page.path, 0)
    assert found is not None and again is not None
    assert [(call.left_ns, call.is_open(), call.on_device) for call in found.calls] == [
        (7, False, True),
        (0, True, True),
    ]
    assert (again.calls[-1].lost, again.calls[-1].is_open(), len(events)) == (True, False, 2)


def test_a_mark_that_another_thread_saw_too_ends_no_newer_call(
    page: StatsPageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Event()
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda _device: "")
    first = SimpleNamespace(device=SimpleNamespace(index=0))
    with open(page.path, "r+b") as file:
        traced = make_tracer(page, file.fileno(), monkeypatch, Library(1))
        traced._torch.cuda = cuda
        put(traced._ring, 1, flags=FLAGS)
        traced._follow(1, None, FLAGS, False, first)
        (old,) = traced._pending
        event.is_over = True

        def is_completed() -> bool:
            """The other thread is faster, and the event stands for the next call by now."""
            del old.is_completed
            old.is_completed = lambda: True
            traced._look_after(7)
            put(traced._ring, 2, flags=FLAGS)
            traced._follow(2, None, FLAGS, False, first)
            return True

        old.is_completed = is_completed
        traced._look_after(9)
        assert [call[0] for call in traced._pending.values()] == [2]


def test_calls_are_in_order_only_while_somebody_sees_them_end(
    page: StatsPageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, order in ((1, 0), (0, tracer.IN_ORDER)):
        library = Library(status)
        with open(page.path, "r+b") as file:
            traced = make_tracer(page, file.fileno(), monkeypatch, library)
            traced._follow(1, Work(), 0, False)
            assert library.is_asked.wait(10)
            support.wait_until(lambda traced=traced, order=order: traced._order[0] == order)
            traced._pending.clear()


def test_no_thread_is_begun_for_works_of_a_cpu(page: StatsPageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(page.path, "r+b") as file:
        traced = make_tracer(page, file.fileno(), monkeypatch, Library(0))
        put(traced._ring, 1)
        traced._follow(1, Work(), 0, True)
        traced._follow(1, None, 0, True)  # its end cannot be seen
        assert not traced._is_watched and len(traced._pending) == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_torn_records_show(data: st.DataObject) -> None:
    """Some bytes of a record are those of the call before in its slot: it is left out, or it is one of the two."""
    memory = mmap.mmap(-1, tracer.RING_END)
    memory[PAGE_BYTES:] = NEW_RING
    ring = make_ring(_file_of(memory))
    ring.write_hooked(1)
    ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
    for number in range(1, tracer.SLOTS + 1):
        put(ring, number, left_ns=data.draw(st.integers(0, 9)) if number < 3 else 1)
    old = _bytes_of(ring)
    put(ring, tracer.SLOTS + 1)
    new = _bytes_of(ring)
    cut = data.draw(st.integers(0, tracer.RECORD_BYTES))
    at = tracer.RECORDS_AT + tracer.RECORD_BYTES
    mixed = new[: at + cut] + old[at + cut : at + tracer.RECORD_BYTES] + new[at + tracer.RECORD_BYTES :]
    calls, torn = parse_ring(mixed)
    assert calls is not None
    whole = [parse_ring(each)[0] for each in (old, new)]
    assert calls in whole or (torn == 1 and len(calls) == tracer.SLOTS - 1)


def _file_of(memory: mmap.mmap) -> int:
    fd = os.memfd_create("ring")
    os.write(fd, memory[:])
    return fd


def _bytes_of(ring: tracer.Ring) -> bytes:
    return bytes(ring.map[:])


@given(st.binary(max_size=300), st.integers(0, tracer.GROUPS_BYTES - 300))
def test_whatever_stands_there_is_read(junk: bytes, at: int) -> None:
    data = bytearray(bytes(PAGE_BYTES) + NEW_RING)
    data[tracer.HOOKED_AT] = 1
    data[tracer.GROUPS_AT : tracer.GROUPS_AT + len(junk)] = junk
    data[tracer.RECORDS_AT + at : tracer.RECORDS_AT + at + len(junk)] = junk
    calls, _ = parse_ring(bytes(data))
    assert calls == []
    assert parse_ring(junk) == (None, 0)


def call(serial: int, group: Group, left_ns: int = 1) -> Call:
    return Call(serial, group, "all_reduce", serial, -1, 0, 4, "float32", (1,), 1, serial, left_ns, True)


def test_the_tail_has_what_is_open_and_the_newest_of_each_group() -> None:
    groups = [Group(str(number), "", 1, (0, 1)) for number in range(3)]
    calls = [
        call(1, groups[0]),
        call(2, groups[1], left_ns=0),
        *(call(number, groups[2]) for number in range(3, 50)),
    ]
    assert [each.serial for each in select_newest(calls, 2)] == [1, 2, 48, 49]
    assert select_newest(calls, 100) == calls


def test_what_is_sent_arrives_on_the_clock_of_the_job() -> None:
    group = Group("0", "dp", 1, (0, 1))
    rings = [RankRing(rank, tuple(call(at, group, at % 2) for at in range(1, 40)), rank == 1) for rank in (0, 1)]
    found = unpack_rings(pack_rings(rings, 1000, 1 << 16), {1: True})
    assert sorted(found) == [0, 1]
    assert (found[0].stopped, found[1].stopped, found[0].ended, found[1].ended) == (False, True, False, True)
    assert found[0].calls[4] == rings[0].calls[4]._replace(entered_ns=1005, left_ns=1001)
    assert found[0].calls[1].left_ns == 0, "it has not ended"


def test_what_is_sent_fits_and_says_so_by_fewer_calls() -> None:
    group = Group("0", "dp", 1, tuple(range(8)))
    rings = [RankRing(rank, tuple(call(at, group) for at in range(1, 500)), False) for rank in range(8)]
    data = pack_rings(rings, 0, 1000)
    assert 0 < len(data) <= 1000
    assert all(found.calls[-1].seq == 499 for found in unpack_rings(data, {}).values())
    assert pack_rings(rings, 0, 10) == b""
    assert pack_rings([], 0, 1000) == b""


@given(st.lists(st.integers(0, 2**20), max_size=40))
def test_members_of_a_group_arrive(ranks: list[int]) -> None:
    group = Group("0", "dp", 1, tuple(ranks))
    found = unpack_rings(pack_rings([RankRing(0, (call(1, group),), False)], 0, 1 << 16), {})
    assert found[0].calls[0].group == group


def test_large_groups_cost_little_on_the_way_and_have_a_bound() -> None:
    world = Group("0", "default_pg", 1, tuple(range(20_000)))
    data = pack_rings([RankRing(0, (call(1, world),), False)], 0, 1000)
    assert unpack_rings(data, {})[0].calls[0].group == world
    huge = json.dumps([[["0", "", 1, "0:1000000:1"], ["1", "", 1, "0:1000000:1"]], []])
    assert unpack_rings(zlib.compress(huge.encode()), {}) == {}
    ring = bytearray(bytes(PAGE_BYTES) + NEW_RING)
    ring[tracer.HOOKED_AT] = 1
    lines = b"".join(b"%d\t1\t%d\tx\t0:900000:1\n" % (number, number) for number in range(100))
    ring[tracer.GROUPS_AT : tracer.GROUPS_AT + len(lines)] = lines
    assert parse_ring(bytes(ring)) == ([], 0), "no more than a million ranks are made of it"


@given(st.binary(max_size=60))
def test_what_is_no_trace_is_none(data: bytes) -> None:
    assert unpack_rings(data, {}) == {}


@pytest.mark.parametrize(
    "record", ["null", "[1,2]", '[[["a","b",1,[0]]],[[0,0,[[1]]]]]', "[[],[[0,0,[[1,5]]]]]", "{}"]
)
def test_what_is_no_trace_either_is_none(record: str) -> None:
    assert unpack_rings(zlib.compress(record.encode()), {}) == {}


def test_a_report_begins_with_the_root_cause() -> None:
    group = Group("0", "dp", 1, (0, 1))
    here, gone = RankRing(0, (call(1, group), call(2, group, 0)), False), RankRing(1, (call(1, group),), False)
    stacks = {rank: RankStacks(rank, 10 + rank, Source.KERNEL, state="T" if rank else "S") for rank in (0, 1)}
    causes = find_causes_in([pack_rings([each], 0, 1000) for each in (here, gone)] + [b"junk"], stacks)
    hang = Hang(HangKind.ALL_IDLE, 1.0, (1,), 15.0, 0.2, "no rank has made a step")
    found = describe(0, hang, stacks, {}, causes)
    lines = found.text.splitlines()
    assert lines[0].startswith("the job hangs (all-idle): rank 1 is stopped before all_reduce #2 of group dp")
    assert lines[1].startswith("root cause (certain): rank 1 is stopped")
    record = json.loads(zlib.decompress(found.data))
    assert next(iter(record)) == "causes"
    assert (record["causes"][0]["ranks"], record["causes"][0]["victims"]) == ([1], [0])
    plain = describe(0, hang, stacks, {})
    assert "causes" not in json.loads(zlib.decompress(plain.data))
    assert plain.line == "the job hangs (all-idle): no rank has made a step"


def in_a_rank(page: StatsPageFile, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that is traced as ranks are."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(inside.__file__)))
    program = ALONE + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, page.given, root], capture_output=True, text=True, timeout=60
    )


def test_calls_of_torch_are_seen_whoever_makes_them(page: StatsPageFile) -> None:
    """From Python, by DDP's reducer in C++, functional, in inference mode; not those of a forked child."""
    run = in_a_rank(
        page,
        """
        from torch.distributed import all_reduce
        from torch.distributed import _functional_collectives as functional
        from torch.nn.parallel import DistributedDataParallel
        all_reduce(torch.ones(3, 2))
        model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
        dist.barrier()
        model(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        functional.all_reduce(torch.ones(2, dtype=torch.float64), "sum", dist.group.WORLD).sum()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
        group = dist.new_group([0], group_desc="mine")
        out = torch.empty(4)
        dist.all_gather_into_tensor(out, torch.ones(4), group=group)
        dist.broadcast(out, 0, group=group)
        if os.fork() == 0:
            dist.all_reduce(torch.ones(5), async_op=True)  # gloo's threads are not there to do it
            os._exit(0)
        os.wait()
        late = dist.all_reduce(out, group=group, async_op=True)
        late.wait()
        try:
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.BXOR, group=group)
        except Exception:
            pass  # of integers only
        torch.ops.c10d.barrier(torch.ones(1, device="meta"), group.boxed(), [])
        dist.destroy_process_group()
        """,
    )
    assert run.returncode == 0, run.stderr
    found = read_ring(page.path, 0)
    assert found is not None
    calls = [(each.group.label, each.op, each.shape) for each in found.calls]
    barriers = [place for place, each in enumerate(calls) if each[1] == "barrier"]
    assert calls[0] == ("default_pg", "all_reduce", (3, 2))
    assert ("default_pg", "all_reduce", (16,)) in calls[barriers[0] : barriers[1]], "the reducer's bucket"
    after = calls[barriers[1] + 1 :]
    assert after[:5] == [
        ("default_pg", "all_reduce", (2,)),
        ("default_pg", "all_reduce", (2,)),
        ("mine", "all_gather_into_tensor", (4,)),
        ("mine", "broadcast", (4,)),
        ("mine", "all_reduce", (4,)),
    ]
    assert [each.seq for each in found.calls if each.group.label == "mine"][:3] == [1, 2, 3]
    assert not [each for each in calls if each[2] == (5,)], "of a forked child"
    assert found.calls[0].size_bytes == 24
    assert [each for each in found.calls if each.is_open()] == [], "all ends were seen"
    assert all(each.entered_ns <= each.left_ns for each in found.calls)
    assert [(each.seq, each.failed) for each in found.calls if each.group.label == "mine"][-1] == (4, True)


def test_each_call_is_seen_once_whatever_its_form(page: StatsPageFile) -> None:
    """As torch.distributed makes them, in other forms, of other tensors, by a class that has no method."""
    run = in_a_rank(
        page,
        """
        C, world = torch._C, dist.group.WORLD
        key = C.DispatchKey.ADInplaceOrView
        options = dist.AllreduceOptions()
        dist.all_reduce(torch.ones(1))
        world.allreduce(torch.ones(2)).wait()
        world.allreduce([torch.ones(3)], opts=options).wait()
        world.allreduce((torch.ones(4),), options).wait()
        dist.all_reduce(torch.nn.Parameter(torch.ones(5)).requires_grad_(False))
        class Own(torch.Tensor):
            pass
        dist.all_reduce(torch.ones(6).as_subclass(Own))
        C._dispatch_tls_set_dispatch_key_excluded(key, True)
        dist.all_reduce(torch.ones(7))
        assert C._dispatch_tls_is_dispatch_key_excluded(key), "it stays as it was"
        C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            world.allreduce([torch.ones(8)], dist.BroadcastOptions())
        except TypeError:
            pass  # no such form: torch says so
        try:
            dist.all_reduce(torch.ones(9), op=dist.ReduceOp.BXOR)
        except Exception:
            pass
        assert not C._dispatch_tls_is_dispatch_key_excluded(key)
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            fake = torch.ones(10)
        try:
            dist.all_reduce(fake)
        except Exception:
            pass  # nothing is run, so nothing is seen
        class Group(dist.ProcessGroup):
            def getBackendName(self):
                return "own"
        own = Group(0, 1)
        try:
            own.allreduce([torch.ones(11)], options)
        except RecursionError:
            raise
        except RuntimeError:
            pass  # it has no backend
        assert dist.ProcessGroup.allreduce.__name__ == "allreduce"
        dist.destroy_process_group()
        """,
    )
    assert run.returncode == 0, run.stderr
    found = read_ring(page.path, 0)
    assert found is not None
    calls = [each for each in found.calls if each.group.label == "default_pg"]
    assert [each.shape for each in calls] == [(size,) for size in (1, 2, 3, 4, 5, 6, 7, 9)]
    assert [each.seq for each in calls] == [*range(1, 9)]
    assert [each.is_open() for each in calls] == [False] * 8
    assert [each.failed for each in calls] == [False] * 7 + [True]


def test_an_old_call_comes_back_when_it_is_waited_for(tmp_path: Path) -> None:
    """It has made room for newer ones by then."""
    code = ALONE.replace("HashStore(), rank=0, world_size=1", "FileStore(sys.argv[3], 2), rank=rank, world_size=2")
    code = "import sys; rank = int(sys.argv[4])\n" + code
    code += textwrap.dedent(f"""
        first = dist.irecv(torch.ones(7), 0) if rank else None
        for _ in range({3 * tracer.SLOTS // 2}):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        if first is None:
            dist.send(torch.ones(7), 1)
        else:
            first.wait()
        dist.destroy_process_group()
        """)
    pages = StatsPages()
    try:
        made = pages.renew(2, False, NEW_RING)
        root = os.path.dirname(os.path.dirname(os.path.dirname(inside.__file__)))
        words = [sys.executable, "-c", code]
        ranks = [
            subprocess.Popen([*words, page.given, root, f"{tmp_path}/store", str(rank)], stderr=subprocess.PIPE)
            for rank, page in enumerate(made)
        ]
        assert [(process.communicate(timeout=60)[1], process.returncode) for process in ranks] == [(b"", 0)] * 2
        found = [read_ring(page.path, rank) for rank, page in enumerate(made)]
    finally:
        pages.close()
    assert found[0] is not None and found[1] is not None
    old = found[1].calls[0]
    assert (old.op, old.shape, old.waited_for, old.is_open()) == ("recv", (7,), True, False)
    assert len(found[1].calls) == tracer.SLOTS and found[1].calls[1].serial > tracer.SLOTS // 2
    assert found[0].calls[-1].op == "send"


def test_a_late_end_does_not_stand_in_a_newer_call(page: StatsPageFile) -> None:
    with open(page.path, "r+b") as file:
        ring = make_ring(file.fileno())
        ring.write_hooked(1)
        ring.add_group(b"0\t1\t7\tdp\t0:2:1\n")
        put(ring, 1)
        record = ring.copy(1)
        for number in range(2, tracer.SLOTS + 2):
            put(ring, number)
        ring.leave(1, 99, 0)
        found = read_ring(page.path, 0)
        assert found is not None
        assert [each.left_ns for each in found.calls] == [0] * tracer.SLOTS
        ring.put_back(1, record)
        ring.leave(1, 99, tracer.WAITED_FOR)
        found = read_ring(page.path, 0)
        assert found is not None
        assert [(each.serial, each.left_ns) for each in found.calls][:2] == [(1, 99), (2, 0)]
