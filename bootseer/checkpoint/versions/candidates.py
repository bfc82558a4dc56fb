"""PURE: which names in a directory are single saves, and which of them is the newest.

In: the entries of a directory, and the texts of pointer files that savers leave in it. Out: candidates, the
preferred one first, and whether the directory is a save itself. Completeness is not checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.checkpoint.format.file_formats import WEIGHTS
from bootseer.checkpoint.versions.save_rules import is_state, is_weights
from bootseer.storage.protocol import Entry

# Files that a saver writes last, with the number or the name of the complete save: DeepSpeed, Megatron, mmengine
# and detectron2.
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
    """A single save: a directory, or a file, or the files of all ranks."""

    name: str  # of the directory or of the first file
    files: tuple[str, ...] = ()  # () for a directory
    number: int | None = None  # the step; None if the name gives none
    mtime_s: float = 0.0

    @property
    def is_newest_by_name(self) -> bool:
        return self.number is None and _NEWEST.search(self.name) is not None


class DirectorySaves(NamedTuple):
    candidates: list[Candidate]  # the preferred one first
    is_own: bool = False  # the directory is a save itself, by files that belong to no candidate
    pointed: str = ""  # the name in a pointer file
    newer: int = 0  # number of candidates, at the end, that are newer than `pointed`

    @property
    def apart(self) -> frozenset[str]:
        """Names that are no part of the directory as a save itself."""
        names = {name for each in self.candidates for name in each.files or (each.name,)}
        if self.is_own:
            names.discard(self.pointed)  # the part that DeepSpeed adds to another framework's save
        return frozenset(names)

    def older_directories(self, number: int) -> list[Candidate]:
        """Return the older directories after a candidate, newest first."""
        last = len(self.candidates) - self.newer
        return [each for each in self.candidates[number + 1 : last] if not each.files and each.number is not None]

    def after_pointed(self, number: int) -> list[str]:
        """Return lines for candidates that are newer than the one taken and were not inspected."""
        last = len(self.candidates) - self.newer
        if number >= last:
            return []
        return [
            f"{each.name}: is newer than {self.pointed}, which its saver marked complete"
            for each in self.candidates[last:]
        ]


def step_of(name: str) -> int | None:
    """Return the number in the name of a single save: step-10, global_step20, iter_0000010, ep0-ba10."""
    if _NUMBER.fullmatch(name):
        return int(name)
    for pattern in (_STEP, _COMPOSER, _OTHER):
        found = pattern.findall(name)
        if found:
            return int(found[-1])
    return None


def is_unfinished(name: str) -> bool:
    """Return whether a file's name marks an unfinished write."""
    return _UNFINISHED_FILE.search(name) is not None


def find(entries: Sequence[Entry], pointers: Mapping[str, str], name: str = "") -> DirectorySaves:
    """See the module's docstring.

    Args: pointers: texts of the `POINTERS` that exist; name: of the directory.
    """
    files = [entry for entry in entries if not entry.is_folder and not is_unfinished(entry.name)]
    directories = [entry for entry in entries if entry.is_folder and not _UNFINISHED.search(entry.name)]
    singles = _single_files(files)
    taken = {each for single in singles for each in single.files}
    is_own = any((is_weights(entry.name) or is_state(entry.name)) and entry.name not in taken for entry in files)
    if is_own and step_of(name) is not None:
        return DirectorySaves([], is_own)  # a single save, with all its contents
    numbered = [
        Candidate(entry.name, (), number, entry.mtime_s)
        for entry in directories
        if (number := step_of(entry.name)) is not None
    ]
    numbered += [each for each in singles if each.number is not None]
    ordered = sorted(numbered, key=lambda each: (each.number or 0, _numbers(each.name), each.name), reverse=True)
    ordered = _place(ordered, [each for each in singles if each.number is None])
    for pointer in POINTERS:
        found = _follow(pointers.get(pointer, ""), ordered, directories)
        if not found:
            continue
        if not ordered:
            return DirectorySaves([], True, found[0].name)  # the only possible save
        last = max((each.number for each in found if each.number is not None), default=None)
        older = [each for each in ordered if last is None or each.number is None or each.number <= last]
        newer = [each for each in ordered if each not in older and each not in found]
        return DirectorySaves(list(dict.fromkeys([*found, *older, *newer])), is_own, found[0].name, len(newer))
    return DirectorySaves(ordered, is_own)


def _single_files(files: Sequence[Entry]) -> list[Candidate]:
    """Return files that are saves of their own, each grouped with those of the other ranks."""
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
    """Insert unnumbered saves: "last" ones before those written earlier, "best" ones at the end."""
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


def _follow(text: str, ordered: Sequence[Candidate], directories: Sequence[Entry]) -> list[Candidate]:
    """Resolve a pointer's text: a name, a path or a number."""
    name = text.strip().rstrip("/").rpartition("/")[2]
    if not name:
        return []
    found = [each for each in ordered if name in (each.name, *each.files)]
    if not found and any(entry.name == name for entry in directories):
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
    """Return all numbers in a name, to order names of the same step."""
    return tuple(int(each) for each in re.findall(r"\d{1,18}", _RANK.sub("", name)))
