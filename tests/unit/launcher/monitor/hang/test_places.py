"""Which rank the others may wait for, by stacks, and where each rank is, in one line."""

from __future__ import annotations

import pytest

from launcher.monitor.hang.places import MAX_PLACES, describe_place, describe_places
from launcher.monitor.hang.waiting import AbsentRanks, find_absent, find_collective
from launcher.monitor.samples.stacks import (
    MAX_CHILDREN,
    ChildProcess,
    Frame,
    RankStacks,
    Source,
    format_groups,
    group_stacks,
    waits_for_child,
)
from launcher.monitor.watch import pack_stacks, unpack_stacks

TORCH = "/venv/lib/python3.11/site-packages/torch"
MAIN = Frame("/job/train.py", 40, "main")
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
    Frame(f"{TORCH}/autograd/__init__.py", 395, "backward"),
    Frame(f"{TORCH}/_tensor.py", 623, "backward"),
    Frame("/job/train.py", 35, "main"),
)
REDUCE = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    Frame("/job/train.py", 37, "main"),
)
LOCK = (Frame("/job/train.py", 21, "wait_for_lock"), MAIN)
READ = (Frame("/job/data.py", 8, "read"), MAIN)
LOADER = (
    Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 1288, "_try_get_data"),
    Frame("/job/train.py", 30, "main"),
)
GRADIENT = (Frame("/job/loss.py", 5, "backward"), *BACKWARD)  # the user's own function, called by torch
PLACES = {"b": BACKWARD, "r": REDUCE, "l": LOCK, "f": READ, "d": LOADER, "g": GRADIENT}


def stacks(places: str) -> dict[int, RankStacks]:
    """Make the stacks of ranks, one letter each."""
    return {
        rank: RankStacks(rank, 100 + rank, Source.HANDLER, main=PLACES[place]) for rank, place in enumerate(places)
    }


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ("bl", ((1,), (0,), True)),
        ("lb", ((0,), (1,), True)),
        ("rl", ((1,), (0,), False)),
        ("bd", ((1,), (0,), True)),
        ("bg", ((1,), (0,), True)),  # in the user's part of backward
        ("bb", None),
        ("br", None),
        ("lf", None),
        ("ll", None),
        ("bbl", ((2,), (0, 1), True)),
        ("brl", ((2,), (0, 1), True)),
        ("blf", None),  # most are elsewhere
        ("rrrrrrrl", ((7,), (0, 1, 2, 3, 4, 5, 6), False)),
        ("bbbbbrll", ((6, 7), (0, 1, 2, 3, 4, 5), True)),
        ("bblfdbbb", ((2, 3, 4), (0, 1, 5, 6, 7), True)),
        ("bbblllll", None),
        ("bbbbbbbb", None),
        ("llllllll", None),
    ],
)
def test_ranks_that_are_not_where_the_others_may_wait(
    places: str, found: tuple[tuple[int, ...], tuple[int, ...], bool] | None
) -> None:
    assert find_absent(stacks(places), len(places)) == (None if found is None else AbsentRanks(*found))


def test_a_rank_without_a_python_stack_may_be_any_of_them() -> None:
    known = stacks("bbl")
    assert find_absent(known, 4) is None
    known[3] = RankStacks(3, 103, Source.KERNEL, kernel=("futex_do_wait",))
    assert find_absent(known, 4) is None


def test_the_collective_that_the_script_has_called() -> None:
    assert find_collective(stacks("r")[0]) == "all_reduce"
    assert find_collective(stacks("b")[0]) == ""


@pytest.mark.parametrize(
    ("places", "line"),
    [
        (
            "bl",
            (
                "2 ranks have 2 different stacks: rank 0 is in backward, called at train.py:35 (DDP and FSDP"
                " communicate there), rank 1 is in wait_for_lock (train.py:21)"
            ),
        ),
        (
            "rrrd",
            (
                "4 ranks have 2 different stacks: 3 ranks (0-2) are in all_reduce, called at train.py:37, rank 3"
                " is in select (selectors.py:415), called at train.py:30"
            ),
        ),
        ("ll", "all 2 ranks are in wait_for_lock (train.py:21)"),
        ("l", "rank 0 is in wait_for_lock (train.py:21)"),
        ("", ""),
    ],
)
def test_where_the_ranks_are(places: str, line: str) -> None:
    assert describe_places(group_stacks(stacks(places))) == line


