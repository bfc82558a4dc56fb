"""Where code that opens files by name finds the version: the path that ranks get, and what becomes of it.

In: a version, and the arena that has all, some or nothing of it. Out: links into the arena where all is there,
else the version's own place on this machine, else a mount, else a copy on this node's disk. When the arena's
memory is given back, the path stays: its links then lead to the files' own place, or to a mount of the store, or
to a copy. All of it goes with the keeper and is of one attempt.
"""

from __future__ import annotations

import os
import posixpath
import selectors
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from bootseer.checkpoint.arena import Arena
from bootseer.checkpoint.doubles import doubles
from bootseer.checkpoint.keeper_process import MOUNT_NAME
from bootseer.checkpoint.manifest import is_version, version_of
from bootseer.checkpoint.opening import local_path, only_file
from bootseer.checkpoint.rank_copy import Fork, RankCopy
from bootseer.checkpoint.rank_mount import RankMount
from bootseer.errors import CheckpointError


class Found(NamedTuple):
    """What came of looking for a path."""

    path: str  # "": there is none
    why: str = ""
    kind: str = ""  # of a failure, as filler.py has them


Then = Callable[[Found], object]


class Shown(NamedTuple):
    """A version of a URL, and the names of its files."""

    url: str
    version: str
    digest: str
    names: tuple[str, ...]
    size: int = 0  # bytes of all files

    @property
    def single(self) -> str:
        """The file's name where the URL means a file: then the path is that of a file, too."""
        return only_file(self.url, self.version, self.names)

    def path_in(self, folder: str) -> str:
        """What ranks get of a folder that has the version's files."""
        return os.path.join(folder, self.single) if self.single else folder

    @property
    def own_folder(self) -> str:
        """The folder on this machine that has its files; "" where there is none."""
        path = own_path(self.url, self.version)
        if not path:
            return ""
        return os.path.dirname(os.path.abspath(path)) if self.single else os.path.abspath(path)


def own_path(url: str, version: str) -> str:
    """A version on a file system of this machine; "" elsewhere, and of striped ones."""
    path = local_path(url)
    if path is None or is_version(version) or version_of(posixpath.basename(version)):
        return ""
    return os.path.join(path, version) if version else path


