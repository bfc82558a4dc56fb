"""Which plain save is meant: a directory itself, or the newest complete save in it, as other programs leave them.

In: a store, a directory and its entries. Out: the version, and a line for each newer save that is not taken.
candidates.py defines saves and their order; completeness.py checks that a save is complete.
"""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from bootseer import aio
from bootseer.checkpoint.format import manifest as stored
from bootseer.checkpoint.io.direct import StoredFile, plain_file
from bootseer.checkpoint.io.local_source import digest_of
from bootseer.checkpoint.versions import candidates
from bootseer.checkpoint.versions.candidates import Candidate, is_unfinished, step_of
from bootseer.checkpoint.versions.completeness import inspect_file, inspect_save, reader_of
from bootseer.checkpoint.versions.pinned import PLAIN, NoCompleteCheckpoint, Pinned, VersionFilter
from bootseer.checkpoint.versions.save_rules import find_lacking_file, is_weights, join, marker_beside
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged
from bootseer.storage.protocol import Entry, Stat, Store
from bootseer.storage.small_files import CONCURRENT_READS, read_small, url_of

MAX_PLAIN_FILES = 200_000
MAX_DEPTH = 8  # of directories in a plain checkpoint
MAX_CANDIDATES = 64  # saves that are inspected at most
MAX_COMPARED = 3  # older saves that show which kinds of files a save of this run has
MAX_POINTER_BYTES = 4096
MAX_DIRECTORIES = 256  # directories that are searched for saves below
MAX_SHOWN = 8  # names in a message
DEPTH = 3

# Finds the newest striped version in a candidate's directory, given its entries.
Striped = Callable[[str, list[Entry]], Awaitable[Pinned | None]]


async def resolve_plain(
    store: Store, path: str, entries: list[Entry], wanted: VersionFilter, striped: Striped
) -> Pinned | None:
    """Return the plain save; None if none is complete, or none is acceptable."""
    inside = await _look(store, path, entries)
    if not inside.is_own and not inside.candidates:
        below = await _below(store, path, entries, DEPTH)
        if len(below) > 1:
            shown = ", ".join(below[:MAX_SHOWN])
            raise CheckpointError(
                f"{url_of(store, path)}: has saves in several directories; name one of them: {shown}"
            )
        for name in below:
            directory = join(path, name)
            found = await resolve_plain(store, directory, await store.list(directory), wanted, striped)
            return None if found is None else found._replace(version=join(name, found.version))
    chooser = _Chooser(store, path, entries, inside, wanted, striped)
    own = await chooser.take_own() if inside.is_own else None
    if own is not None:
        return own
    for number in range(len(inside.candidates[:MAX_CANDIDATES])):
        found = await chooser.take(number)
        if found is not None:
            for line in inside.after_pointed(number):
                wanted.on_passed(line)
            return found
    return None if inside.is_own else await chooser.take_own()


async def take_snapshot(store: Store, path: str, snapshot: str, wanted: VersionFilter) -> Pinned:
    """Pin a snapshot of a hub model. Raises: NoCompleteCheckpoint while it is being downloaded."""
    directory = join(path, snapshot)
    if wanted.is_striped:
        raise NoCompleteCheckpoint(f"{url_of(store, directory)}: is a plain checkpoint, not a striped one")
    tree = await _tree(store, directory)
    verdict = await inspect_save({each: entry.size for each, entry in tree.items()}, reader_of(store, directory))
    if not verdict.is_whole:
        raise NoCompleteCheckpoint(
            f"{url_of(store, directory)}: is an incomplete model: {verdict.why}; complete its download"
        )
    return await _pin_files(store, directory, snapshot, tree)


async def pin_file_or_directory(store: Store, path: str, version: str) -> Pinned:
    """Pin a file, or a directory as it is. `version`: the part of the path below the requested one."""
    if path:
        try:
            found = await store.stat(path)
        except NotFound:
            pass
        else:
            file = plain_file(posixpath.basename(path), found.size, found.etag, path)
            directory, step = posixpath.dirname(path), step_of(posixpath.basename(version))
            return Pinned(PLAIN, directory, version, _digest([file]), (file,), step)
    apart: Collection[str] = ()
    if not version:
        apart = (await _look(store, path, await store.list(path))).apart
    return await _pin_files(store, path, version, await _tree(store, path, apart))


