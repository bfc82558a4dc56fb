"""PURE: which names in a folder are single saves, and which of them is the newest.

In: the entries of a folder, and the texts of pointers that savers leave in it. Out: candidates, the one to take
first at the front, and whether the folder is a save itself. Nothing here says that any of them is whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.checkpoint.file_formats import WEIGHTS
from bootseer.checkpoint.save_rules import is_state, is_weights
from bootseer.storage.protocol import Entry

# Written last by their savers, with the number or the name of the save that is complete: DeepSpeed, Megatron,
# mmengine and detectron2.
POINTERS = ("latest_checkpointed_iteration.txt", "latest", "last_checkpoint")
_STEPS = r"steps?|iters?|iterations?|updates?|global_?steps?"
_OTHERS = r"checkpoints?|ckpts?|epochs?|saves?|batch|samples|tokens"
_NUMBERED = r"(?:^|[^a-z])(?:{})[-_=.]?([0-9]{{1,18}})(?![0-9])"
_STEP = re.compile(_NUMBERED.format(_STEPS), re.IGNORECASE)
_OTHER = re.compile(_NUMBERED.format(_OTHERS), re.IGNORECASE)
_COMPOSER = re.compile(r"(?:^|[^a-z])ep[0-9]+-ba([0-9]{1,18})(?![0-9])")
_NUMBER = re.compile(r"[0-9]{1,18}")
_UNFINISHED = re.compile(r"(^|[._-])(tmp|temp|partial|incomplete)([._-]|$)", re.IGNORECASE)
_UNFINISHED_FILE = re.compile(r"\.(tmp|temp|part|partial|incomplete|crswap)$", re.IGNORECASE)
_RANK = re.compile(r"[-_.]?rank[-_]?\d+", re.IGNORECASE)
_SHARD = re.compile(r"\d{4,6}-of-\d{4,6}")
_NEWEST = re.compile(r"(?:^|[^a-z])(?:last|latest|newest|final)(?:[^a-z]|$)", re.IGNORECASE)
_BEST = re.compile(r"(?:^|[^a-z])best(?:[^a-z]|$)", re.IGNORECASE)
_FLAX = re.compile(r"checkpoint_\d+")
_PART_OF_IT = re.compile(r"optim|sched|model|ema|state", re.IGNORECASE)


class Candidate(NamedTuple):
    """A single save: a folder, or a file, or the files of all ranks."""

    name: str  # of the folder or of the first file
    files: tuple[str, ...] = ()  # () for a folder
    number: int | None = None  # the step; None where the name says none
    mtime_s: float = 0.0

    @property
    def is_newest_by_name(self) -> bool:
        return self.number is None and _NEWEST.search(self.name) is not None


class Found(NamedTuple):
    """What a folder is made of."""

    candidates: list[Candidate]  # the first one is the one to take first
    is_own: bool = False  # it is a save itself, by files that belong to no candidate
    pointed: str = ""  # a name that a pointer gives
    newer: int = 0  # so many candidates, at the end, are newer than that

    @property
    def apart(self) -> frozenset[str]:
        """Names that are no part of the folder as a save itself."""
        names = {name for each in self.candidates for name in each.files or (each.name,)}
        if self.is_own:
            names.discard(self.pointed)  # DeepSpeed's part of a save of another framework
        return frozenset(names)

    def older_folders(self, number: int) -> list[Candidate]:
        """Candidates behind one, in the order of their age."""
        last = len(self.candidates) - self.newer
        return [each for each in self.candidates[number + 1 : last] if not each.files and each.number is not None]

    def after_pointed(self, number: int) -> list[str]:
        """Lines for those that are newer than the candidate that was taken, and were not looked at."""
        last = len(self.candidates) - self.newer
        if number >= last:
            return []
        return [
            f"{each.name}: is newer than {self.pointed}, which its saver calls complete"
            for each in self.candidates[last:]
        ]


def step_of(name: str) -> int | None:
    """The number in the name of a single save: step-10, checkpoint-500, global_step20, iter_0000010, ep0-ba10."""
    if _NUMBER.fullmatch(name):
        return int(name)
    for pattern in (_STEP, _COMPOSER, _OTHER):
        found = pattern.findall(name)
        if found:
            return int(found[-1])
    return None


def is_unfinished(name: str) -> bool:
    """Whether a file has a name for what is being written."""
    return _UNFINISHED_FILE.search(name) is not None


def find(entries: Sequence[Entry], pointers: Mapping[str, str], name: str = "") -> Found:
    """See the module's docstring.

    Args: pointers: texts of those of `POINTERS` that are there; name: of the folder.
    """
    files = [entry for entry in entries if not entry.is_folder and not is_unfinished(entry.name)]
    folders = [entry for entry in entries if entry.is_folder and not _UNFINISHED.search(entry.name)]
    singles = _single_files(files)
    taken = {each for single in singles for each in single.files}
    is_own = any((is_weights(entry.name) or is_state(entry.name)) and entry.name not in taken for entry in files)
    if is_own and step_of(name) is not None:
        return Found([], is_own)  # a single save, with all that is in it
    numbered = [
        Candidate(entry.name, (), number, entry.mtime_s)
        for entry in folders
        if (number := step_of(entry.name)) is not None
    ]
    numbered += [each for each in singles if each.number is not None]
    ordered = sorted(numbered, key=lambda each: (each.number or 0, _numbers(each.name), each.name), reverse=True)
    ordered = _place(ordered, [each for each in singles if each.number is None])
    for pointer in POINTERS:
        found = _follow(pointers.get(pointer, ""), ordered, folders)
        if not found:
            continue
        if not ordered:
            return Found([], True, found[0].name)  # the only save that there can be
        last = max((each.number for each in found if each.number is not None), default=None)
        older = [each for each in ordered if last is None or each.number is None or each.number <= last]
        newer = [each for each in ordered if each not in older and each not in found]
        return Found(list(dict.fromkeys([*found, *older, *newer])), is_own, found[0].name, len(newer))
    return Found(ordered, is_own)


def _single_files(files: Sequence[Entry]) -> list[Candidate]:
    """Files that are saves of their own, each with those of the other ranks."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    loose: list[Entry] = []
    for entry in files:
        name = entry.name
        if not (is_weights(name) or _FLAX.fullmatch(name)) or name.endswith(".distcp") or _SHARD.search(name):
            continue
        stem = _stem(name)
        if _NUMBER.fullmatch(stem) is None and step_of(stem) is not None:
            bare = _RANK.sub("", name)
            is_part = _PART_OF_IT.search(bare) is not None
            key = ("parts", *map(str, _numbers(bare))) if is_part else ("whole", bare)
            groups.setdefault(key, []).append(entry)
        else:
            loose.append(entry)
    named = [entry for entry in loose if _NEWEST.search(_stem(entry.name)) or _BEST.search(_stem(entry.name))]
    if len(named) == len(loose):
        for entry in named:
            groups[entry.name,] = [entry]
    return [
        Candidate(
            min(entry.name for entry in group), tuple(sorted(entry.name for entry in group)),
            step_of(_stem(group[0].name)), max(entry.mtime_s for entry in group),
        )
        for group in groups.values()
    ]  # fmt: skip


