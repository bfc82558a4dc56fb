"""Stacks of the ranks of a job: parsed, grouped where they are equal, formatted. Pure.

In: the output of faulthandler or py-spy for a process, or only what the kernel reports of it. Out: groups of ranks
with equal stacks, the ranks that are apart from the rest, and the parallel group that these share (ByteRobust,
4.2: string match, dominant groups are healthy). stack_collector.py gets the stacks of live ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple

from bootseer.counted import counted

MAX_THREADS = 128  # of a process; faulthandler prints 100
MAX_FRAMES = 128  # of a thread; the same
MAX_GROUPS_SHOWN = 8
MAX_FRAMES_SHOWN = 8
MAX_NAMED = 12  # runs of ranks in one line
MAX_CHILDREN = 16  # of a rank
MAX_CHILDREN_SHOWN, MAX_CHILD_FRAMES_SHOWN = 4, 4
WIDTH = 140
_THREAD = re.compile(r"(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ALONE = "Stack (most recent call first):\n"  # only of the thread that got the signal
# Files of the interpreter and of installed packages, not the user's: a line adds nothing to the function.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64|32)?/python\d(?:\.\d+)?(?=/)|^<")
_OURS = re.compile(r"(?:^|/)(?:launcher/in_rank|bootseer/rank)/(?:bootstrap|fork_server)\.py$")
# Calls in which a process waits for another one that it has started.
_FOR_CHILD = re.compile(
    r"/(?:torch/utils/data/dataloader|subprocess|(?:multiprocessing|concurrent/futures)/\w+)\.py$"
)
_FORKED = re.compile(r"/multiprocessing/process\.py$")  # below that are calls of the process that has forked
_TRACER = re.compile(r"(?:^|/)(?:launcher/in_rank|bootseer/rank)/tracer\.py$")


class Frame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int  # 0: not known
    function: str


class Thread(NamedTuple):
    """A Python thread."""

    ident: int  # as in Python
    name: str  # "" if unknown
    is_current: bool  # the one that has printed these stacks
    frames: tuple[Frame, ...]  # innermost first


class Source(Enum):
    HANDLER = "handler"  # the rank itself, in a signal handler
    PY_SPY = "py-spy"
    KERNEL = "kernel"  # no Python stacks available
    NOTHING = "nothing"


class ChildProcess(NamedTuple):
    """A child process of a rank that waits for one."""

    pid: int
    name: str  # as ps shows it
    state: str
    wait: str  # kernel function in which it waits
    main: tuple[Frame, ...] = ()  # of its main thread, innermost first; () if unknown


class RankStacks(NamedTuple):
    rank: int
    pid: int
    source: Source
    threads: tuple[Thread, ...] = ()
    main: tuple[Frame, ...] = ()  # of the main thread, innermost first
    state: str = ""  # of the main thread, of proc(5)
    kernel: tuple[str, ...] = ()  # functions in which the main thread waits, innermost first
    note: str = ""  # why there is no more, or what is unusual: "is stopped ..."; it follows the rank's name
    looks: int = 1  # samples of its main thread, for one query
    comes_along: bool = False  # it was in different functions in these samples
    children: tuple[ChildProcess, ...] = ()  # of a rank that waits for one


class StackGroup(NamedTuple):
    """Ranks with equal stacks."""

    ranks: tuple[int, ...]
    example: RankStacks  # the first of them


# ---- reading -------------------------------------------------------------------------------------------------


def parse_stacks(text: str) -> list[Thread]:
    """Parse the threads of faulthandler's text, in its order; skip lines that do not match."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    is_alone = False  # the following lines answer another query
    for line in text.splitlines():
        if line == _ALONE[:-1]:
            is_alone = True
        elif found := _THREAD.match(line):
            is_alone = False
            if len(threads) >= MAX_THREADS:
                break
            frames = []
            threads.append(Thread(int(found[2], 16), found[3] or "", found[1] != "Thread", ()))
        elif threads and not is_alone and len(frames) < MAX_FRAMES and (found := _FRAME.fullmatch(line)):
            frames.append(_read_frame(found))
            threads[-1] = threads[-1]._replace(frames=tuple(frames))
    return threads


def _read_frame(found: re.Match[str]) -> Frame:
    number = 0 if found[2] == "???" else int(found[2][:9])
    return Frame("???" if found[1] is None else found[1], number, found[3])


def parse_looks(text: str) -> list[tuple[Frame, ...]]:
    """Parse the samples of the main thread alone, in the same text as stacks of all threads."""
    found = []
    for part in text.split(_ALONE)[1:]:
        frames: list[Frame] = []
        for line in part.splitlines():
            if (frame := _FRAME.fullmatch(line)) is None or len(frames) == MAX_FRAMES:
                break
            frames.append(_read_frame(frame))
        found.append(tuple(frames))
    return found


def calls_of(frames: Sequence[Frame]) -> tuple[tuple[str, str], ...]:
    """Return file and function of each frame, innermost first: they change when a rank makes progress."""
    return tuple((frame.file, frame.function) for frame in frames)


