"""Which plain save is meant: a folder itself, or the newest whole save in it, as other programs leave them.

In: a store, a folder and its entries. Out: the version, and a line for each newer save that is not taken. What is
a save and in which order they come decides candidates.py; whether one is whole, completeness.py.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from bootseer import aio
from bootseer.checkpoint import candidates
from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.candidates import Candidate, is_unfinished, step_of
from bootseer.checkpoint.completeness import judge, judge_file, reader_of
from bootseer.checkpoint.direct import StoredFile, plain_file
from bootseer.checkpoint.local_source import digest_of
from bootseer.checkpoint.pinned import PLAIN, NoneComplete, Pinned, Wanted
from bootseer.checkpoint.save_rules import is_weights, join, marker_beside, what_it_lacks
from bootseer.checkpoint.small_files import CALLS, read_small, where
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged
from bootseer.storage.protocol import Entry, Stat, Store

MOST_PLAIN_FILES = 200_000
MOST_DEPTH = 8  # of folders in a plain checkpoint
MOST_CANDIDATES = 64  # saves that are looked at before it is given up
MOST_COMPARED = 3  # older saves that say which kinds of files a save of this run has
MOST_POINTER_BYTES = 4096
MOST_FOLDERS = 256  # that are looked into for saves further down
MOST_SHOWN = 8  # names in a message
DEPTH = 3

# The newest striped version in a candidate's folder, whose entries are given.
Striped = Callable[[str, list[Entry]], Awaitable[Pinned | None]]


async def resolve_plain(
    store: Store, path: str, entries: list[Entry], wanted: Wanted, striped: Striped
) -> Pinned | None:
    """None where there is no whole one, or none that is wanted."""
    inside = await _look(store, path, entries)
    if not inside.is_own and not inside.candidates:
        below = await _below(store, path, entries, DEPTH)
        if len(below) > 1:
            shown = ", ".join(below[:MOST_SHOWN])
            raise CheckpointError(f"{where(store, path)}: has saves in several folders, name one of them: {shown}")
        for name in below:
            folder = join(path, name)
            found = await resolve_plain(store, folder, await store.list(folder), wanted, striped)
            return None if found is None else found._replace(version=join(name, found.version))
    chooser = _Chooser(store, path, entries, inside, wanted, striped)
    own = await chooser.take_own() if inside.is_own else None
    if own is not None:
        return own
    for number in range(len(inside.candidates[:MOST_CANDIDATES])):
        found = await chooser.take(number)
        if found is not None:
            for line in inside.after_pointed(number):
                wanted.on_passed(line)
            return found
    return None if inside.is_own else await chooser.take_own()


async def take_snapshot(store: Store, path: str, snapshot: str, wanted: Wanted) -> Pinned:
    """Of a model of the hub. Raises: NoneComplete while it is downloaded."""
    folder = join(path, snapshot)
    if wanted.is_striped:
        raise NoneComplete(f"{where(store, folder)}: is a plain checkpoint, not a striped one")
    tree = await _tree(store, folder)
    verdict = await judge({each: entry.size for each, entry in tree.items()}, reader_of(store, folder))
    if not verdict.is_whole:
        raise NoneComplete(
            f"{where(store, folder)}: is no complete model: {verdict.why}; has all of it been downloaded?"
        )
    return await _pin_files(store, folder, snapshot, tree)


async def pin_file_or_folder(store: Store, path: str, version: str) -> Pinned:
    """A file, or a folder as it is. `version`: the part of the path that is below what was asked for."""
    if path:
        try:
            found = await store.stat(path)
        except NotFound:
            pass
        else:
            file = plain_file(posixpath.basename(path), found.size, found.etag, path)
            folder, step = posixpath.dirname(path), step_of(posixpath.basename(version))
            return Pinned(PLAIN, folder, version, _digest([file]), (file,), step)
    apart: Collection[str] = ()
    if not version:
        apart = (await _look(store, path, await store.list(path))).apart
    return await _pin_files(store, path, version, await _tree(store, path, apart))


async def why_not_file(store: Store, pinned: Pinned) -> str:
    """Why a single file of weights is not whole, "" if it is."""
    if len(pinned.files) != 1 or not is_weights(pinned.files[0].path):
        return ""
    [file] = pinned.files
    _, why = await judge_file(file.path, file.layout.size, reader_of(store, pinned.folder))
    return why


def as_step(striped: Pinned, name: str) -> Pinned:
    """A striped version as that of the single save's folder in which it lies."""
    step = step_of(posixpath.basename(name)) if striped.step is None else striped.step
    return striped._replace(version=join(name, stored.folder_of(striped.version)), step=step)


