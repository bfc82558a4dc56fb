"""Where code that opens files by name finds the version: the path that ranks get, and its later targets.

In: a version, and the arena that has all, some or none of it. Out: links into the arena if it has all; otherwise
the version's own place on this machine, or a mount, or a copy on this node's disk. When the arena's memory is
released, the path stays: its links then lead to the files' own place, or to a mount of the store, or to a copy.
All of it is removed with the service and belongs to one attempt.
"""

from __future__ import annotations

import os
import posixpath
import selectors
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from bootseer.checkpoint.format.doubles import find_duplicates
from bootseer.checkpoint.format.manifest import is_version, version_of
from bootseer.checkpoint.io.arena import Arena
from bootseer.checkpoint.opening import local_path, single_file
from bootseer.checkpoint.service.process import MOUNT_NAME, Fork
from bootseer.checkpoint.service.rank_copy import RankCopy
from bootseer.checkpoint.service.rank_mount import RankMount
from bootseer.errors import CheckpointError
from bootseer.logs import get_logger

_log = get_logger(__name__)


class RankPath(NamedTuple):
    """The result of providing a path."""

    path: str  # "": none
    why: str = ""
    kind: str = ""  # of a failure, one of filler.py's kinds


Then = Callable[[RankPath], object]


class ShownVersion(NamedTuple):
    """A version of a URL, and the names of its files."""

    url: str
    version: str
    digest: str
    names: tuple[str, ...]
    size: int = 0  # bytes of all files

    @property
    def single(self) -> str:
        """The file's name if the URL means a file: then the path is a file's, too."""
        return single_file(self.url, self.version, self.names)

    def path_in(self, directory: str) -> str:
        """Return the path for ranks in a directory that has the version's files."""
        return os.path.join(directory, self.single) if self.single else directory

    @property
    def own_directory(self) -> str:
        """The directory on this machine that has its files; "" if there is none."""
        path = own_path(self.url, self.version)
        if not path:
            return ""
        return os.path.dirname(os.path.abspath(path)) if self.single else os.path.abspath(path)


def own_path(url: str, version: str) -> str:
    """Return the path of a version on a file system of this machine; "" elsewhere, and for striped ones."""
    path = local_path(url)
    if path is None or is_version(version) or version_of(posixpath.basename(version)):
        return ""
    return os.path.join(path, version) if version else path


