"""Stacks of the ranks of a job: read, put together where they are the same, shown. Pure.

In: what faulthandler or py-spy printed of a process, or only what the kernel says of it. Out: groups of ranks that
do the same, the ranks that are apart from the rest, and the parallel group that these share (ByteRobust, 4.2:
string match, dominant groups are healthy). How stacks are had of live ranks: collector.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from bootseer.counted import counted

MOST_THREADS = 128  # of a process; faulthandler prints 100
MOST_FRAMES = 128  # of a thread; the same
MOST_GROUPS_SHOWN = 8
MOST_FRAMES_SHOWN = 8
MOST_NAMED = 12  # runs of ranks in one line
WIDTH = 140
_THREAD = re.compile(r"(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_ALONE = "Stack (most recent call first):\n"  # of the thread that has got the signal, and no other
# Files of the interpreter and of what is installed: there a line tells no more than the function. Not the user's.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64|32)?/python\d(?:\.\d+)?(?=/)|^<")
_OURS = re.compile(r"(?:^|/)(?:launcher|bootseer/rank)/(?:inside|preloaded)\.py$")
_TRACER = re.compile(r"(?:^|/)(?:launcher|bootseer/rank)/tracer\.py$")


class Frame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int  # 0: not known
    function: str


class Thread(NamedTuple):
    """A thread of Python's."""

    ident: int  # as Python names it
    name: str  # "" where it is not told
    is_current: bool  # the one that has printed all this
    frames: tuple[Frame, ...]  # innermost first


class Source(Enum):
    """Where it is from."""

    HANDLER = "handler"  # the rank itself, in a signal handler
    PY_SPY = "py-spy"
    KERNEL = "kernel"  # no Python to be had
    NOTHING = "nothing"


class RankStacks(NamedTuple):
    """What one rank is doing."""

    rank: int
    pid: int
    source: Source
    threads: tuple[Thread, ...] = ()
    main: tuple[Frame, ...] = ()  # of the main thread, innermost first
    state: str = ""  # of the main thread, of proc(5)
    kernel: tuple[str, ...] = ()  # functions in which the main thread waits, innermost first
    note: str = ""  # why there is no more, or what is odd: "is stopped ..."; it follows the rank's name
    looks: int = 1  # at its main thread, for one question
    comes_along: bool = False  # it was in different functions at these


class StackGroup(NamedTuple):
    """Ranks that do the same."""

    ranks: tuple[int, ...]
    example: RankStacks  # the first of them


# ---- reading -------------------------------------------------------------------------------------------------


def parse_stacks(text: str) -> list[Thread]:
    """Threads of faulthandler's text, in its order; what is not understood is left out."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    is_alone = False  # what follows is of another question
    for line in text.splitlines():
        if line == _ALONE[:-1]:
            is_alone = True
        elif found := _THREAD.match(line):
            is_alone = False
            if len(threads) >= MOST_THREADS:
                break
            frames = []
            threads.append(Thread(int(found[2], 16), found[3] or "", found[1] != "Thread", ()))
        elif threads and not is_alone and len(frames) < MOST_FRAMES and (found := _FRAME.fullmatch(line)):
            frames.append(_read_frame(found))
            threads[-1] = threads[-1]._replace(frames=tuple(frames))
    return threads


def _read_frame(found: re.Match[str]) -> Frame:
    number = 0 if found[2] == "???" else int(found[2][:9])
    return Frame("???" if found[1] is None else found[1], number, found[3])


def parse_looks(text: str) -> list[tuple[Frame, ...]]:
    """Where the main thread was each time that it was asked alone, in the same text as stacks of all threads."""
    found = []
    for part in text.split(_ALONE)[1:]:
        frames: list[Frame] = []
        for line in part.splitlines():
            if (frame := _FRAME.fullmatch(line)) is None or len(frames) == MOST_FRAMES:
                break
            frames.append(_read_frame(frame))
        found.append(tuple(frames))
    return found


def calls_of(frames: Sequence[Frame]) -> tuple[tuple[str, str], ...]:
    """File and function of each frame, innermost first: whoever comes along in its code changes these."""
    return tuple((frame.file, frame.function) for frame in frames)


def parse_py_spy(found: Any) -> list[Thread]:
    """Threads of `py-spy dump --json`, decoded. What is not understood is left out."""
    threads: list[Thread] = []
    for each in found[:MOST_THREADS] if isinstance(found, list) else ():
        if not isinstance(each, dict):
            continue
        frames = []
        listed = each.get("frames")
        for frame in listed[:MOST_FRAMES] if isinstance(listed, list) else ():
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
    """Frames of the main thread. Args: ident: of it; 0: not known, then by its name, or as faulthandler has it."""
    ways = (
        [thread for thread in threads if ident and thread.ident == ident],
        [thread for thread in threads if thread.name == "MainThread"],
        [thread for thread in threads if thread.is_current],  # the kernel prefers the main thread for a signal
        threads[-1:],  # they are printed newest first
    )
    return next((found[0].frames for found in ways if found), ())


# ---- grouping ------------------------------------------------------------------------------------------------


def group_stacks(by_rank: Mapping[int, RankStacks]) -> list[StackGroup]:
    """Ranks with equal stacks of their main threads: the largest group first, then by the first rank.

    Lines count in files of the user's, functions only in what is installed; addresses never.
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
    """Without those of ours: below the script's, which a rank that was exec'd has, and between, of the tracer."""
    end = len(frames)
    while end > 1 and _OURS.search(frames[end - 1].file):
        end -= 1
    return [frame for frame in frames[:end] if not _TRACER.search(frame.file)] or frames[:end]


