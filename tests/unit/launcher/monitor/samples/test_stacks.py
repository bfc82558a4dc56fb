"""Stacks: what faulthandler prints is read, equal ones are put together, what is shown is bounded."""

from __future__ import annotations

import faulthandler
import random
import tempfile
import threading
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.monitor.samples.stacks import (
    MAX_FRAMES_SHOWN,
    MAX_GROUPS_SHOWN,
    WIDTH,
    Frame,
    RankStacks,
    Source,
    Thread,
    find_main,
    find_odd,
    find_shared,
    format_groups,
    group_stacks,
    name_ranks,
    parse_looks,
    parse_py_spy,
    parse_stacks,
)

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters='"'), min_size=1)
FRAMES = st.builds(Frame, file=NAMES, line=st.integers(1, 10**6), function=NAMES)
THREADS = st.builds(
    Thread,
    ident=st.integers(1, 2**63),
    name=st.just("") | st.text("abc -_", min_size=1),
    is_current=st.booleans(),
    frames=st.lists(FRAMES, max_size=5).map(tuple),
)


def printed(threads: list[Thread]) -> str:
    """As faulthandler prints them."""
    lines = []
    for each in threads:
        name = f" [{each.name}]" if each.name else ""
        kind = "Current thread" if each.is_current else "Thread"
        lines.append(f"{kind} 0x{each.ident:016x}{name} (most recent call first):")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in each.frames]
        lines.append("")
    return "\n".join(lines)


@given(st.lists(THREADS, max_size=5))
def test_what_is_printed_is_read(threads: list[Thread]) -> None:
    assert parse_stacks(printed(threads)) == threads


@given(st.lists(THREADS, max_size=4), st.lists(st.lists(FRAMES, max_size=3).map(tuple), max_size=4))
def test_looks_at_the_main_thread_alone_are_reported_from_stacks(
    threads: list[Thread], looks: list[tuple[Frame, ...]]
) -> None:
    alone = [
        "".join(["Stack (most recent call first):\n", *printed([Thread(1, "", True, each)]).partition("\n")[2]])
        for each in looks
    ]
    text = printed(threads) + "\n" + "\n".join(alone)
    assert parse_looks(text) == looks
    assert parse_stacks(text) == threads


@given(
    st.text() | st.lists(THREADS, max_size=3).map(printed).flatmap(lambda text: st.just(text[: len(text) // 2]))
)
def test_any_text_can_be_read(text: str) -> None:
    parse_stacks(text)
    for thread in parse_stacks('Thread 0x1 (most recent call first):\n  File "a", line 1 in b\n' + text)[:1]:
        assert thread.frames[0] == Frame("a", 1, "b")


def test_our_own_interpreter_prints_what_we_read() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = parse_stacks(file.read())
    go.set()
    thread.join()
    assert len(found) >= 2
    main = find_main(found, threading.main_thread().ident or 0)
    assert (main[0].file, main[0].function) == (__file__, "test_our_own_interpreter_prints_what_we_read")
    assert main[0].line > 0
    other = next(each for each in found if each.ident == thread.ident)
    assert any(frame.function == "wait" for frame in other.frames)


def test_unknown_and_cut_places() -> None:
    text = "Stack\nThread 0x00f0 [a (b)] (most recent call first):\n  File ???, line ??? in ???\n  ...\n"
    text += "  <no Python frame>"
    text += '\n  File "/a/\\xe9.py", line 12 in <lambda>\n\nExtension modules: numpy (total: 1)\n'
    assert parse_stacks(text) == [
        Thread(0xF0, "a (b)", False, (Frame("???", 0, "???"), Frame("/a/\\xe9.py", 12, "<lambda>")))
    ]


def test_main_thread_is_found() -> None:
    threads = [Thread(1, "", False, (Frame("a", 1, "a"),)), Thread(2, "", True, (Frame("b", 1, "b"),))]
    threads.append(Thread(3, "", False, (Frame("c", 1, "c"),)))
    assert [find_main(threads, ident)[0].file for ident in (1, 3, 0, 9)] == ["a", "c", "b", "b"]
    assert find_main([threads[0], threads[2]], 0)[0].file == "c"
    assert find_main([threads[0], threads[2]._replace(name="MainThread")], 9)[0].file == "c"
    assert find_main([], 1) == ()


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["frames", "name", "filename", "line", "thread_id", "active"]), inner)
    ),
    max_leaves=20,
)


