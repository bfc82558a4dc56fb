"""Opens an image for processes to run in: where its files come from, its root, and what they find there.

In: the image's URL, what the job needs of the node. Out: `OpenImage`, whose words before a command bring it in.
Used by the keeper of a job (image_keeper.py) and by `bootseer image run`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from bootseer.errors import BootseerError, ConfigError
from bootseer.mounts import enter, namespaces
from bootseer.mounts.binds import Bind, Without, find_hiding, plan_binds
from bootseer.mounts.carrying import carry_mounts
from bootseer.mounts.cdi_files import LIBRARIES, read_devices
from bootseer.mounts.holder import HeldRoot, Holder
from bootseer.mounts.image_environ import Changes, image_environ
from bootseer.mounts.image_places import find_places, read_groups, read_users
from bootseer.mounts.image_source import OnOrigin, Source, open_source
from bootseer.mounts.privileges import may_mount
from bootseer.mounts.root import TMPFS, RootSpec

PYTHONS = ("python3", "python")


class ImageRequest(NamedTuple):
    """What is asked for."""

    url: str
    name: str = ""  # of the tree, where it was published under another one than this URL
    digest: str = ""  # of the tree, if it has to be this one
    workload: tuple[str, str] = ("", "")  # program and script: which recording fits
    writable: str = TMPFS  # tmpfs, none or a folder
    given: Sequence[Bind | Without] = ()  # --image-bind
    environ: Mapping[str, str] = {}  # --image-env
    programs: Sequence[str] = ()  # one of which must be there
    work: Sequence[str] = ()  # folders: working directory, the script's, HOME
    own: Sequence[str] = ()  # folders that are needed in any case
    files: Mapping[str, str] = {}  # of ours, by their place inside
    reads_ahead: bool = True  # not if what the start reads is to be recorded in any case
    peers: str = ""  # path of the file of the job's peers, who are asked before the store
    avoid_mount: str = ""  # why it is better unpacked than mounted, if it can be
    on_origin: OnOrigin = lambda _url, _folders: None
    on_digest: Callable[[str], object] = lambda _: None
    on_fall_back: Callable[[str], object] | None = None


class OpenImage:
    """An image in which programs can be started, until `close`; those that run then go on."""

    def __init__(
        self, holder: Holder, source: Source, held: HeldRoot, changes: Changes, notes: Sequence[str], made_s: float
    ) -> None:
        self._holder = holder
        self.source = source
        self.changes = changes  # of the caller's environment
        self.program = held.program  # the one of the request's that was found
        self.notes = (*notes, *held.made.notes)
        self.has_user_namespace = held.made.has_user_namespace
        self.made_s = made_s  # what the root took, without the source
        # -I and -S: nothing of the caller's Python settings counts, and nothing is looked for.
        self.prefix = (sys.executable, "-I", "-S", enter_path(), held.address)

    def environ(self, caller: Mapping[str, str]) -> dict[str, str]:
        """The environment for a program that is started by `prefix`."""
        found = {name: value for name, value in caller.items() if name not in self.changes.unset}
        return {**found, **self.changes.set}

    def show(self, paths: Sequence[str]) -> list[str]:
        """Makes mounts of the node that came later visible inside; returns the paths that stay hidden."""
        there = [path for path in paths if os.path.isabs(path) and os.path.exists(path)]
        missing = self._holder.look(there)
        for path in missing:
            mounted = _mount_of(path)
            if not mounted:
                continue
            try:
                fd = namespaces.copy_mount(mounted)
            except ConfigError:
                continue  # not root: it is visible only where the node shares its mounts
            try:
                self._holder.attach(mounted, fd)
            finally:
                os.close(fd)
        return self._holder.look(missing) if missing else []

    def show_from(self, door: str, folders: Sequence[str]) -> None:
        """Shows what is mounted over folders of the node where a door leads (holder.Holder.lay): all, or nothing.

        Raises: ConfigError, StorageError.
        """
        try:
            carried = carry_mounts(door, folders)
            try:
                for folder, fd in carried:
                    self._holder.attach(folder, fd)
            finally:
                for _, fd in carried:
                    os.close(fd)
        except (BootseerError, OSError):
            with suppress(BootseerError):
                self.hide(folders)
            raise

    def hide(self, folders: Sequence[str]) -> None:
        """Takes away what `show_from` has shown there. Raises: ConfigError, StorageError."""
        for folder in folders:
            self._holder.detach(folder)

    def is_lost(self) -> bool:
        """Whether no program can be started in it any more."""
        return self._holder.is_over() or self.source.is_lost()

    def close(self) -> None:
        self._holder.close()
        self.source.close()


def enter_path() -> str:
    """The compiled form if there is one, which this interpreter has just looked at: 3 ms of each rank's start."""
    compiled = getattr(enter, "__cached__", None)
    return os.path.abspath(compiled if compiled and os.path.exists(compiled) else enter.__file__)


def open_image(request: ImageRequest, holder: Holder, say: Callable[[str], object]) -> OpenImage:
    """Gets the image and makes its root. `holder` is closed with the result, or by the caller after an error.

    Args: say: lines for people while it takes time.
    Raises: ConfigError, StorageError, IntegrityError.
    """
    if not may_mount():
        namespaces.probe()  # else it would be unpacked for nothing
    source = open_source(
        request.url,
        request.workload,
        say,
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
        spec = RootSpec([source.folder], request.writable, binds, devices.links, read_users(), read_groups())
        held = holder.make(
            spec, loader=changes.loader, programs=request.programs, path=changes.set.get("PATH", "")
        )
        if request.programs and not held.program:
            raise ConfigError(_not_found(request.programs, changes.set.get("PATH", ""), binds))
    except BaseException:
        source.close()
        raise
    notes = [*source.notes, *devices.notes, *places.notes]
    return OpenImage(holder, source, held, changes, notes, time.monotonic() - began_s)


def _absolute(each: Bind | Without) -> Bind | Without:
    return each._replace(source=os.path.abspath(each.source)) if isinstance(each, Bind) else each


def _not_found(programs: Sequence[str], path: str, binds: Sequence[Bind]) -> str:
    names = " or ".join(programs)
    places = programs if programs[0].startswith("/") else path.split(":")
    hiding = next((target for place in places if (target := find_hiding(place, binds))), "")
    if hiding:
        return (
            f"the image shows no {names}: {hiding} is this node's there (--image-bind no:{hiding} leaves it out)"
        )
    if programs[0].startswith("/"):
        return f"the image has no program {names}: give --image-python another one"
    return f"the image has no {names} on its PATH ({path}): name it with --image-python"


def _mount_of(path: str) -> str:
    """The mount point above a path of this node."""
    found = os.path.realpath(path)
    while found != "/" and not os.path.ismount(found):
        found = os.path.dirname(found)
    return "" if found == "/" else found