class RankPaths:
    """Runs on the keeper's loop."""

    def __init__(
        self,
        folder: str,
        selector: selectors.BaseSelector,
        fork: Fork,
        say: Callable[[str], object],
        say_alive: Callable[[], object],
        damaged: Callable[[str], object],
    ) -> None:
        """Args: damaged: is told what a mount has found wrong with the version's bytes."""
        self._folder = folder
        self._selector = selector
        self._fork = fork
        self._say = say
        self._say_alive = say_alive
        self._damaged = damaged
        self.peers = ""  # the file of the job's peers
        self._shown: Shown | None = None
        self._mount: RankMount | None = None
        self._copy: RankCopy | None = None
        self._links = ""  # the folder that has them
        self._is_of_arena = False  # where the links lead
        self._is_moving = False

    def show(self, shown: Shown, arena: Arena, address: str, then: Then) -> None:
        """Calls `then` with the path, at once or when it is mounted."""
        self._shown = shown
        there = {name: fd for number, (name, fd) in enumerate(zip(shown.names, arena.fds, strict=True))
                 if arena.is_complete(number)}  # fmt: skip
        missing = set(shown.names) - set(there)
        if not missing or (shown.own_folder and missing <= doubles(shown.names)):
            try:
                self._make_links(there, {name: os.path.join(shown.own_folder, name) for name in missing})
            except OSError as error:
                self.drop_links()
                self._say(f"warning: the checkpoint's files cannot be had as links: {error}")
            else:
                then(Found(shown.path_in(self._links)))
                return
        path = own_path(shown.url, shown.version)
        if path:
            then(Found(path))
        else:
            self.show_mount(shown, address, then)

    def show_mount(self, shown: Shown, address: str, then: Then) -> None:
        """As `show`, of what is read through the arena at `address`, or, without one, from the store."""
        self._shown = shown

        def mounted(folder: str, why: str) -> None:
            then(Found(shown.path_in(folder)) if folder else Found("", why))

        self._start_mount(shown, address, mounted)

    def show_copy(self, shown: Shown, then: Then, progress: Callable[[int, int], object]) -> None:
        """As `show`, of plain files that are made on this node's disk first."""
        self._shown = shown

        def copied(folder: str, why: str, kind: str) -> None:
            then(Found(shown.path_in(folder)) if folder else Found("", why, kind))

        self._drop_copy()
        self._copy = RankCopy(self._selector, self._fork, self._folder, copied, progress)
        try:
            self._copy.start(shown.url, shown.version, shown.digest, shown.size, self.peers)
        except (OSError, CheckpointError) as error:
            self._drop_copy()
            then(Found("", str(error)))

    def give_back(self, then: Callable[[], object]) -> None:
        """Calls `then` when the arena can go: the path will lead elsewhere. Soon, or at once."""
        if self._is_moving:
            return
        if self._mount is not None:
            self._mount.let_go()
        if not self._is_of_arena or self._shown is None:
            then()
            return
        shown = self._shown
        if shown.own_folder:
            if self._move_links(shown.names, shown.own_folder):
                then()
            return

        def mounted(folder: str, why: str) -> None:
            if folder:
                moved(folder)
            else:
                self.show_copy(shown, lambda found: copied(found, why), lambda _done, _all: None)

        def copied(found: Found, why: str) -> None:
            if found.path:
                moved(os.path.dirname(found.path) if shown.single else found.path)
                return
            self._is_moving = False
            self._say(
                "warning: the checkpoint's memory is not given back, as its files would go with it: nothing can be"
                f" mounted in their place ({why}), and they cannot be copied to disk ({found.why})"
            )

        def moved(folder: str) -> None:
            self._is_moving = False
            if self._move_links(shown.names, folder):
                then()

        self._is_moving = True
        self._start_mount(shown, "", mounted)

    def drop_links(self) -> None:
        """Those into the arena, before its descriptors are closed: their numbers will be those of other files."""
        if self._is_of_arena:
            self._remove_links()

    def drop(self) -> None:
        """Nobody uses the path any more."""
        self._is_moving = False
        self._drop_mount()
        self._drop_copy()
        self._remove_links()
        self._shown = None

    def tick(self) -> None:
        if self._mount is not None:
            self._mount.tick()

    def close_inherited(self) -> None:
        """In a forked child: what is open is the keeper's."""
        if self._mount is not None:
            self._mount.close_inherited()
        if self._copy is not None:
            self._copy.close_inherited()

    # ---- links -----------------------------------------------------------------------------------------------

    def _make_links(self, fds: Mapping[str, int], others: Mapping[str, str]) -> None:
        """Args: others: paths of files that are not in the arena."""
        self._remove_links()
        self._links = tempfile.mkdtemp(prefix="files-", dir=self._folder)
        self._is_of_arena = True
        for name, place in {
            **{name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in fds.items()},
            **others,
        }.items():
            path = os.path.join(self._links, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.symlink(place, path)

    def _move_links(self, names: Collection[str], folder: str) -> bool:
        """Each is replaced in one step: who opens it finds the file at any time. Whether none needs the arena."""
        if not self._links:
            return True  # they have gone meanwhile
        temporary = os.path.join(self._folder, "link.new")
        try:
            for name in names:
                os.symlink(os.path.join(folder, name), temporary)
                os.rename(temporary, os.path.join(self._links, name))
        except OSError as error:
            self._say(
                f"warning: the checkpoint's memory is not given back, as its files would go with it: {error}"
            )
            return False
        self._is_of_arena = False
        return True

    def _remove_links(self) -> None:
        if self._links:
            shutil.rmtree(self._links, ignore_errors=True)
        self._links, self._is_of_arena = "", False

    # ---- mount -----------------------------------------------------------------------------------------------

    def _start_mount(self, shown: Shown, address: str, then: Callable[[str, str], object]) -> None:
        self._drop_mount()
        folder = os.path.join(self._folder, MOUNT_NAME)
        self._mount = RankMount(self._selector, folder, then, self._say, self._say_alive, self._damaged)
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