class _Chooser:
    """The saves in one folder."""

    def __init__(
        self,
        store: Store,
        path: str,
        entries: Sequence[Entry],
        inside: candidates.Found,
        wanted: Wanted,
        striped: Striped,
    ) -> None:
        self._store = store
        self._path = path
        self._sizes = {entry.name: entry.size for entry in entries if not entry.is_folder}
        self._names = [entry.name for entry in entries]
        self._inside = inside
        self._wanted = wanted
        self._striped = striped
        self._torn: set[str] = set()  # files that are saves of several ranks, and not whole

    async def take_own(self, apart: Collection[str] | None = None) -> Pinned | None:
        """The folder without the other saves in it."""
        if self._wanted.is_striped:
            return None
        try:
            tree = await _tree(self._store, self._path, self._inside.apart if apart is None else apart)
            sizes = {each: entry.size for each, entry in tree.items()}
            name = posixpath.basename(self._path)
            verdict = await judge(sizes, reader_of(self._store, self._path), name=name)
            if verdict.is_whole:
                return self._if_wanted(await _pin_files(self._store, self._path, "", sizes))
        except NotFound:
            return None  # somebody removes it
        if verdict.has_weights or self._inside.is_own:
            self._wanted.on_passed(verdict.why)
        return None

    async def take(self, number: int) -> Pinned | None:
        """A candidate, striped or plain; None if it is not whole, or not wanted."""
        candidate = self._inside.candidates[number]
        try:
            if candidate.files:
                return None if self._wanted.is_striped else await self._take_files(candidate)
            return await self._take_folder(candidate.name, number)
        except (NotFound, SourceChanged):
            return None  # somebody removes old ones

    async def _take_folder(self, name: str, number: int) -> Pinned | None:
        folder = join(self._path, name)
        striped = await self._striped(folder, await self._store.list(folder))
        if striped is not None:
            return as_step(striped, name)
        if self._wanted.is_striped:
            return None
        tree = await _tree(self._store, folder)
        sizes = {each: entry.size for each, entry in tree.items()}
        verdict = await judge(sizes, reader_of(self._store, folder), name=name, beside=self._names)
        why = verdict.why or await self._lacks(tree, number)
        if why:
            self._wanted.on_passed(f"{name}: {why}")
            return None
        return self._if_wanted(await _pin_files(self._store, folder, name, sizes))

    async def _take_files(self, candidate: Candidate) -> Pinned | None:
        """A file that is a save of its own. Of those of several ranks: the folder without those that are torn."""
        for name in candidate.files:
            _, why = await judge_file(name, self._sizes[name], reader_of(self._store, self._path))
            marker = marker_beside(name, self._names)
            if marker:
                why = f"is marked as not finished by its saver ({marker})"
            if why:
                self._wanted.on_passed(f"{name} {why}")
                self._torn.update(candidate.files)
                return None
        if len(candidate.files) > 1:
            folders = [each.name for each in self._inside.candidates if not each.files]
            return await self.take_own([*folders, *self._torn])
        path = join(self._path, candidate.name)
        return self._if_wanted(await pin_file_or_folder(self._store, path, candidate.name))

    async def _lacks(self, tree: Mapping[str, Entry], number: int) -> str:
        """What the saves before this one all have; not what somebody has put there since."""
        began_s = min((entry.mtime_s for entry in tree.values() if entry.mtime_s), default=0.0)
        older = [each.name for each in self._inside.older_folders(number)[:MOST_COMPARED]]

        async def look(name: str) -> dict[str, int]:
            found = await _tree(self._store, join(self._path, name))
            return {each: entry.size for each, entry in found.items() if not began_s or entry.mtime_s <= began_s}

        others = await aio.map_bounded(look, older, width=CALLS)
        lacking = what_it_lacks({each: entry.size for each, entry in tree.items()}, others)
        return f"has no {lacking}, which older saves have" if lacking else ""

    def _if_wanted(self, found: Pinned) -> Pinned | None:
        return found if self._wanted.takes(found) else None