async def find_file_fault(store: Store, pinned: Pinned) -> str:
    """Return the fault of a single file of weights, "" if it is complete."""
    if len(pinned.files) != 1 or not is_weights(pinned.files[0].path):
        return ""
    [file] = pinned.files
    _, why = await inspect_file(file.path, file.layout.size, reader_of(store, pinned.folder))
    return why


def as_step(striped: Pinned, name: str) -> Pinned:
    """Return a striped version as that of the single save's directory that contains it."""
    step = step_of(posixpath.basename(name)) if striped.step is None else striped.step
    return striped._replace(version=join(name, stored.directory_of(striped.version)), step=step)


class _Chooser:
    """Chooses among the saves in one directory."""

    def __init__(
        self,
        store: Store,
        path: str,
        entries: Sequence[Entry],
        inside: candidates.DirectorySaves,
        wanted: VersionFilter,
        striped: Striped,
    ) -> None:
        self._store = store
        self._path = path
        self._sizes = {entry.name: entry.size for entry in entries if not entry.is_folder}
        self._names = [entry.name for entry in entries]
        self._inside = inside
        self._wanted = wanted
        self._striped = striped
        self._torn: set[str] = set()  # files of saves of several ranks that are incomplete

    async def take_own(self, apart: Collection[str] | None = None) -> Pinned | None:
        """Take the directory itself, without the other saves in it."""
        if self._wanted.is_striped:
            return None
        try:
            tree = await _tree(self._store, self._path, self._inside.apart if apart is None else apart)
            sizes = {each: entry.size for each, entry in tree.items()}
            name = posixpath.basename(self._path)
            verdict = await inspect_save(sizes, reader_of(self._store, self._path), name=name)
            if verdict.is_whole:
                return self._if_wanted(await _pin_files(self._store, self._path, "", sizes))
        except NotFound:
            return None  # it is being removed
        if verdict.has_weights or self._inside.is_own:
            self._wanted.on_passed(verdict.why)
        return None

    async def take(self, number: int) -> Pinned | None:
        """Take a candidate, striped or plain; None if it is incomplete, or not acceptable."""
        candidate = self._inside.candidates[number]
        try:
            if candidate.files:
                return None if self._wanted.is_striped else await self._take_files(candidate)
            return await self._take_directory(candidate.name, number)
        except (NotFound, SourceChanged):
            return None  # old ones are being removed

    async def _take_directory(self, name: str, number: int) -> Pinned | None:
        directory = join(self._path, name)
        striped = await self._striped(directory, await self._store.list(directory))
        if striped is not None:
            return as_step(striped, name)
        if self._wanted.is_striped:
            return None
        tree = await _tree(self._store, directory)
        sizes = {each: entry.size for each, entry in tree.items()}
        verdict = await inspect_save(sizes, reader_of(self._store, directory), name=name, beside=self._names)
        why = verdict.why or await self._lacks(tree, number)
        if why:
            self._wanted.on_passed(f"{name}: {why}")
            return None
        return self._if_wanted(await _pin_files(self._store, directory, name, sizes))

    async def _take_files(self, candidate: Candidate) -> Pinned | None:
        """Take a file that is a save of its own; for several ranks, the directory without incomplete ones."""
        for name in candidate.files:
            _, why = await inspect_file(name, self._sizes[name], reader_of(self._store, self._path))
            marker = marker_beside(name, self._names)
            if marker:
                why = f"is marked as unfinished by its saver ({marker})"
            if why:
                self._wanted.on_passed(f"{name} {why}")
                self._torn.update(candidate.files)
                return None
        if len(candidate.files) > 1:
            directories = [each.name for each in self._inside.candidates if not each.files]
            return await self.take_own([*directories, *self._torn])
        path = join(self._path, candidate.name)
        return self._if_wanted(await pin_file_or_directory(self._store, path, candidate.name))

    async def _lacks(self, tree: Mapping[str, Entry], number: int) -> str:
        """Return the files that all earlier saves have and this one lacks; not files that were added since."""
        began_s = min((entry.mtime_s for entry in tree.values() if entry.mtime_s), default=0.0)
        older = [each.name for each in self._inside.older_directories(number)[:MAX_COMPARED]]

        async def look(name: str) -> dict[str, int]:
            found = await _tree(self._store, join(self._path, name))
            return {each: entry.size for each, entry in found.items() if not began_s or entry.mtime_s <= began_s}

        others = await aio.map_bounded(look, older, width=CONCURRENT_READS)
        lacking = find_lacking_file({each: entry.size for each, entry in tree.items()}, others)
        return f"has no {lacking}, which older saves have" if lacking else ""

    def _if_wanted(self, found: Pinned) -> Pinned | None:
        return found if self._wanted.takes(found) else None