class RankPathProvider:
    """Provides the path; runs on the service's loop."""

    def __init__(
        self,
        folder: str,
        selector: selectors.BaseSelector,
        fork: Fork,
        say_alive: Callable[[], object],
        damaged: Callable[[str], object],
    ) -> None:
        """Args: damaged: called with damage that a mount has found in the version's bytes."""
        self._directory = folder
        self._selector = selector
        self._fork = fork
        self._say_alive = say_alive
        self._damaged = damaged
        self.peers = ""  # the file of the job's peers
        self._shown: ShownVersion | None = None
        self._mount: RankMount | None = None
        self._copy: RankCopy | None = None
        self._links = ""  # their directory
        self._is_of_arena = False  # where the links lead
        self._is_moving = False

    def show(self, shown: ShownVersion, arena: Arena, address: str, then: Then) -> None:
        """Call `then` with the path, at once or when it is mounted."""
        self._shown = shown
        there = {name: fd for number, (name, fd) in enumerate(zip(shown.names, arena.fds, strict=True))
                 if arena.is_complete(number)}  # fmt: skip
        missing = set(shown.names) - set(there)
        if not missing or (shown.own_directory and missing <= find_duplicates(shown.names)):
            try:
                self._make_links(there, {name: os.path.join(shown.own_directory, name) for name in missing})
            except OSError as error:
                self.drop_links()
                _log.warning("links to the checkpoint's files disabled: %s", error)
            else:
                then(RankPath(shown.path_in(self._links)))
                return
        path = own_path(shown.url, shown.version)
        if path:
            then(RankPath(path))
        else:
            self.show_mount(shown, address, then)

    def show_mount(self, shown: ShownVersion, address: str, then: Then) -> None:
        """Mount the version and call `then` like `show`; reads go to the arena at `address`, or to the store."""
        self._shown = shown

        def mounted(directory: str, why: str) -> None:
            then(RankPath(shown.path_in(directory)) if directory else RankPath("", why))

        self._start_mount(shown, address, mounted)

    def show_copy(self, shown: ShownVersion, then: Then, progress: Callable[[int, int], object]) -> None:
        """Copy plain files to this node's disk, and call `then` like `show`."""
        self._shown = shown

        def copied(directory: str, why: str, kind: str) -> None:
            then(RankPath(shown.path_in(directory)) if directory else RankPath("", why, kind))

        self._drop_copy()
        self._copy = RankCopy(self._selector, self._fork, self._directory, copied, progress)
        try:
            self._copy.start(shown.url, shown.version, shown.digest, shown.size, self.peers)
        except (OSError, CheckpointError) as error:
            self._drop_copy()
            then(RankPath("", str(error)))

    def give_back(self, then: Callable[[], object]) -> None:
        """Move the path away from the arena, and call `then` when the arena can be released: soon, or at once."""
        if self._is_moving:
            return
        if self._mount is not None:
            self._mount.let_go()
        if not self._is_of_arena or self._shown is None:
            then()
            return
        shown = self._shown
        if shown.own_directory:
            if self._move_links(shown.names, shown.own_directory):
                then()
            return

        def mounted(directory: str, why: str) -> None:
            if directory:
                moved(directory)
            else:
                self.show_copy(shown, lambda found: copied(found, why), lambda _done, _all: None)

        def copied(found: RankPath, why: str) -> None:
            if found.path:
                moved(os.path.dirname(found.path) if shown.single else found.path)
                return
            self._is_moving = False
            _log.warning(
                "the checkpoint's memory is not released, because ranks need its files: they cannot be"
                " mounted (%s) or copied to disk (%s)",
                why,
                found.why,
            )

        def moved(directory: str) -> None:
            self._is_moving = False
            if self._move_links(shown.names, directory):
                then()

        self._is_moving = True
        self._start_mount(shown, "", mounted)

    def drop_links(self) -> None:
        """Remove links into the arena before its descriptors are closed: their numbers may be reused."""
        if self._is_of_arena:
            self._remove_links()

    def drop(self) -> None:
        """Remove all paths, which no rank uses any more."""
        self._is_moving = False
        self._drop_mount()
        self._drop_copy()
        self._remove_links()
        self._shown = None

    def tick(self) -> None:
        if self._mount is not None:
            self._mount.tick()

    # ---- links -----------------------------------------------------------------------------------------------

    def _make_links(self, fds: Mapping[str, int], others: Mapping[str, str]) -> None:
        """Args: others: paths of files that are not in the arena."""
        self._remove_links()
        self._links = tempfile.mkdtemp(prefix="files-", dir=self._directory)
        self._is_of_arena = True
        for name, place in {
            **{name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in fds.items()},
            **others,
        }.items():
            path = os.path.join(self._links, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.symlink(place, path)

    def _move_links(self, names: Collection[str], directory: str) -> bool:
        """Replace each link in one step, so that it is always valid. Return whether none needs the arena."""
        if not self._links:
            return True  # they were removed meanwhile
        temporary = os.path.join(self._directory, "link.new")
        try:
            for name in names:
                os.symlink(os.path.join(directory, name), temporary)
                os.rename(temporary, os.path.join(self._links, name))
        except OSError as error:
            _log.warning("the checkpoint's memory is not released, because ranks need its files: %s", error)
            return False
        self._is_of_arena = False
        return True

    def _remove_links(self) -> None:
        if self._links:
            shutil.rmtree(self._links, ignore_errors=True)
        self._links, self._is_of_arena = "", False

    # ---- mount -----------------------------------------------------------------------------------------------

    def _start_mount(self, shown: ShownVersion, address: str, then: Callable[[str, str], object]) -> None:
        self._drop_mount()
        directory = os.path.join(self._directory, MOUNT_NAME)
        self._mount = RankMount(self._selector, directory, then, _log.line, self._say_alive, self._damaged)
        try:
            self._mount.start(shown.url, shown.version, shown.digest, address)
        except OSError as error:
            self._drop_mount()
            then("", str(error))

    def _drop_mount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.end()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.end()