def parse_py_spy(found: Any) -> list[Thread]:
    """Parse the threads of a decoded `py-spy dump --json`; skip invalid parts."""
    threads: list[Thread] = []
    for each in found[:MAX_THREADS] if isinstance(found, list) else ():
        if not isinstance(each, dict):
            continue
        frames = []
        listed = each.get("frames")
        for frame in listed[:MAX_FRAMES] if isinstance(listed, list) else ():
            if isinstance(frame, dict):
                line = frame.get("line")
                number = line if isinstance(line, int) else 0
                name = str(frame.get("name")).rpartition(".")[2]  # without its class, as faulthandler has it
                frames.append(Frame(str(frame.get("filename")), number, name))
        ident = each.get("thread_id")
        is_active = each.get("active") is True
        threads.append(
            Thread(
                ident if isinstance(ident, int) else 0,
                str(each.get("thread_name") or ""),
                is_active,
                tuple(frames),
            )
        )
    return threads


def find_main(threads: Sequence[Thread], ident: int) -> tuple[Frame, ...]:
    """Return the frames of the main thread. Args: ident: its own; 0: unknown, then by name or order."""
    ways = (
        [thread for thread in threads if ident and thread.ident == ident],
        [thread for thread in threads if thread.name == "MainThread"],
        [thread for thread in threads if thread.is_current],  # the kernel prefers the main thread for a signal
        threads[-1:],  # they are printed newest first
    )
    return next((found[0].frames for found in ways if found), ())


# ---- grouping ------------------------------------------------------------------------------------------------