@given(JSONS)
def test_anything_can_be_said_by_py_spy(found: object) -> None:
    parse_py_spy(found)


def test_py_spy_is_understood() -> None:
    frame = {"name": "f", "filename": "/a.py", "module": None, "short_filename": "a.py", "line": 3, "locals": None}
    thread = {"pid": 1, "thread_id": 77, "thread_name": "MainThread", "active": True, "frames": [frame]}
    assert parse_py_spy([thread]) == [Thread(77, "MainThread", True, (Frame("/a.py", 3, "f"),))]


# ---- grouping ------------------------------------------------------------------------------------------------

LIBRARY = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def of(rank: int, *frames: Frame, note: str = "") -> RankStacks:
    return RankStacks(rank, 100 + rank, Source.HANDLER, main=frames, state="S", note=note)


def step(rank: int, line: int = 41, inner: int = 2500, library: str = "all_reduce") -> RankStacks:
    return of(
        rank,
        Frame(LIBRARY, inner, library),
        Frame("/job/train.py", line, "step"),
        Frame("/job/train.py", 88, "main"),
    )


def test_lines_count_in_files_of_the_users_only() -> None:
    groups = group_stacks({0: step(0), 1: step(1, inner=2510), 2: step(2, line=42), 3: step(3, library="isend")})
    assert [group.ranks for group in groups] == [(0, 1), (2,), (3,)]


@pytest.mark.parametrize("inner", ["/opt/app/launcher/in_rank/bootstrap.py", "/run/bootseer/rank/bootstrap.py"])
def test_forked_ranks_and_those_that_were_execd_are_alike(inner: str) -> None:
    one = of(0, Frame("/job/a.py", 1, "<module>"), Frame(inner, 900, "<module>"))
    forked = [Frame(inner.replace("bootstrap", "fork_server"), 90, "serve"), Frame(inner, 905, "<module>")]
    other = of(1, Frame("/job/a.py", 1, "<module>"), *forked)
    assert [group.ranks for group in group_stacks({0: one, 1: other})] == [(0, 1)]
    assert not any(
        "bootstrap" in line or "fork_server" in line for line in format_groups(group_stacks({1: other}))
    )


@pytest.mark.parametrize("tracer", ["/opt/app/launcher/in_rank/tracer.py", "/run/bootseer/rank/tracer.py"])
def test_the_tracer_is_not_shown(tracer: str) -> None:
    traced = (Frame(tracer, 290, "wait"), Frame("/job/train.py", 41, "step"))
    groups = group_stacks({0: of(0, *traced), 1: of(1, traced[1])})
    assert [group.ranks for group in groups] == [(0, 1)]
    assert "tracer" not in "".join(format_groups(groups))


def test_a_script_of_that_name_is_the_users() -> None:
    assert (
        len(
            group_stacks(
                {0: of(0, Frame("/job/bootstrap.py", 1, "f")), 1: of(1, Frame("/job/bootstrap.py", 2, "f"))}
            )
        )
        == 2
    )


def test_ranks_without_stacks_are_put_together_by_what_is_known() -> None:
    stuck = {n: RankStacks(n, n, Source.KERNEL, state="D", kernel=("nfs_wait", "read")) for n in (0, 2)}
    stopped = RankStacks(1, 1, Source.KERNEL, state="T", kernel=("do_signal_stop",), note="is stopped")
    assert [group.ranks for group in group_stacks({**stuck, 1: stopped})] == [(0, 2), (1,)]


RANKS = st.dictionaries(
    st.integers(0, 200),
    st.builds(lambda frames, note: of(0, *frames, note=note), st.lists(FRAMES, max_size=12), st.just("") | NAMES),
    max_size=40,
)


@given(RANKS, st.randoms(use_true_random=False))
def test_groups_are_a_partition_whatever_the_order(
    by_rank: Mapping[int, RankStacks], chance: random.Random
) -> None:
    groups = group_stacks(by_rank)
    ranks = [rank for group in groups for rank in group.ranks]
    assert sorted(ranks) == sorted(by_rank)
    assert [len(group.ranks) for group in groups] == sorted((len(group.ranks) for group in groups), reverse=True)
    shuffled = list(by_rank.items())
    chance.shuffle(shuffled)
    assert group_stacks(dict(shuffled)) == groups
    odd = find_odd(groups)
    assert not odd or 2 * len(odd) < len(ranks)


