"""Opens an image for processes to run in: the source of its files, its root, and the files of the node inside.

In: the image's URL, the job's needs of the node. Out: `OpenImage`, whose prefix before a command enters the image.
Used by the image service of a job (service.py) and by `bootseer image run`.
"""

from __future__ import annotations

import grp
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.linux import namespaces
from bootseer.linux.child_processes import wait_killed
from bootseer.linux.privileges import may_mount
from bootseer.linux.syscalls import last_error, libc
from bootseer.logs import get_logger
from bootseer.mounts.sandbox import enter
from bootseer.mounts.sandbox.accounts import MAX_BYTES, missing_line
from bootseer.mounts.sandbox.binds import Bind, UnboundPath, find_hiding, plan_binds, why_not_by_default
from bootseer.mounts.sandbox.cdi_files import LIBRARIES, read_devices
from bootseer.mounts.sandbox.environ import EnvironChanges, image_environ
from bootseer.mounts.sandbox.process import ImageSandbox, SandboxRoot
from bootseer.mounts.sandbox.root import TMPFS, RootSpec
from bootseer.mounts.sandbox.source import ImageSource, OnOrigin, open_source
from bootseer.tree.status_folder import NAME, is_marked

_log = get_logger(__name__)

ASK_S = 30.0
STATUS_FOLDER = f"/{NAME}"
_NEWNS = 0x00020000
_MAX_DIRECTORIES = 250  # descriptors that go through a socket in one message


class ImageRequest(NamedTuple):
    url: str
    name: str = ""  # of the tree, if it was published under another name than this URL
    digest: str = ""  # of the tree, if it has to be this one
    workload: tuple[str, str] = ("", "")  # program and script: select the access trace
    writable: str = TMPFS  # tmpfs, none or a directory
    given: Sequence[Bind | UnboundPath] = ()  # --image-bind
    environ: Mapping[str, str] = {}  # --image-env
    programs: Sequence[str] = ()  # one of which must be there
    work: Sequence[str] = ()  # directories: working directory, the script's, HOME
    own: Sequence[str] = ()  # directories that are needed in any case
    files: Mapping[str, str] = {}  # Bootseer's own files, by their place inside
    reads_ahead: bool = True  # False if the access trace of the start is recorded in any case
    peers: str = ""  # path of the file of the job's peers, which are read before the store
    avoid_mount: str = ""  # reason to unpack it instead of mounting it, if possible
    on_origin: OnOrigin = lambda _url, _directories: None
    on_digest: Callable[[str], object] = lambda _: None
    on_fall_back: Callable[[str], object] | None = None


