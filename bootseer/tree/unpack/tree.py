"""Unpacking of a tree into a directory, hot files first, for nodes where mounting is impossible.

In: a checked index, a source of verified blocks, a directory. Out: files, each whole or absent, so that programs
can run while the rest is unpacked. Every block is requested once. Nothing is written outside the directory, even
with hostile trees or concurrent writers. Names are single names in directories that were opened without following
links; until the end, only this user can write to directories.

An interrupted run continues with `resume=True`. Files with the size and time of the index are kept, as a file gets
its name last. After a power cut, a file may have its name without its bytes. So files from before the boot of this
machine are written again.
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
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.unpack.attributes import Attributes
from bootseer.tree.unpack.directories import TreeDirectories, entry_errors
from bootseer.tree.unpack.files import FileWriter, link_names, remove, run_batches
from bootseer.tree.unpack.helpers import Helpers, Owners
from bootseer.tree.unpack.plan import Plan, files_of, plan
from bootseer.tree.unpack.portions import directories_in_no_portion, portions
from bootseer.tree.unpack.private import PrivateWriter
from bootseer.tree.unpack.safe_directories import LastDirectory, open_root

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

THREADS = 8  # they mostly wait for a store or a disk
TEMPORARY = b".bootseer-tmp-"
_FIX = "unpack into an empty directory"

Progress = Callable[[int, int], object]  # bytes and files since the last call, from the calling thread


class Materialised(NamedTuple):
    """The result of unpacking."""

    files: int  # regular ones that were written
    kept_files: int  # written by an earlier run
    written_bytes: int  # without holes
    hot_files: int
    skipped: dict[str, int]  # attributes and files that this user or file system cannot have, and how often


def materialise(
    index: Index,
    directory: str,
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
    """Unpack a tree into an empty directory.

    Args:
        hot: blocks in the order in which a start reads them. Files with hot blocks come first, each as a whole.
        on_hot_done: called when all hot files are usable; without hot blocks, at the end.
        owners: "as stored" keeps owners, devices, setuid bits and all extended attributes, for root. With "mine",
        and     for other users, everything belongs to the caller, without attributes that depend on the owner.
        resume: the directory contains an interrupted run of the same tree.
        is_private: no other process reads the directory before this returns. After an error or a kill, it is
        deleted     as it is: files get their names at once. That is the fastest mode.
        helpers: write regular files, into a private directory, without `hot`; `blocks` are not read then.
        meanwhile: called once while helpers are busy.
        boot_s: the boot time of this machine, since the epoch; tests set another one.
    Raises: StorageError, also when the disk is full; HelperFailedError; IntegrityError; ConfigError. Files that
    have     their names are whole even then.
    """
    assert not (resume and is_private), "a directory that is deleted after errors cannot be resumed"
    assert helpers is None or (is_private and not hot), "helpers support no order"
    keeps_owners = owners == "as stored" and os.geteuid() == 0
    with map_os_errors(directory), open_root(directory) as root_fd, _lock(root_fd, directory):
        was_given = resume and keeps_owners  # to the owner in the index, by the earlier run
        _check_owner(root_fd, directory, index.uids[0] if was_given else os.geteuid())
        unpacking = _Unpacking(
            index,
            directory,
            root_fd,
            keeps_owners=keeps_owners,
            threads=threads,
            boot_s=_read_boot_s() if boot_s is None else boot_s,
            is_private=is_private,
        )
        if resume:
            unpacking.look()
        elif os.listdir(root_fd):
            raise ConfigError(f"{directory}: is not empty: {_FIX}")
        progress = on_progress or (lambda _bytes, _files: None)
        if helpers is not None:
            return unpacking.run_by(helpers, owners, meanwhile, on_hot_done, progress)
        return unpacking.run(blocks, hot, on_hot_done, progress, resume=resume)


def unpack_portion(
    index: Index, directory: str, root_fd: int, blocks: BlockSource, *, owners: Owners, on_progress: Progress
) -> Mapping[str, int]:
    """Write the files of a portion, for a helper, into the directory that `materialise` was called with.

    Returns: the skipped attributes. Raises: StorageError, IntegrityError.
    """
    with map_os_errors(directory):
        unpacking = _Unpacking(
            index,
            directory,
            root_fd,
            keeps_owners=owners == "as stored" and os.geteuid() == 0,
            threads=1,
            boot_s=0.0,
            is_private=True,
        )
        return unpacking.run_portion(blocks, on_progress)


class _Unpacking:
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
        self._directory = folder
        self._root_fd = root_fd
        self._threads = threads
        self._attributes = Attributes(index, keeps_owners=keeps_owners)
        self._prefix = TEMPORARY
        while any(name.startswith(self._prefix) for name in index.names):
            self._prefix += b"x"
        self._tree_directories = TreeDirectories(index, folder, root_fd, self._attributes, is_private=is_private)
        self._directories = self._tree_directories.names
        self._links: dict[int, list[int]] = {}  # additional names of an entry
        for entry, link in enumerate(index.links):
            if link != -1:
                self._links.setdefault(link, []).append(entry)
        self._kept: set[int] = set()  # regular files that already exist
        self._unseen = set(self._directories)  # directories that were not inspected

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
        self._tree_directories.make()
        if resume:
            self.look()  # also directories that could not be entered before
        files = [entry for entry in files_of(self._index) if entry not in self._kept]
        todo = plan(self._index, files, hot)
        self._make_others()
        written_bytes = self._write(files, todo, blocks, on_progress, on_hot_done if hot else None)
        self._tree_directories.finish()
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
        """Do the same with helpers, which write the files meanwhile."""
        os.fchmod(self._root_fd, 0o700)
        files = files_of(self._index)
        given = portions(self._index, files, self._links, helpers.count)
        helpers.begin(self._index, self._directory, self._root_fd, owners, given)
        self._tree_directories.make(directories_in_no_portion(self._index, files, self._links))
        self._make_others()
        if meanwhile is not None:
            meanwhile()
        written_bytes = 0
        with closing(helpers.wait()) as results:
            for count, done in results:
                written_bytes += count
                on_progress(count, done)
        self._tree_directories.finish()
        if on_hot_done is not None:
            on_hot_done()
        skipped = Counter(self._attributes.skipped)
        skipped.update(helpers.skipped)
        return Materialised(len(files), 0, written_bytes, 0, dict(skipped))

    def run_portion(self, blocks: BlockSource, on_progress: Progress) -> Mapping[str, int]:
        """Write regular files and their directories; the caller of the whole run sets directory attributes."""
        self._tree_directories.make()
        files = files_of(self._index)
        todo = plan(self._index, files)
        self._write(files, todo, blocks, on_progress, None)
        on_progress(0, sum(not todo.pieces[entry] for entry in files))  # files in no batch
        return self._attributes.skipped

    def _write(
        self,
        files: Sequence[int],
        todo: Plan,
        blocks: BlockSource,
        on_progress: Progress,
        on_hot_done: Callable[[], object] | None,
    ) -> int:
        """Write regular files into existing directories; return the bytes."""
        writer = (PrivateWriter if self._is_private else FileWriter)(
            self._index,
            self._directory,
            self._root_fd,
            self._directories,
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
                    self._tree_directories.open()
                    on_hot_done()
        except BaseException:
            writer.take_away_unfinished()
            raise
        finally:
            writer.close()
        return written_bytes

    # ---- neither directory nor regular file ----------------------------------------------------------------

    def _make_others(self) -> None:
        index = self._index
        with LastDirectory(self._root_fd) as directories:
            for entry, mode in enumerate(index.modes):
                if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or index.links[entry] != -1:
                    continue
                with self._errors(entry):
                    fd, name = directories.open(self._directories[index.parents[entry]]), index.names[entry]
                    if self._try_make(entry, fd, name):
                        self._attributes.set_named(entry, fd, name)
                        link_names(self._root_fd, index, self._directories, entry, self._links)

    def _try_make(self, entry: int, fd: int, name: bytes) -> bool:
        """Make a file without attributes; return whether it exists now."""
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

    # ---- an interrupted run --------------------------------------------------------------------------------

    def look(self) -> None:
        """Find whole regular files, and remove partial ones; change nothing else.

        The next call inspects directories that cannot be entered yet. Raises: ConfigError for files not of this
        tree.
        """
        entries: dict[int, dict[bytes, int]] = {entry: {} for entry in self._unseen}
        for entry in range(1, len(self._index)):
            if self._index.parents[entry] in entries:
                entries[self._index.parents[entry]][self._index.names[entry]] = entry
        with LastDirectory(self._root_fd) as directories:
            for entry in sorted(self._unseen):
                with self._errors(entry):
                    try:
                        self._look_into(directories.open(self._directories[entry]), entries[entry])
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
                    raise ConfigError(f"{self._path(entry)}: is of another type than in the tree: {_FIX}")
                # Only the system sets the ctime.
                is_whole = found.st_ctime > self._boot_s and (
                    (found.st_size, found.st_mtime_ns) == (index.sizes[entry], index.mtimes_ns[entry])
                )
                if index.links[entry] == -1 and stat.S_ISREG(found.st_mode) and is_whole:
                    self._kept.add(entry)
            elif name.startswith(self._prefix):
                os.unlink(name, dir_fd=fd)
            else:
                raise ConfigError(
                    f"{self._directory}: has {os.fsdecode(name)!r}, which is not of this tree: {_FIX}"
                )

    def _path(self, entry: int) -> str:
        return os.path.join(self._directory, os.fsdecode(self._index.path(entry)))

    def _errors(self, entry: int) -> AbstractContextManager[None]:
        return entry_errors(self._index, self._directory, entry)


def _read_boot_s() -> float:
    """Return the boot time of this machine, since the epoch, by the current clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _check_owner(root_fd: int, directory: str, given_uid: int) -> None:
    """Check that the directory is this user's or `given_uid`'s: its owner can always exchange its contents.

    Raises: ConfigError.
    """
    owner = os.fstat(root_fd).st_uid
    if owner in (os.geteuid(), given_uid) or owner == _uid_of_new(root_fd):
        return
    raise ConfigError(
        f"{directory}: belongs to user {owner}, not to {os.geteuid()}, this user: unpack into a directory of yours"
    )


def _uid_of_new(root_fd: int) -> int:
    """Return the owner of a new file there: servers may map root to another user (root_squash). -1 on error."""
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
def _lock(root_fd: int, directory: str) -> Iterator[None]:
    """Lock out other unpacking processes, on file systems with locks."""
    try:
        fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(f"{directory}: another process is unpacking into it") from error
    yield  # closing the descriptor releases it