def is_installed(frame: Frame) -> bool:
    """Whether it is in no file of the user's."""
    return _INSTALLED.search(frame.file) is not None


def find_odd(groups: Sequence[StackGroup]) -> tuple[int, ...]:
    """Ranks that are apart from the rest: none where no group has more than half of all."""
    count = sum(len(group.ranks) for group in groups)
    if not groups or 2 * len(groups[0].ranks) <= count:
        return ()
    return tuple(sorted(rank for group in groups[1:] for rank in group.ranks))


class Shared(NamedTuple):
    """A parallel group that some ranks share."""

    name: str  # of the kind: tensor, pipeline, data
    number: int
    ranks: tuple[int, ...]  # all of it


def find_shared(odd: Sequence[int], layout: Mapping[str, Sequence[Sequence[int]]]) -> list[Shared]:
    """Groups that hold all odd ranks, smallest first; not those that hold every rank there is."""
    found = []
    for name, groups in layout.items():
        for number, ranks in enumerate(groups):
            if odd and len(groups) > 1 and set(odd) <= set(ranks):
                found.append(Shared(name, number, tuple(ranks)))
    return sorted(found, key=lambda each: (len(each.ranks), each.name, each.number))


# ---- showing -------------------------------------------------------------------------------------------------


def format_groups(
    groups: Sequence[StackGroup], layout: Mapping[str, Sequence[Sequence[int]]] | None = None
) -> list[str]:
    """Lines for people: what each group does, who is apart and what these share. Bounded however many there are.

    Args: layout: name of a parallel dimension -> its groups of ranks.
    """
    count = sum(len(group.ranks) for group in groups)
    if not count:
        return ["no stacks"]
    kinds = "all do the same" if len(groups) == 1 else f"{len(groups)} different ones"
    lines = [f"stacks of {counted(count, 'rank')}: {kinds}" if count > 1 else "the stack of 1 rank"]
    for group in groups[:MOST_GROUPS_SHOWN]:
        lines += _format_group(group)
    if left := groups[MOST_GROUPS_SHOWN:]:
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
    """A line that says in which parallel groups these are, all together; none where that is not known."""
    shared = find_shared(ranks, layout)
    return [f"  {name_ranks(ranks)} in the job's layout: {_name_shared(shared)}"] if shared else []


def _name_shared(shared: Sequence[Shared]) -> str:
    return ", ".join(
        f"{each.name} {each.number}" if each.name.endswith("stage") else f"{each.name} group {each.number}"
        for each in shared[:4]
    )


def _format_group(group: StackGroup) -> list[str]:
    example = group.example
    note = f" ({example.note})" if example.note else ""
    lines = [f"{name_ranks(group.ranks)}{note}:"]
    frames = own_frames(example.main)
    shown = [*range(len(frames))][:MOST_FRAMES_SHOWN]
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
        kernel = " < ".join(example.kernel[:MOST_FRAMES_SHOWN]) or "nothing is seen of it"
        lines.append(f"    in the kernel: {kernel}" + (f" (state {example.state})" if example.state else ""))
    return lines


def _short(frame: Frame) -> str:
    """The end of a path, which tells more than its beginning."""
    ends = [found.end() for found in _INSTALLED.finditer(frame.file) if found.group() != "<"]
    path = frame.file[ends[-1] :].lstrip("/") if ends else frame.file
    return path if len(path) <= 70 else "..." + path[-67:]


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `12 ranks (0-7, 9, 12-14)`; long lists are cut."""
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
    text = ", ".join(named[:MOST_NAMED]) + (", ..." if len(named) > MOST_NAMED else "")
    return f"ranks {text}" if len(ordered) <= 2 else f"{len(ordered)} ranks ({text})"


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)