def _place(ordered: list[Candidate], unnumbered: list[Candidate]) -> list[Candidate]:
    """What is called the last goes before what was written before it; what is called the best at the end."""
    found = list(ordered)
    for each in sorted(unnumbered, key=lambda one: (one.is_newest_by_name, one.mtime_s, one.name), reverse=True):
        if not each.is_newest_by_name:
            found.append(each)
            continue
        at = next(
            (
                index
                for index, other in enumerate(found)
                if not each.mtime_s or not other.mtime_s or other.mtime_s <= each.mtime_s
            ),
            len(found),
        )
        found.insert(at, each)
    return found


def _follow(text: str, ordered: Sequence[Candidate], folders: Sequence[Entry]) -> list[Candidate]:
    """What a pointer's text means: a name, a path or a number."""
    name = text.strip().rstrip("/").rpartition("/")[2]
    if not name:
        return []
    found = [each for each in ordered if name in (each.name, *each.files)]
    if not found and any(entry.name == name for entry in folders):
        found = [Candidate(name)]
    if name.isdigit():
        number = int(name)
        found += [each for each in ordered if each.number == number and each not in found]
    return found


def _stem(name: str) -> str:
    for suffix in sorted(WEIGHTS, key=len, reverse=True):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _numbers(name: str) -> tuple[int, ...]:
    """All numbers in a name, for its order among others of the same step."""
    return tuple(int(each) for each in re.findall(r"\d{1,18}", _RANK.sub("", name)))
