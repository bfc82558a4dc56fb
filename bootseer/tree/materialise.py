"""Unpacks a tree into a folder, hot files first: for nodes where nothing can be mounted.

In: an index that was checked, a source of verified blocks, a folder. Out: the files; each is there whole or not at
all, so that programs can run while the rest is being unpacked. Every block is asked for once. Nothing is written
outside the folder, whatever the tree says and whoever else is busy in it: names are single names in folders that
were opened without following links, and until all is there only this user can write to folders.

A run that was interrupted goes on with `resume=True`: files with the size and time of the index are kept, as a
file gets its name last. After a power cut a file may have its name and not its bytes: those that were there before
this machine was started are written again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import ConfigError
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import Index
from bootseer.tree.materialise_attributes import Attributes
from bootseer.tree.materialise_files import FileWriter, link_names, remove, run_batches
from bootseer.tree.materialise_folders import TreeFolders, entry_errors
from bootseer.tree.materialise_helpers import Helpers, Owners
from bootseer.tree.materialise_plan import Plan, files_of, plan
from bootseer.tree.materialise_portions import folders_left, portions
from bootseer.tree.materialise_private import PrivateWriter
from bootseer.tree.safe_folders import LastFolder, open_root

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

THREADS = 8  # wait for a store or a disk most of the time
TEMPORARY = b".bootseer-tmp-"
_AWAY = "unpack into an empty folder"

Progress = Callable[[int, int], object]  # bytes and files since the last call, from the thread that called


class Materialised(NamedTuple):
    """What was done."""

    files: int  # regular ones that were written
    kept_files: int  # that a run before had written
    written_bytes: int  # without holes
    hot_files: int
    skipped: dict[str, int]  # what this user or the file system cannot have, and how often


def materialise(
    index: Index,
    folder: str,
    blocks: BlockSource,
    *,
    hot: Sequence[int] = (),
    on_hot_done: Callable[[], object] | None = None,
    owners: Owners = "as stored",
    resume: bool = False,
    is_private: bool = False,
    helpers: Helpers | None = None,
    meanwhile: Callable[[], object] | None = None,
    threads: int = THREADS,
    on_progress: Progress | None = None,
    boot_s: float | None = None,
) -> Materialised:
    """Unpacks a tree into an empty folder.

    Args:
        hot: blocks in the order in which a start touches them. Files that have some come first, each as a whole.
        on_hot_done: called when all hot files can be used; without hot blocks, when all is there.
        owners: "as stored" keeps owners, devices, setuid bits and all extended attributes, for root; "mine", and
            for other users, everything belongs to whoever calls, and what goes with an owner is left out.
        resume: the folder has what an interrupted run of the same tree left.
        is_private: nobody looks into the folder before this returns, and after an error or a kill it is thrown
            away as it is: files get their names when they are begun. That is the fastest.
        helpers: write regular files, into a private folder, without `hot`; `blocks` are not read then.
        meanwhile: called once while helpers are busy.
        boot_s: when this machine was started, since the epoch; tests say another time.
    Raises: StorageError, also when the disk is full; HelperFailedError; IntegrityError; ConfigError. What has its
        name then is whole.
    """
    assert not (resume and is_private), "what is thrown away is not resumed"
    assert helpers is None or (is_private and not hot), "helpers know no order"
    keeps_owners = owners == "as stored" and os.geteuid() == 0
    with _errors(folder), open_root(folder) as root_fd, _lock(root_fd, folder):
        was_given = resume and keeps_owners  # to the owner in the index, by the run before
        _check_owner(root_fd, folder, index.uids[0] if was_given else os.geteuid())
        unpacking = _Unpacking(
            index,
            folder,
            root_fd,
            keeps_owners=keeps_owners,
            threads=threads,
            boot_s=_read_boot_s() if boot_s is None else boot_s,
            is_private=is_private,
        )
        if resume:
            unpacking.look()
        elif os.listdir(root_fd):
            raise ConfigError(f"{folder}: is not empty: {_AWAY}")
        progress = on_progress or (lambda _bytes, _files: None)
        if helpers is not None:
            return unpacking.run_by(helpers, owners, meanwhile, on_hot_done, progress)
        return unpacking.run(blocks, hot, on_hot_done, progress, resume=resume)


def write_portion(
    index: Index, folder: str, root_fd: int, blocks: BlockSource, *, owners: Owners, on_progress: Progress
) -> Mapping[str, int]:
    """For a helper: writes the files of a portion into the folder that `materialise` was called with.

    Returns: what was skipped. Raises: StorageError, IntegrityError.
    """
    with _errors(folder):
        unpacking = _Unpacking(
            index,
            folder,
            root_fd,
            keeps_owners=owners == "as stored" and os.geteuid() == 0,
            threads=1,
            boot_s=0.0,
            is_private=True,
        )
        return unpacking.run_portion(blocks, on_progress)


class _Unpacking:
    """One run."""

    def __init__(
        self,
        index: Index,
        folder: str,
        root_fd: int,
        *,
        keeps_owners: bool,
        threads: int,
        boot_s: float,
        is_private: bool,
    ) -> None:
        self._is_private = is_private
        self._boot_s = boot_s
        self._index = index
        self._folder = folder
        self._root_fd = root_fd
        self._threads = threads
        self._attributes = Attributes(index, keeps_owners=keeps_owners)
        self._prefix = TEMPORARY
        while any(name.startswith(self._prefix) for name in index.names):
            self._prefix += b"x"
        self._tree_folders = TreeFolders(index, folder, root_fd, self._attributes, is_private=is_private)
        self._folders = self._tree_folders.names
        self._links: dict[int, list[int]] = {}  # further names of an entry
        for entry, link in enumerate(index.links):
            if link != -1:
                self._links.setdefault(link, []).append(entry)
        self._kept: set[int] = set()  # regular files that are there
        self._unseen = set(self._folders)  # folders that were not looked into

    def run(
        self,
        blocks: BlockSource,
        hot: Sequence[int],
        on_hot_done: Callable[[], object] | None,
        on_progress: Progress,
        *,
        resume: bool,
    ) -> Materialised:
        os.fchmod(self._root_fd, 0o700)
        self._tree_folders.make()
        if resume:
            self.look()  # also into those that could not be entered before
        files = [entry for entry in files_of(self._index) if entry not in self._kept]
        todo = plan(self._index, files, hot)
        self._make_others()
        written_bytes = self._write(files, todo, blocks, on_progress, on_hot_done if hot else None)
        self._tree_folders.finish()
        if not hot and on_hot_done is not None:
            on_hot_done()
        return Materialised(
            files=len(files),
            kept_files=len(self._kept),
            written_bytes=written_bytes,
            hot_files=len(todo.hot_files),
            skipped=self._attributes.skipped,
        )

    def run_by(
        self,
        helpers: Helpers,
        owners: Owners,
        meanwhile: Callable[[], object] | None,
        on_hot_done: Callable[[], object] | None,
        on_progress: Progress,
    ) -> Materialised:
        """The same; others write the files meanwhile."""
        os.fchmod(self._root_fd, 0o700)
        files = files_of(self._index)
        given = portions(self._index, files, self._links, helpers.count)
        helpers.begin(self._index, self._folder, self._root_fd, owners, given)
        self._tree_folders.make(folders_left(self._index, files, self._links))
        self._make_others()
        if meanwhile is not None:
            meanwhile()
        written_bytes = 0
        with closing(helpers.wait()) as results:
            for count, done in results:
                written_bytes += count
                on_progress(count, done)
        self._tree_folders.finish()
        if on_hot_done is not None:
            on_hot_done()
        skipped = Counter(self._attributes.skipped)
        skipped.update(helpers.skipped)
        return Materialised(len(files), 0, written_bytes, 0, dict(skipped))

    def run_portion(self, blocks: BlockSource, on_progress: Progress) -> Mapping[str, int]:
        """Regular files and the folders that they are in; what these are in the end is for whoever runs all."""
        self._tree_folders.make()
        files = files_of(self._index)
        todo = plan(self._index, files)
        self._write(files, todo, blocks, on_progress, None)
        on_progress(0, sum(not todo.pieces[entry] for entry in files))  # of which no batch says anything
        return self._attributes.skipped

    def _write(
        self,
        files: Sequence[int],
        todo: Plan,
        blocks: BlockSource,
        on_progress: Progress,
        on_hot_done: Callable[[], object] | None,
    ) -> int:
        """Regular files, into folders that are there; bytes."""
        writer = (PrivateWriter if self._is_private else FileWriter)(
            self._index,
            self._folder,
            self._root_fd,
            self._folders,
            self._prefix,
            todo,
            self._attributes,
            self._links,
            blocks,
        )
        for entry in sorted(self._kept):
            writer.link(entry)
        written_bytes = 0
        try:
            writer.write_empty([entry for entry in files if not todo.pieces[entry]])
            for number, batch_blocks in enumerate((todo.hot_blocks, todo.cold_blocks)):
                with closing(run_batches(writer, batch_blocks, self._threads)) as results:
                    for count, done in results:
                        written_bytes += count
                        on_progress(count, done)
                if number == 0 and on_hot_done is not None:
                    self._tree_folders.open()
                    on_hot_done()
        except BaseException:
            writer.take_away_unfinished()
            raise
        finally:
            writer.close()
        return written_bytes

    # ---- what is neither folder nor regular file -----------------------------------------------------------

    def _make_others(self) -> None:
        index = self._index
        with LastFolder(self._root_fd) as folders:
            for entry, mode in enumerate(index.modes):
                if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or index.links[entry] != -1:
                    continue
                with self._errors(entry):
                    fd, name = folders.open(self._folders[index.parents[entry]]), index.names[entry]
                    if self._try_make(entry, fd, name):
                        self._attributes.set_named(entry, fd, name)
                        link_names(self._root_fd, index, self._folders, entry, self._links)

    def _try_make(self, entry: int, fd: int, name: bytes) -> bool:
        """Whether it is there now, without attributes."""
        index, mode = self._index, self._index.modes[entry]
        remove(fd, name)
        if stat.S_ISLNK(mode):
            os.symlink(index.targets[entry], name, dir_fd=fd)
        elif entry not in index.rdevs:
            os.mknod(name, stat.S_IFMT(mode) | 0o600, dir_fd=fd)
        elif self._attributes.keeps_owners:
            try:
                os.mknod(name, stat.S_IFMT(mode) | 0o600, os.makedev(*index.rdevs[entry]), dir_fd=fd)
            except PermissionError:  # root of a user namespace
                self._attributes.skip("devices")
                return False
        else:
            self._attributes.skip("devices")
            return False
        return True

    # ---- what an interrupted run left ----------------------------------------------------------------------

    def look(self) -> None:
        """Finds regular files that are whole, takes away halves; nothing else is changed.

        Folders that cannot be entered yet are for the next call. Raises: ConfigError for what is not of this tree.
        """
        entries: dict[int, dict[bytes, int]] = {entry: {} for entry in self._unseen}
        for entry in range(1, len(self._index)):
            if self._index.parents[entry] in entries:
                entries[self._index.parents[entry]][self._index.names[entry]] = entry
        with LastFolder(self._root_fd) as folders:
            for entry in sorted(self._unseen):
                with self._errors(entry):
                    try:
                        self._look_into(folders.open(self._folders[entry]), entries[entry])
                    except (FileNotFoundError, PermissionError):
                        continue
                    self._unseen.discard(entry)

    def _look_into(self, fd: int, entries: dict[bytes, int]) -> None:
        index = self._index
        for name in map(os.fsencode, os.listdir(fd)):
            entry = entries.get(name)
            if entry is not None:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_IFMT(found.st_mode) != stat.S_IFMT(index.modes[entry]):
                    raise ConfigError(f"{self._path(entry)}: is of another type than in the tree: {_AWAY}")
                # The time of its last change is the system's alone to set.
                is_whole = found.st_ctime > self._boot_s and (
                    (found.st_size, found.st_mtime_ns) == (index.sizes[entry], index.mtimes_ns[entry])
                )
                if index.links[entry] == -1 and stat.S_ISREG(found.st_mode) and is_whole:
                    self._kept.add(entry)
            elif name.startswith(self._prefix):
                os.unlink(name, dir_fd=fd)
            else:
                raise ConfigError(f"{self._folder}: has {os.fsdecode(name)!r}, which is not of this tree: {_AWAY}")

    def _path(self, entry: int) -> str:
        return os.path.join(self._folder, os.fsdecode(self._index.path(entry)))

    def _errors(self, entry: int) -> AbstractContextManager[None]:
        return entry_errors(self._index, self._folder, entry)


def _read_boot_s() -> float:
    """When this machine was started, since the epoch, by the clock as it is now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _check_owner(root_fd: int, folder: str, given_uid: int) -> None:
    """That the folder is this user's, or `given_uid`'s: its owner can exchange what is in it at any time.

    Raises: ConfigError.
    """
    owner = os.fstat(root_fd).st_uid
    if owner in (os.geteuid(), given_uid) or owner == _uid_of_new(root_fd):
        return
    raise ConfigError(
        f"{folder}: belongs to user {owner}, not to {os.geteuid()}, who runs this: unpack into one of your own"
    )


def _uid_of_new(root_fd: int) -> int:
    """Whose a new file of this user is there: servers take root for somebody else (root_squash); -1: nobody's."""
    name = TEMPORARY + b"owner-%x" % time.monotonic_ns()
    try:
        fd = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root_fd
        )
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=root_fd)
    except OSError:
        return -1


@contextmanager
def _lock(root_fd: int, folder: str) -> Iterator[None]:
    """Against another process that unpacks there, on file systems that have locks."""
    try:
        fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(f"{folder}: another process is unpacking into it") from error
    yield  # closing the descriptor ends it


@contextmanager
def _errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise to_storage_error(error, folder) from error