async def _below(store: Store, path: str, entries: Sequence[Entry], depth: int) -> list[str]:
    """Folders, below one that holds nothing itself, in which single saves lie: accelerate's `checkpoints`."""
    folders = [entry.name for entry in entries if entry.is_folder and not entry.name.startswith(".")]
    if not depth or len(folders) > MOST_FOLDERS:
        return []

    async def look(name: str) -> list[str]:
        folder = join(path, name)
        inner = await store.list(folder)
        found = await _look(store, folder, inner)
        if any(each.number is not None for each in found.candidates):
            return [name]
        return [] if found.is_own else [join(name, each) for each in await _below(store, folder, inner, depth - 1)]

    return [each for found in await aio.map_bounded(look, folders, width=CALLS) for each in found]


async def _look(store: Store, path: str, entries: Sequence[Entry]) -> candidates.Found:
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.name in candidates.POINTERS and not entry.is_folder:
            try:
                data = await read_small(store, join(path, entry.name), MOST_POINTER_BYTES)
            except (NotFound, IntegrityError):
                continue
            texts[entry.name] = data.decode("utf-8", "replace")
    name = posixpath.basename(path) or posixpath.basename(store.url.rstrip("/"))
    return candidates.find([entry for entry in entries if not _is_striped(entry)], texts, name)


async def _tree(store: Store, folder: str, apart: Collection[str] = ()) -> dict[str, Entry]:
    """All files of a save, by path. `apart`: names that are no part of it."""
    found: dict[str, Entry] = {}

    async def walk(below: str, depth: int) -> None:
        for entry in await store.list(join(folder, below)):
            path = join(below, entry.name)
            if not below and (entry.name in apart or _is_striped(entry)):
                continue
            if entry.is_folder:
                if depth:
                    await walk(path, depth - 1)
            elif stored.is_file_path(path) and not is_unfinished(entry.name):
                found[path] = entry
                if len(found) > MOST_PLAIN_FILES:
                    raise CheckpointError(f"{where(store, folder)}: has more than {MOST_PLAIN_FILES} files")

    await walk("", MOST_DEPTH)
    return found


async def _pin_files(store: Store, folder: str, version: str, names: Collection[str]) -> Pinned:
    if not names:
        raise NotFound(f"{where(store, folder)}: is empty or does not exist")

    async def look(name: str) -> StoredFile:
        try:
            found = await store.stat(join(folder, name))
        except NotFound as error:
            raise SourceChanged(f"{where(store, folder)}: {name} was removed while it was looked at") from error
        return plain_file(name, found.size, found.etag, join(folder, name))

    files = await aio.map_bounded(look, sorted(names), width=CALLS)
    return Pinned(PLAIN, folder, version, _digest(files), tuple(files), step_of(version))


def _is_striped(entry: Entry) -> bool:
    return entry.is_folder and bool(stored.version_of(entry.name))


def _digest(files: Sequence[StoredFile]) -> str:
    return digest_of((file.path, Stat(file.layout.size, file.etag)) for file in files)