class OpenImage:
    """An image in which programs can be started until `close`; running ones continue."""

    def __init__(
        self,
        sandbox: ImageSandbox,
        source: ImageSource,
        held: SandboxRoot,
        changes: EnvironChanges,
        notes: Sequence[str],
        made_s: float,
        awaits_status: bool = False,
    ) -> None:
        self._sandbox = sandbox
        self.source = source
        self.changes = changes  # of the caller's environment
        self.program = held.program  # the first existing one of the request's
        self.notes = (*notes, *held.made.notes)
        self.has_user_namespace = held.made.has_user_namespace
        self.made_s = made_s  # time to make the root, without the source
        self._awaits_status = awaits_status
        # -I and -S: the caller's Python settings are ignored, and no site directory is searched.
        self.prefix = (sys.executable, "-I", "-S", enter_path(), held.address)

    def environ(self, caller: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a program that is started by `prefix`."""
        found = {name: value for name, value in caller.items() if name not in self.changes.unset}
        return {**found, **self.changes.set}

    def show(self, paths: Sequence[str]) -> list[str]:
        """Make later mounts of the node visible inside; return the paths that stay hidden."""
        there = [path for path in paths if os.path.isabs(path) and os.path.exists(path)]
        missing = self._sandbox.look(there)
        for path in missing:
            mounted = _mount_of(path)
            if not mounted:
                continue
            try:
                fd = namespaces.copy_mount(mounted)
            except ConfigError:
                continue  # not root: it is visible only where the node shares its mounts
            try:
                self._sandbox.attach(mounted, fd)
            finally:
                os.close(fd)
        return self._sandbox.look(missing) if missing else []

    def show_from(self, address: str, directories: Sequence[str]) -> None:
        """Attach the mounts over directories of the node behind `address` (process.ImageSandbox.lay): all,
        or none.

        Raises: ConfigError, StorageError.
        """
        try:
            carried = transfer_mounts(address, directories)
            try:
                for directory, fd in carried:
                    self._sandbox.attach(directory, fd)
            finally:
                for _, fd in carried:
                    os.close(fd)
        except (BootseerError, OSError):
            with suppress(BootseerError):
                self.hide(directories)
            raise

    def hide(self, directories: Sequence[str]) -> None:
        """Detach the mounts that `show_from` has attached there. Raises: ConfigError, StorageError."""
        for directory in directories:
            self._sandbox.detach(directory)

    def show_status_folder(self) -> None:
        """Attach the status folder, at the first call; a failure is logged. Starts do not wait for it."""
        if not self._awaits_status:
            return
        self._awaits_status = False
        try:
            fd = namespaces.copy_mount(self.source.open_status_folder())
            try:
                self._sandbox.attach(STATUS_FOLDER, fd)
            finally:
                os.close(fd)
        except (BootseerError, OSError) as error:
            _log.warning("status folder disabled: %s", error)

    def is_lost(self) -> bool:
        """Return whether no program can be started in it any more."""
        return self._sandbox.is_over() or self.source.is_lost()

    def close(self) -> None:
        self._sandbox.close()
        self.source.close()


def enter_path() -> str:
    """Return the compiled form if there is one, which this interpreter has validated: saves 3 ms per rank."""
    compiled = getattr(enter, "__cached__", None)
    return os.path.abspath(compiled if compiled and os.path.exists(compiled) else enter.__file__)


def open_image(request: ImageRequest, sandbox: ImageSandbox) -> OpenImage:
    """Fetch the image and make its root. The result's `close`, or the caller after an error, closes `sandbox`.

    Raises: ConfigError, StorageError, IntegrityError.
    """
    if not may_mount():
        namespaces.probe()  # else it would be unpacked for nothing
    source = open_source(
        request.url,
        request.workload,
        name=request.name,
        digest=request.digest,
        reads_ahead=request.reads_ahead,
        peers=request.peers,
        avoid_mount=request.avoid_mount,
        on_origin=request.on_origin,
        on_digest=request.on_digest,
        on_fall_back=request.on_fall_back,
    )
    try:
        began_s = time.monotonic()
        devices = read_devices()
        libraries = [LIBRARIES] if any(place.startswith(LIBRARIES + "/") for _, place in devices.links) else []
        changes = image_environ(source.env, os.environ, devices.environ, libraries, request.environ)
        places = find_places(request.work, request.own, request.files)
        binds = plan_binds(map(_absolute, request.given), [*places.binds, *devices.binds])
        status, status_notes = _plan_status_folder(source, request.given)
        spec = RootSpec(
            [source.folder], request.writable, binds, devices.links, read_users(), read_groups(), status
        )
        held = sandbox.make(
            spec, loader=changes.loader, programs=request.programs, path=changes.set.get("PATH", "")
        )
        if request.programs and not held.program:
            raise ConfigError(_not_found(request.programs, changes.set.get("PATH", ""), binds))
    except BaseException:
        source.close()
        raise
    notes = [*source.notes, *devices.notes, *places.notes, *status_notes]
    return OpenImage(sandbox, source, held, changes, notes, time.monotonic() - began_s, bool(status))


def _plan_status_folder(source: ImageSource, given: Sequence[Bind | UnboundPath]) -> tuple[list[str], list[str]]:
    """Return the directories to make for the status folder, one or none, and lines about it."""
    if source.how != "mounted" or any(each.target == STATUS_FOLDER for each in given):
        return [], []
    try:
        is_own = not is_marked(os.lstat(source.folder + STATUS_FOLDER))
    except OSError:
        is_own = False
    if is_own:
        return [], [f"status folder disabled: the image has a {STATUS_FOLDER} of its own"]
    return [STATUS_FOLDER], []


def _absolute(each: Bind | UnboundPath) -> Bind | UnboundPath:
    return each._replace(source=os.path.abspath(each.source)) if isinstance(each, Bind) else each


def _not_found(programs: Sequence[str], path: str, binds: Sequence[Bind]) -> str:
    names = " or ".join(programs)
    places = programs if programs[0].startswith("/") else path.split(":")
    hiding = next((target for place in places if (target := find_hiding(place, binds))), "")
    if hiding:
        return f"the image has no visible {names}: {hiding} is the node's (--image-bind no:{hiding} leaves it out)"
    if programs[0].startswith("/"):
        return f"the image has no program {names}: name another one with --image-python"
    return f"the image has no {names} on its PATH ({path}): name it with --image-python"


def _mount_of(path: str) -> str:
    """Return the mount point above a path of this node."""
    found = os.path.realpath(path)
    while found != "/" and not os.path.ismount(found):
        found = os.path.dirname(found)
    return "" if found == "/" else found


def transfer_mounts(address: str, directories: Sequence[str]) -> list[tuple[str, int]]:
    """Copy the mounts at these directories of the sandbox at `address` (enter.ask); the caller closes the copies.

    Raises: StorageError, ConfigError.
    """
    if len(directories) > _MAX_DIRECTORIES:
        raise StorageError(
            f"{len(directories)} directories are mounted: an image can show at most {_MAX_DIRECTORIES}"
        )
    try:
        _, found = enter.ask(address)
    except (enter.CannotEnterError, OSError) as error:
        raise StorageError(f"the environment cannot be mounted in the image: {error}") from error
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            _carry(theirs, found, directories)
        theirs.close()
        ours.settimeout(ASK_S)
        said, fds, _, _ = socket.recv_fds(ours, 1 << 16, len(directories))
    except OSError as error:
        raise StorageError(f"the environment cannot be mounted in the image: {error}") from error
    finally:
        ours.close()
        theirs.close()
        if pid:
            os.kill(pid, signal.SIGKILL)  # it has sent all, or hangs
            wait_killed(pid)
        for fd in found:
            os.close(fd)
    if len(fds) != len(directories):
        for fd in fds:
            os.close(fd)
        why = said.decode(errors="replace") or "no answer"
        raise StorageError(f"the environment cannot be mounted in the image: {why}")
    return list(zip(directories, fds, strict=True))


def _carry(connection: socket.socket, found: Sequence[int], directories: Sequence[str]) -> None:
    """Copy and send the mounts, in the child. Never returns."""
    try:
        if libc().setns(found[0], _NEWNS):
            raise last_error()
        os.fchdir(found[1])
        os.chroot(".")
        fds = [namespaces.copy_mount(directory) for directory in directories]
        socket.send_fds(connection, [b"."], fds)
    except (OSError, BootseerError) as error:
        try:
            connection.sendall(str(error).encode("utf-8", "backslashreplace")[: 1 << 15])
        except OSError:
            pass  # the parent has gone
    finally:
        os._exit(0)


_ALWAYS = (
    Bind("/tmp", "/tmp"),  # noqa: S108
    Bind("/etc/resolv.conf", "/etc/resolv.conf", is_read_only=True, is_optional=True),
    Bind("/etc/hosts", "/etc/hosts", is_read_only=True, is_optional=True),
    Bind("/dev", "/dev"),  # with /dev/shm; the kernel decides which devices the caller may open
    Bind("/sys", "/sys", is_optional=True),
    Bind("/proc", "/proc"),
)


class DefaultBinds(NamedTuple):
    """Default binds, and lines about those that are left out."""

    binds: tuple[Bind, ...]
    notes: tuple[str, ...]


def find_places(work: Sequence[str], own: Sequence[str], files: Mapping[str, str]) -> DefaultBinds:
    """Return the default binds. Args:
    work: directories of the job: working directory, the script's, HOME; left out where they would hide the image.
    own: directories that the job's processes need in any case, at their own paths: logs, events, a checkpoint's.
    files: Bootseer's own files, by their place inside.
    """
    binds = list(_ALWAYS)
    notes = []
    for directory in dict.fromkeys(work):
        if not os.path.isabs(directory) or directory == "/" or not os.path.isdir(directory):
            continue
        places = _both(directory)
        reason = next((why for place in places if (why := why_not_by_default(place))), "")
        if reason:
            notes.append(
                f"{directory} of this node is not visible inside the image, as {reason} (--image-bind {directory})"
            )
            continue
        binds += [Bind(places[-1], place) for place in places]
    for directory in dict.fromkeys(own):
        if os.path.isdir(directory):
            places = _both(os.path.abspath(directory))
            binds += [Bind(places[-1], place) for place in places]
    binds += [Bind(source, place, is_read_only=True) for place, source in files.items()]
    return DefaultBinds(tuple(binds), tuple(notes))


def _both(directory: str) -> list[str]:
    """Return the normalised and the real path of a directory."""
    return list(dict.fromkeys((os.path.normpath(directory), os.path.realpath(directory))))


def read_users() -> list[str]:
    """Return the lines of passwd, the caller's own among them."""
    lines = _read_lines("/etc/passwd")
    try:
        found = pwd.getpwuid(os.geteuid())
    except KeyError:
        return lines
    fields = tuple(str(field) for field in found)
    return lines + missing_line(found.pw_uid, fields, lines)


def read_groups() -> list[str]:
    """Return the lines of group, the caller's own groups among them."""
    lines = _read_lines("/etc/group")
    for number in {os.getegid(), *os.getgroups()}:
        try:
            found = grp.getgrgid(number)
        except KeyError:
            continue
        lines += missing_line(number, (found.gr_name, "x", str(number), ""), lines)
    return lines


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(MAX_BYTES).splitlines()
    except OSError:
        return []