async def _below(store: Store, path: str, entries: Sequence[Entry], depth: int) -> list[str]:
    """Return directories with single saves below one without files: for example accelerate's `checkpoints`."""
    directories = [entry.name for entry in entries if entry.is_folder and not entry.name.startswith(".")]
    if not depth or len(directories) > MAX_DIRECTORIES:
        return []

    async def look(name: str) -> list[str]:
        directory = join(path, name)
        inner = await store.list(directory)
        found = await _look(store, directory, inner)
        if any(each.number is not None for each in found.candidates):
            return [name]
        return (
            [] if found.is_own else [join(name, each) for each in await _below(store, directory, inner, depth - 1)]
        )

    return [each for found in await aio.map_bounded(look, directories, width=CONCURRENT_READS) for each in found]


async def _look(store: Store, path: str, entries: Sequence[Entry]) -> candidates.DirectorySaves:
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.name in candidates.POINTERS and not entry.is_folder:
            try:
                data = await read_small(store, join(path, entry.name), MAX_POINTER_BYTES)
            except (NotFound, IntegrityError):
                continue
            texts[entry.name] = data.decode("utf-8", "replace")
    name = posixpath.basename(path) or posixpath.basename(store.url.rstrip("/"))
    return candidates.find([entry for entry in entries if not _is_striped(entry)], texts, name)


async def _tree(store: Store, directory: str, apart: Collection[str] = ()) -> dict[str, Entry]:
    """Return all files of a save, by path. `apart`: names that are no part of it."""
    found: dict[str, Entry] = {}

    async def walk(below: str, depth: int) -> None:
        for entry in await store.list(join(directory, below)):
            path = join(below, entry.name)
            if not below and (entry.name in apart or _is_striped(entry)):
                continue
            if entry.is_folder:
                if depth:
                    await walk(path, depth - 1)
            elif stored.is_file_path(path) and not is_unfinished(entry.name):
                found[path] = entry
                if len(found) > MAX_PLAIN_FILES:
                    raise CheckpointError(f"{url_of(store, directory)}: has more than {MAX_PLAIN_FILES} files")

    await walk("", MAX_DEPTH)
    return found


async def _pin_files(store: Store, directory: str, version: str, names: Collection[str]) -> Pinned:
    if not names:
        raise NotFound(f"{url_of(store, directory)}: is empty or does not exist")

    async def look(name: str) -> StoredFile:
        try:
            found = await store.stat(join(directory, name))
        except NotFound as error:
            raise SourceChanged(
                f"{url_of(store, directory)}: {name} was removed while it was inspected"
            ) from error
        return plain_file(name, found.size, found.etag, join(directory, name))

    files = await aio.map_bounded(look, sorted(names), width=CONCURRENT_READS)
    return Pinned(PLAIN, directory, version, _digest(files), tuple(files), step_of(version))


def _is_striped(entry: Entry) -> bool:
    return entry.is_folder and bool(stored.version_of(entry.name))


def _digest(files: Sequence[StoredFile]) -> str:
    return digest_of((file.path, Stat(file.layout.size, file.etag)) for file in files)