@given(RANKS, st.dictionaries(NAMES, st.lists(st.lists(st.integers(0, 200)), max_size=4), max_size=4))
def test_what_is_shown_is_bounded(
    by_rank: Mapping[int, RankStacks], layout: Mapping[str, list[list[int]]]
) -> None:
    lines = format_groups(group_stacks(by_rank), layout)
    assert 1 <= len(lines) <= 3 + MAX_GROUPS_SHOWN * (MAX_FRAMES_SHOWN + 4)
    assert all(len(line) <= WIDTH and line.isprintable() for line in lines)


# TP 2, PP 4, DP 4, as in ByteRobust's example: the ranks of one pipeline group are apart.
LAYOUT = {
    "tensor": [[2 * n, 2 * n + 1] for n in range(16)],
    "pipeline": [
        [tensor + 2 * data + 8 * stage for stage in range(4)] for data in range(4) for tensor in range(2)
    ],
    "data": [[tensor + 2 * data + 8 * stage for data in range(4)] for stage in range(4) for tensor in range(2)],
}


def test_odd_ranks_share_a_group() -> None:
    pipeline = LAYOUT["pipeline"][5]
    found = {rank: step(rank) for rank in range(32)}
    for rank, what in zip(pipeline, ("all_gather", "isend", "irecv", "irecv"), strict=True):
        found[rank] = step(rank, line=60, library=what)
    groups = group_stacks(found)
    assert find_odd(groups) == tuple(sorted(pipeline))
    assert [(each.name, each.number) for each in find_shared(pipeline, LAYOUT)] == [("pipeline", 5)]
    lines = format_groups(groups, LAYOUT)
    assert lines[0] == "stacks of 32 ranks: 4 different ones"
    assert lines[1].startswith("28 ranks (0-4, 6-12, ")
    assert lines[2] == "    all_reduce (torch/distributed/distributed_c10d.py:2500)"
    assert lines[3] == "    step (/job/train.py:41)"
    assert lines[-1] == "apart from the rest: 4 ranks (5, 13, 21, 29); all of them share pipeline group 5"


def test_one_odd_rank_is_named_with_its_groups() -> None:
    found = {rank: step(rank) for rank in range(32)}
    found[6] = step(6, line=1)
    last = format_groups(group_stacks(found), LAYOUT)[-1]
    assert last == "apart from the rest: rank 6, of tensor group 3, data group 0, pipeline group 6"
    assert format_groups(group_stacks(found))[-1] == "apart from the rest: rank 6"


def test_odd_ranks_of_different_groups() -> None:
    found = {rank: step(rank) for rank in range(32)}
    found[0], found[31] = step(0, line=1), step(31, line=1)
    last = format_groups(group_stacks(found), LAYOUT)[-1]
    assert last == "apart from the rest: ranks 0, 31; they share no parallel group"


def test_nobody_is_odd_without_a_majority() -> None:
    groups = group_stacks({0: step(0), 1: step(1, line=1)})
    assert find_odd(groups) == ()
    assert format_groups(groups)[-1] == "no stack is that of more than half of the ranks"
    assert format_groups(group_stacks({0: step(0), 1: step(1)}))[0] == "stacks of 2 ranks: all are equal"
    assert format_groups([]) == ["no stacks"]


def test_the_users_own_place_is_shown_below_a_deep_library() -> None:
    deep = [Frame(LIBRARY, n, f"f{n}") for n in range(30)]
    lines = format_groups(
        group_stacks({0: of(0, *deep, Frame("/job/a.py", 5, "train"), Frame("/job/a.py", 9, "main"))})
    )
    assert "    train (/job/a.py:5)" in lines
    assert lines[-1] == "    ... 1 more"
    assert any(line.endswith("... 23 more") for line in lines)


def test_what_only_the_kernel_tells_is_shown() -> None:
    stuck = RankStacks(
        3, 9, Source.KERNEL, state="D", kernel=("nfs_wait", "read"), note="has not answered for 2 s"
    )
    assert format_groups(group_stacks({3: stuck})) == [
        "the stack of 1 rank",
        "rank 3 (has not answered for 2 s):",
        "    in the kernel: nfs_wait < read (state D)",
    ]


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60))
def test_ranks_are_named(ranks: set[int]) -> None:
    text = name_ranks(ranks)
    if "..." not in text and len(ranks) > 2:
        inner = text.partition("(")[2].rstrip(")")
        named = [each.split("-") for each in inner.split(", ")]
        assert {rank for low, *high in named for rank in range(int(low), int((high or [low])[0]) + 1)} == ranks
    assert str(min(ranks)) in text
