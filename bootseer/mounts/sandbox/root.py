"""Makes the root file system for processes in an image: a mount namespace of this process.

In: directories with the image's files (a mount, or unpacked), the node's files to bind. Out: the calling process
is inside, and can pass on its namespace. An overlay takes writes; where overlayfs is not available the image is
shown as it is. Nothing of it is visible to the node, and nothing stays after the last process inside. Call it in a
process with one thread that does nothing else. Import modules before: the node's files are out of reach
afterwards.

Source: pivot_root(2); user_namespaces(7); Documentation/filesystems/overlayfs.rst (userxattr).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.linux import namespaces
from bootseer.mounts.sandbox import accounts, overlay, writable
from bootseer.mounts.sandbox.binds import OWN_DIRECTORY, Bind, is_within

TMPFS, NONE = "tmpfs", "none"  # of `writable`
MAX_SHADOWED = 20_000  # entries of a directory of the image that is bound entry by entry
_FLAGS = kernel.NOSUID | kernel.NODEV


class RootSpec(NamedTuple):
    lowers: Sequence[str]  # directories, the first above the others
    writable: str = TMPFS  # where writes go: TMPFS, NONE, or a directory
    binds: Sequence[Bind] = ()  # as `plan_binds` orders them
    links: Sequence[tuple[str, str]] = ()  # (target, path of the link)
    users: Sequence[str] = ()  # lines of the node's passwd and group; () for the image's own files
    groups: Sequence[str] = ()
    places: Sequence[str] = ()  # directories to make, for mounts that follow (namespaces.attach)


class RootResult(NamedTuple):
    has_overlay: bool
    has_user_namespace: bool
    notes: tuple[str, ...]  # lines for users


def make_root(spec: RootSpec) -> RootResult:
    """Make the root and move this process into it.

    Raises: ConfigError when this user, kernel or node does not support it; StorageError.
    """
    maker = _Maker(spec)
    maker.lock_writable()
    maker.separate()
    try:
        maker.open_sources()
        maker.make_layers()
        maker.move()
        maker.fill()
        maker.finish()
    except OSError as error:
        raise StorageError(f"the image's root cannot be made: {error}") from error
    return RootResult(maker.has_overlay, maker.is_user, tuple(maker.notes))


def find_program(names: Iterable[str], path: str) -> str:
    """Return the absolute path of the first program that exists, "" if none does; call it inside."""
    for name in names:
        directories = (
            [""] if "/" in name else [directory for directory in path.split(":") if directory.startswith("/")]
        )
        for directory in directories:
            place = os.path.join(directory, name)
            if place.startswith("/") and os.path.isfile(place) and os.access(place, os.X_OK):
                return place
    return ""


class _Maker:
    """The steps to make a root, in order."""

    def __init__(self, spec: RootSpec) -> None:
        self._spec = spec
        self.notes: list[str] = []
        self.is_user = False
        self.has_overlay = False
        self._sources: list[tuple[Bind, int]] = []
        self._lowers: list[int] = []
        self._old = self._proc = self._files = self._claimed = -1
        # The name of the node's root while this one is made: random, so that no link of an image leads there.
        self._old_name = f".bootseer-{os.urandom(16).hex()}"
        self._has_old = False
        self._scratch = self._root = ""  # on the node
        self._shadowed: list[str] = ["/"]
        self._bound: list[str] = []  # directories of the node, by their paths inside

    def lock_writable(self) -> None:
        if self._spec.writable not in (TMPFS, NONE):
            self._claimed = writable.lock_directory(self._spec.writable)  # held while this process lives

    def separate(self) -> None:
        self.is_user = namespaces.separate()

    # ---- on the node -----------------------------------------------------------------------------------------

    def open_sources(self) -> None:
        """Open all sources of binds: later, paths refer to the image's files."""
        self._old = _open("/")
        self._proc = _open("/proc")
        for lower in self._spec.lowers:
            try:
                self._lowers.append(_open(lower, os.O_DIRECTORY))
            except OSError as error:
                raise ConfigError(f"{lower}: is no directory with an image's files: {error.strerror}") from error
        for bind in self._spec.binds:
            try:
                self._sources.append((bind, _open(bind.source)))
            except OSError as error:
                if not bind.is_optional:
                    raise ConfigError(
                        f"{bind.source} cannot be bound into the image: {error.strerror}; leave it out of "
                        "--image-bind, or make it on every node"
                    ) from error
        os.fchdir(self._proc)

    def make_layers(self) -> None:
        """Mount a tmpfs for Bootseer's files where no path is needed any more: over the image's own directory."""
        scratch = os.path.realpath(self._spec.lowers[0])
        if scratch == "/":
            raise ConfigError("/ is this node's own root: name the directory of an image")
        kernel.mount("bootseer", scratch, "tmpfs", _FLAGS, "mode=0755")
        self._scratch = scratch
        self._root = os.path.join(scratch, "root")
        for name in ("root", "files"):
            os.mkdir(os.path.join(scratch, name), 0o755)
        self._files = _open(os.path.join(scratch, "files"), os.O_DIRECTORY)
        upper, work = self._upper(scratch)
        os.mkdir(os.path.join(upper, self._old_name), 0o700)
        lowers = [f"/proc/self/fd/{fd}" for fd in self._lowers]
        try:
            overlay.mount_overlay(lowers, self._root, upper=upper, work=work)
            self.has_overlay = True
        except BootseerError as error:
            if self._spec.writable not in (TMPFS, NONE):
                raise ConfigError(
                    f"--image-writable {self._spec.writable}: cannot hold writes to an image ({error}); "
                    "it must be a directory of a local file system, or tmpfs"
                ) from error
            if len(lowers) > 1:
                raise
            if self._spec.writable != NONE:
                self.notes.append(f"the image's own directories are read-only: {error}")
            kernel.mount("bootseer", self._root, "tmpfs", _FLAGS, "mode=0755")
            os.mkdir(os.path.join(self._root, self._old_name), 0o700)
            self._bind_entries(self._lowers[0], self._root)

    def _upper(self, scratch: str) -> tuple[str, str]:
        """Return the directories for writes."""
        return writable.make_layers(
            scratch if self._claimed < 0 else os.path.abspath(self._spec.writable),
            os.fstat(self._lowers[0]),
            claimed_fd=self._claimed,
            gives_away=not os.geteuid() and not self.is_user,
        )

    # ---- between ---------------------------------------------------------------------------------------------

    def move(self) -> None:
        """Enter the root: paths are the image's now; the node is reached by descriptors, relative to its /proc."""
        self._has_old = namespaces.pivot(self._root, self._old_name)
        os.fchdir(self._proc)

    def fill(self) -> None:
        """Add everything that is visible besides the image's own files."""
        self._make_mount_point(OWN_DIRECTORY, is_folder=True)
        for directory in self._spec.places:
            with suppress(BootseerError, OSError):  # the mount there fails later, and is reported
                self._make_mount_point(directory, is_folder=True)
        for text, target in self._spec.links:
            self._link(text, target)
        for lines, name in ((self._spec.users, "passwd"), (self._spec.groups, "group")):
            if lines:
                self._write_accounts(lines, name)
        # Otherwise it would be visible in its directory of the node.
        os.fchdir(self._old)
        kernel.unmount(self._scratch.lstrip("/"), kernel.DETACH)
        os.fchdir(self._proc)
        for bind, fd in self._sources:
            self._bind(bind, f"self/fd/{fd}", stat.S_ISDIR(os.fstat(fd).st_mode))

    def _bind(self, bind: Bind, source: str, is_folder: bool) -> None:
        try:
            self._make_mount_point(bind.target, is_folder=is_folder)
        except OSError as error:
            raise ConfigError(f"{bind.target} cannot be made inside the image: {error.strerror}") from error
        kernel.mount(source, bind.target, "", kernel.BIND | namespaces.REC)
        self._bound.append(os.path.realpath(bind.target))
        attributes = namespaces.RDONLY if bind.is_read_only else 0
        if not any(is_within(bind.target, directory) for directory in ("/dev", "/proc", "/sys")):
            attributes |= namespaces.NOSUID | namespaces.NODEV
        self._restrict(bind.target, attributes)

    def _restrict(self, target: str, attributes: int) -> None:
        """Add attributes to a mount; on old kernels not to those below it."""
        if not attributes or namespaces.set_attributes(target, attributes):
            return
        kept = os.statvfs(target).f_flag & (kernel.RDONLY | kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
        number = kernel.try_mount("", target, "", kernel.REMOUNT | kernel.BIND | kept | attributes)
        if number and attributes & namespaces.RDONLY:
            raise kernel.mount_error(number, target, target, "")

    def _write_accounts(self, lines: Sequence[str], name: str) -> None:
        target = f"/etc/{name}"
        text = accounts.merge_accounts(lines, _read_lines(target))
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=self._files)
        with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        self._bind(Bind(name, target, is_read_only=True), f"self/fd/{self._files}/{name}", is_folder=False)

    def finish(self) -> None:
        os.chdir("/")
        if self._has_old:
            kernel.unmount(f"/{self._old_name}", kernel.DETACH)
        os.rmdir(f"/{self._old_name}")
        if self._spec.writable == NONE or not self.has_overlay:
            for directory in self._shadowed:
                number = kernel.try_mount("", directory, "", kernel.REMOUNT | kernel.BIND | kernel.RDONLY | _FLAGS)
                if number:
                    raise kernel.mount_error(number, directory, directory, "")
        for fd in (self._old, self._proc, self._files, *self._lowers, *(fd for _, fd in self._sources)):
            os.close(fd)

    # ---- places ----------------------------------------------------------------------------------------------

    def _make_mount_point(self, target: str, *, is_folder: bool) -> None:
        """Make a mount point if it does not exist; never in a directory of the node."""
        try:
            mode = os.stat(target).st_mode
        except (FileNotFoundError, NotADirectoryError):
            pass
        else:
            if stat.S_ISDIR(mode) != is_folder:
                what = ("a directory", "a file") if is_folder else ("a file", "a directory")
                raise ConfigError(
                    f"{target}: is {what[0]} on the node and {what[1]} in the image: bind it elsewhere"
                )
            return
        parent = os.path.dirname(target)
        if parent != "/":
            self._make_mount_point(parent, is_folder=True)
        self._allow_making(parent, target)
        if os.path.islink(target):
            os.unlink(target)  # a dangling link
        if is_folder:
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def _allow_making(self, directory: str, target: str) -> None:
        """Make it possible to create files in a directory of the image, even a read-only one.

        Raises: ConfigError if it is one of the node's.
        """
        real = os.path.realpath(directory)
        if any(is_within(real, place) for place in self._bound):
            raise ConfigError(
                f"{target}: does not exist in a directory of the node: make it there, or bind it elsewhere"
            )
        if os.access(real, os.W_OK):
            return
        fd = _open(real, os.O_DIRECTORY)
        try:
            kernel.mount("bootseer", real, "tmpfs", _FLAGS, "mode=0755")
            self._shadowed.append(real)
            self._bind_entries(fd, real)
        finally:
            os.close(fd)

    def _bind_entries(self, fd: int, directory: str) -> None:
        """Bind the entries of a directory of the image into a tmpfs at `directory`, where more can be created.

        Args: fd: the image's directory, by O_PATH.
        """
        source = os.open(f"self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = os.listdir(source)
            if len(names) > MAX_SHADOWED:
                raise ConfigError(f"{directory}: has too many entries to bind anything in it without an overlay")
            for name in names:
                self._show_entry(source, name, os.path.join(directory, name))
        finally:
            os.close(source)

    def _show_entry(self, source: int, name: str, place: str) -> None:
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), place)
            return
        if stat.S_ISDIR(mode):
            os.mkdir(place, 0o755)
        else:
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
        try:
            kernel.mount(f"self/fd/{entry}", place, "", kernel.BIND | namespaces.REC)
            self._restrict(place, namespaces.RDONLY | namespaces.NOSUID | namespaces.NODEV)
        finally:
            os.close(entry)

    def _link(self, text: str, target: str) -> None:
        """Make a symbolic link, unless another file is there; a failure becomes a note."""
        try:
            if os.path.lexists(target) and not os.path.islink(target):
                return
            parent = os.path.dirname(target)
            self._make_mount_point(parent, is_folder=True)
            self._allow_making(parent, target)
            if os.path.islink(target):
                os.unlink(target)
            os.symlink(text, target)
        except (OSError, BootseerError) as error:
            self.notes.append(f"the link {target} cannot be made inside the image: {error}")


def _open(path: str, flags: int = 0) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC | flags)


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file of the image, which may be of any type."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return []
    with open(fd, encoding="utf-8", errors="surrogateescape") as file:
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return []
            return file.read(accounts.MAX_BYTES).splitlines()
        except OSError:
            return []