def test_a_named_rank_is_not_left_out() -> None:
    all_ranks = stacks("bbllffddrrl")
    all_ranks[10] = all_ranks[10]._replace(main=(Frame("/job/train.py", 99, "last"), MAIN))
    groups = group_stacks(all_ranks)
    assert len(groups) == MAX_PLACES + 2
    assert "the rest at 2 other places" in describe_places(groups)
    assert "last" not in describe_places(groups)
    line = describe_places(groups, (10,))
    assert "rank 10 is in last (train.py:99)" in line and line.endswith("the rest at 2 other places")


def test_stacks_that_differ_below_the_place_are_counted() -> None:
    deep = stacks("ll")
    deep[1] = deep[1]._replace(main=(LOCK[0], Frame("/job/train.py", 77, "other")))
    assert describe_places(group_stacks(deep)) == (
        "2 ranks have 2 different stacks, and all are in wait_for_lock (train.py:21)"
    )


def test_ranks_without_python_stacks() -> None:
    known = {
        0: RankStacks(0, 100, Source.KERNEL, kernel=("futex_do_wait", "futex_wait")),
        1: RankStacks(1, 101, Source.NOTHING, note="is stopped: SIGSTOP, or a debugger"),
        2: RankStacks(2, 102, Source.NOTHING),
        3: RankStacks(3, 103, Source.HANDLER, main=(Frame("/job/a\nb.py", 0, "x" * 200),)),
    }
    line = describe_places(group_stacks(known))
    assert "rank 0 is in futex_do_wait of the kernel" in line
    assert "rank 1 is without a Python stack (is stopped: SIGSTOP, or a debugger)" in line
    assert "rank 2 is without a stack" in line
    assert "a?b.py:?" in line and len(line) < 400 and "\n" not in line


FORK = Frame("/usr/lib/python3.11/multiprocessing/process.py", 314, "_bootstrap")
IDLE = (LOADER[0], Frame(f"{TORCH}/utils/data/_utils/worker.py", 275, "_worker_loop"), FORK, MAIN)


def worker(pid: int, *frames: Frame) -> ChildProcess:
    return ChildProcess(pid, "pt_data_worker", "S", "futex_do_wait", frames)


@pytest.mark.parametrize(
    ("children", "end"),
    [
        ((), ", called at train.py:30"),
        ((worker(7),), ", and waits for its child process 7 (pt_data_worker)"),
        ((worker(7, *IDLE), worker(8, *IDLE)), ", and waits for one of its 2 child processes"),
        (
            (worker(7, *IDLE), worker(8, READ[0], FORK, MAIN)),
            ", and waits for its child process 8 in read (data.py:8)",
        ),
        ((worker(7, LOADER[0], READ[0], FORK),), " 7 in select (selectors.py:415), called at data.py:8"),
    ],
)
def test_the_child_process_that_a_rank_waits_for(children: tuple[ChildProcess, ...], end: str) -> None:
    rank = stacks("d")[0]._replace(children=children)
    assert waits_for_child(rank)
    assert describe_place(rank).endswith(end)
    text = "\n".join(format_groups(group_stacks({0: rank})))
    assert ("waits for a child process" in text) == bool(children)
    assert ("py-spy dump --pid 7" in text) == (children[:1] == (worker(7),))
    assert unpack_stacks(pack_stacks({0: rank}, 10_000)) == {0: rank}


def test_only_some_child_processes_are_shown() -> None:
    rank = stacks("d")[0]._replace(children=tuple(worker(pid, *IDLE) for pid in range(1, MAX_CHILDREN + 1)))
    text = "\n".join(format_groups(group_stacks({0: rank})))
    assert "      12 more child processes" in text and text.count("(pt_data_worker)") == 4
    assert len(pack_stacks({0: rank}, 600)) <= 600


@pytest.mark.parametrize("place", ["b", "r", "l", "f", "g"])
def test_ranks_that_wait_for_no_child_process(place: str) -> None:
    assert not waits_for_child(stacks(place)[0])