def group_stacks(by_rank: Mapping[int, RankStacks]) -> list[StackGroup]:
    """Group ranks with equal stacks of their main threads: the largest group first, then by the first rank.

    Line numbers count in the user's files, only functions in installed files; addresses never.
    """
    groups: dict[object, list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(_key(by_rank[rank]), []).append(rank)
    found = [StackGroup(tuple(ranks), by_rank[ranks[0]]) for ranks in groups.values()]
    return sorted(found, key=lambda group: (-len(group.ranks), group.ranks))


def _key(stacks: RankStacks) -> object:
    if stacks.main:
        own = own_frames(stacks.main)
        places = tuple((each.file, 0 if is_installed(each) else each.line, each.function) for each in own)
        return places, stacks.note
    return stacks.note, stacks.state, stacks.kernel


def own_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Drop Bootseer's frames: those below the script's in an exec'd rank, and the tracer's in between."""
    end = len(frames)
    while end > 1 and _OURS.search(frames[end - 1].file):
        end -= 1
    return [frame for frame in frames[:end] if not _TRACER.search(frame.file)] or frames[:end]


def is_installed(frame: Frame) -> bool:
    """Return whether the frame is in no file of the user."""
    return _INSTALLED.search(frame.file) is not None


def waits_for_child(stacks: RankStacks) -> bool:
    """Return whether the rank is in a call that waits for another process, such as a worker of a DataLoader."""
    return any(_FOR_CHILD.search(frame.file) for frame in takewhile(is_installed, own_frames(stacks.main)))


def child_frames(child: ChildProcess) -> Sequence[Frame]:
    """Return its frames, without those that it has from the process that forked it."""
    return tuple(takewhile(lambda frame: not _FORKED.search(frame.file), own_frames(child.main)))


def find_users_frame(child: ChildProcess) -> Frame | None:
    """Return the innermost frame in a file of the user; None for a worker that waits for work."""
    return next((frame for frame in child_frames(child) if not is_installed(frame)), None)


def order_children(children: Iterable[ChildProcess]) -> list[ChildProcess]:
    """Return those in the user's code first, then those without a stack."""
    return sorted(children, key=lambda each: (find_users_frame(each) is None, bool(each.main), each.pid))


def find_odd(groups: Sequence[StackGroup]) -> tuple[int, ...]:
    """Return the ranks that are apart from the rest: none if no group has more than half of all."""
    count = sum(len(group.ranks) for group in groups)
    if not groups or 2 * len(groups[0].ranks) <= count:
        return ()
    return tuple(sorted(rank for group in groups[1:] for rank in group.ranks))


class SharedGroup(NamedTuple):
    """A parallel group that some ranks share."""

    name: str  # of the kind: tensor, pipeline, data
    number: int
    ranks: tuple[int, ...]  # all of it


def find_shared(odd: Sequence[int], layout: Mapping[str, Sequence[Sequence[int]]]) -> list[SharedGroup]:
    """Find groups that hold all odd ranks, smallest first; skip those that hold every rank."""
    found = []
    for name, groups in layout.items():
        for number, ranks in enumerate(groups):
            if odd and len(groups) > 1 and set(odd) <= set(ranks):
                found.append(SharedGroup(name, number, tuple(ranks)))
    return sorted(found, key=lambda each: (len(each.ranks), each.name, each.number))


# ---- showing -------------------------------------------------------------------------------------------------


def format_groups(
    groups: Sequence[StackGroup], layout: Mapping[str, Sequence[Sequence[int]]] | None = None
) -> list[str]:
    """Return lines for users: the groups, the ranks apart and the groups they share; bounded in size.

    Args: layout: name of a parallel dimension -> its groups of ranks.
    """
    count = sum(len(group.ranks) for group in groups)
    if not count:
        return ["no stacks"]
    kinds = "all are equal" if len(groups) == 1 else f"{len(groups)} different ones"
    lines = [f"stacks of {counted(count, 'rank')}: {kinds}" if count > 1 else "the stack of 1 rank"]
    for group in groups[:MAX_GROUPS_SHOWN]:
        lines += _format_group(group)
    if left := groups[MAX_GROUPS_SHOWN:]:
        others = [rank for group in left for rank in group.ranks]
        lines.append(f"{counted(len(left), 'more kind')} of {name_ranks(others)}")
    odd = find_odd(groups)
    if odd:
        lines.append(f"apart from the rest: {name_ranks(odd)}{_format_shared(odd, layout or {})}")
    elif len(groups) > 1:
        lines.append("no stack is that of more than half of the ranks")
    return [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in map(_printable, lines)]


def _format_shared(odd: Sequence[int], layout: Mapping[str, Sequence[Sequence[int]]]) -> str:
    shared = find_shared(odd, layout)
    if not shared:
        return "; they share no parallel group" if layout and len(odd) > 1 else ""
    where = _name_shared(shared)
    return f"; all of them share {where}" if len(odd) > 1 else f", of {where}"


def name_place(ranks: Sequence[int], layout: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """Return a line with the parallel groups that hold all these ranks; none if unknown."""
    shared = find_shared(ranks, layout)
    return [f"  {name_ranks(ranks)} in the job's layout: {_name_shared(shared)}"] if shared else []


def _name_shared(shared: Sequence[SharedGroup]) -> str:
    return ", ".join(
        f"{each.name} {each.number}" if each.name.endswith("stage") else f"{each.name} group {each.number}"
        for each in shared[:4]
    )


def _format_group(group: StackGroup) -> list[str]:
    example = group.example
    note = f" ({example.note})" if example.note else ""
    lines = [f"{name_ranks(group.ranks)}{note}:"]
    frames = own_frames(example.main)
    shown = [*range(len(frames))][:MAX_FRAMES_SHOWN]
    users = [place for place, frame in enumerate(frames) if not is_installed(frame)]
    if users and users[0] not in shown:
        shown[-1] = users[0]
    last = -1
    for place in shown:
        if place > last + 1:
            lines.append(f"    ... {place - last - 1} more")
        frame = frames[place]
        lines.append(f"    {frame.function} ({_short(frame)}:{frame.line or '?'})")
        last = place
    if len(frames) > last + 1:
        lines.append(f"    ... {len(frames) - last - 1} more")
    if not frames:
        kernel = " < ".join(example.kernel[:MAX_FRAMES_SHOWN]) or "nothing is known"
        lines.append(f"    in the kernel: {kernel}" + (f" (state {example.state})" if example.state else ""))
    return lines + _format_children(example)


def _format_children(stacks: RankStacks) -> list[str]:
    if not stacks.children:
        return []
    lines = [f"    rank {stacks.rank} (pid {stacks.pid}) waits for a child process:"]
    ordered = order_children(stacks.children)
    for child in ordered[:MAX_CHILDREN_SHOWN]:
        where = f"state {child.state}" + (f", in {child.wait}" if child.wait else "")
        lines.append(f"      pid {child.pid} ({child.name}), {where}")
        frames = child_frames(child)
        for frame in frames[:MAX_CHILD_FRAMES_SHOWN]:
            lines.append(f"        {frame.function} ({_short(frame)}:{frame.line or '?'})")
        if len(frames) > MAX_CHILD_FRAMES_SHOWN:
            lines.append(f"        ... {len(frames) - MAX_CHILD_FRAMES_SHOWN} more")
        if not frames:
            lines.append(f"        for its Python stack, run: py-spy dump --pid {child.pid}")
    if left := ordered[MAX_CHILDREN_SHOWN:]:
        lines.append(f"      {counted(len(left), 'more child process', 'more child processes')}")
    return lines


def _short(frame: Frame) -> str:
    """Return the end of a path, which is more informative than its beginning."""
    ends = [found.end() for found in _INSTALLED.finditer(frame.file) if found.group() != "<"]
    path = frame.file[ends[-1] :].lstrip("/") if ends else frame.file
    return path if len(path) <= 70 else "..." + path[-67:]


def name_ranks(ranks: Iterable[int]) -> str:
    """Format as `rank 3`, or `12 ranks (0-7, 9, 12-14)`; truncate long lists."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    named = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    text = ", ".join(named[:MAX_NAMED]) + (", ..." if len(named) > MAX_NAMED else "")
    return f"ranks {text}" if len(ordered) <= 2 else f"{len(ordered)} ranks ({text})"


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)
