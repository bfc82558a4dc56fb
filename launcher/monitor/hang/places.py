"""PURE: groups of ranks with equal stacks -> where they are in the user's code, in the line of a hang report.

The stacks below the line show all calls. The line has the innermost call, and the last line of the user's code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bootseer.counted import counted
from launcher.monitor.hang.waiting import find_collective, is_in_backward
from launcher.monitor.samples.stacks import (
    Frame,
    RankStacks,
    StackGroup,
    child_frames,
    find_users_frame,
    is_installed,
    name_ranks,
    order_children,
    own_frames,
)

MAX_PLACES = 4
MAX_NAME_CHARACTERS = 60
COMMUNICATES = "DDP and FSDP communicate there"


def describe_places(groups: Sequence[StackGroup], named: Collection[int] = ()) -> str:
    """Return what each group does, in one line; "" without Python stacks. Args: named: ranks to include."""
    ranks_at: dict[str, list[int]] = {}
    for group in groups:
        ranks_at.setdefault(describe_place(group.example), []).extend(group.ranks)
    count = sum(map(len, ranks_at.values()))
    if not any(group.example.main for group in groups):
        return ""
    head = f"{counted(count, 'rank')} {'have' if count > 1 else 'has'} {len(groups)} different stacks"
    if len(ranks_at) == 1:
        ((what, ranks),) = ranks_at.items()
        if len(groups) > 1:
            return f"{head}, and all are {what}"
        return f"all {count} ranks are {what}" if count > 1 else f"{name_ranks(ranks)} is {what}"
    places = sorted(ranks_at.items(), key=lambda place: (-len(place[1]), min(place[1])))
    shown = places[:MAX_PLACES]
    if not any(set(named) & set(ranks) for _, ranks in shown):
        shown[-1:] = [place for place in places[MAX_PLACES - 1 :] if set(named) & set(place[1])][:1] or shown[-1:]
    shown.sort(key=lambda place: (-len(place[1]), min(place[1])))
    told = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {what}" for what, ranks in shown]
    if len(places) > len(shown):
        told.append(f"the rest at {counted(len(places) - len(shown), 'other place')}")
    return f"{head}: {', '.join(told)}"


def describe_place(stacks: RankStacks) -> str:
    """Return where a rank is: `in wait_for_lock (train.py:21)`."""
    frames = own_frames(stacks.main)
    if not frames:
        if stacks.note:
            return f"without a Python stack ({stacks.note})"
        return f"in {stacks.kernel[0]} of the kernel" if stacks.kernel else "without a stack"
    users = next((frame for frame in frames if not is_installed(frame)), None)
    called = "" if users is None else f", called at {_name_line(users)}"
    if operation := find_collective(stacks):
        return f"in {_cut(operation)}{called}"
    if is_in_backward(stacks):
        return f"in backward{called} ({COMMUNICATES})"
    first = frames[0]
    return f"in {_cut(first.function)} ({_name_line(first)})" + ("" if users is first else called) + _for(stacks)


def _for(stacks: RankStacks) -> str:
    """Return for which child process a rank waits: the one in the user's code, or the only one."""
    if not stacks.children:
        return ""
    first = order_children(stacks.children)[0]
    frame = find_users_frame(first)
    if frame is not None:
        innermost = child_frames(first)[0]
        at = f"in {_cut(innermost.function)} ({_name_line(innermost)})"
        at += "" if frame is innermost else f", called at {_name_line(frame)}"
        return f", and waits for its child process {first.pid} {at}"
    if len(stacks.children) == 1:
        return f", and waits for its child process {first.pid} ({_cut(first.name)})"
    return f", and waits for one of its {len(stacks.children)} child processes"


def _name_line(frame: Frame) -> str:
    return f"{_cut(frame.file.rpartition('/')[2])}:{frame.line or '?'}"


def _cut(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= MAX_NAME_CHARACTERS else text[: MAX_NAME_CHARACTERS - 3] + "..."
