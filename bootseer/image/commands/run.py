"""`bootseer image run` and `record`: one program in an image.

Call them in a process without threads, because the image's root is made by a fork. Earlier reads of the tree end
their threads again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.image.commands.common import (
    Signing,
    find_digest,
    node_cache,
    node_directory,
    opened,
    shown,
    tree_url,
)
from bootseer.mounts.sandbox.binds import Bind, UnboundPath
from bootseer.mounts.sandbox.image_root import ImageRequest
from bootseer.mounts.sandbox.root import TMPFS
from bootseer.mounts.sandbox.run import run_in_image
from bootseer.mounts.sandbox.source import ROOTFS
from bootseer.trust import Trust

_PYTHON = re.compile(r"python[0-9.]*")


class RunOptions(NamedTuple):
    name: str = ""
    writable: str = TMPFS  # tmpfs, none or a directory
    binds: Sequence[Bind | UnboundPath] = ()
    environ: Mapping[str, str] = {}


class RecordResult(NamedTuple):
    status: int  # of the program
    digest: str
    workload: str
    blocks: int  # of the merged trace
    hot_blocks: int
    hot_bytes: int  # as stored
    runs: int
    where: str  # the file on this node
    is_published: bool


def run(url: str, command: Sequence[str], options: RunOptions) -> int:
    """Run a program, or the image's own command, in an image and wait for it; return its exit status.

    Raises: ConfigError, StorageError, IntegrityError, Untrusted.
    """
    url = url if url.startswith(ROOTFS) else tree_url(url)
    if not command:
        command = _own_command(url, options.name)
    return run_in_image(_request(url, command, options), command).status


def record(
    url: str, command: Sequence[str], options: RunOptions, *, publishes: bool, signing: Signing
) -> RecordResult:
    """Run a program in an unused image, and keep its reads as an access trace.

    Raises: ConfigError if the tree cannot be mounted, or is in use; as `run`.
    """
    from bootseer.blocks.trace import workload_key
    from bootseer.mounts.tree_daemon.mount import probe_mount

    if url.startswith(ROOTFS):
        raise ConfigError(f"{url}: is a directory, and only reads of a tree can be recorded; build one first")
    url = tree_url(url)
    trust = Trust.load()
    if why := probe_mount():
        raise ConfigError(f"{shown(url)}: recording a start needs a mounted tree, which is impossible: {why}")
    if publishes:
        signing.key(trust)  # reports an unusable key before the run
    digest = find_digest(url, trust, name=options.name)
    directory = node_directory(node_cache(), digest)
    if not command:
        command = _own_command(url, options.name)
    aio.close()
    _end_mounts(digest)
    request = _request(url, command, options)._replace(reads_ahead=False)
    ran = run_in_image(request, command, is_whole_start=True)
    if not ran.figures.get("recorded"):
        raise StorageError(
            f"{shown(url)}: nothing was recorded: the program ended with status {ran.status}; check that no other"
            " job uses the tree at the same time"
        )
    workload = workload_key(*request.workload)
    path = os.path.join(directory, f"trace-{workload}.json")
    return _finish(url, digest, workload, path, ran.status, options, publishes, signing, trust)


def _finish(
    url: str,
    digest: str,
    workload: str,
    path: str,
    status: int,
    options: RunOptions,
    publishes: bool,
    signing: Signing,
    trust: Trust,
) -> RecordResult:
    from bootseer.image.commands.traces import known_traces, publish

    with opened(url, name=options.name, trust=trust) as tree:
        if tree.digest != digest:
            raise ConfigError(f"{shown(url)}: names another tree since the program was started; record again")
        known = known_traces(tree.store, digest, tree.index.block_count, trust)
        mine = next((each for each in known if each.is_own and each.trace.workload == workload), None)
        if mine is None:
            raise StorageError(f"{path}: the access trace is missing; check that the cache has room")
        if publishes:
            publish(tree, url, [mine.trace], signing.key(trust))
        hot = mine.trace.hot()
        hot_bytes = sum(tree.index.block(number).stored_bytes for number in hot)
    trace = mine.trace
    return RecordResult(
        status, digest, workload, len(trace.blocks), len(hot), hot_bytes, trace.runs, mine.where, publishes
    )


def _end_mounts(digest: str) -> None:
    """End mounts: reads from the kernel's cache would not be recorded. Raises: ConfigError while in use."""
    from bootseer.image.commands.node import list_mounts
    from bootseer.mounts.tree_daemon.ending import unmount_tree

    for each in list_mounts():
        if each.digest != digest:
            continue
        if len(each.folders) > 1:
            raise ConfigError(
                f"{each.folders[-1]}: the tree is mounted there, and a recording needs it exclusively; run"
                f" bootseer image umount {each.folders[-1]}"
            )
        try:
            unmount_tree(digest)
        except BootseerError as error:
            raise type(error)(f"a recording needs the tree exclusively: {error}") from error


def workload_names(command: Sequence[str]) -> tuple[str, str]:
    """PURE: return program and script, which identify recordings: the same as for a job of bootrun.

    Python is python3 for all its versions. The code of `-c` does not count, nor do arguments of other programs.
    """
    if _PYTHON.fullmatch(command[0].rpartition("/")[2]) is None:
        return command[0], ""
    rest = iter(command[1:])
    for each in rest:
        if each == "-c":
            return "python3", "-c"
        if each == "-m":
            return "python3", next(rest, "")
        if each in ("-X", "-W"):
            next(rest, "")
        elif not each.startswith("-"):
            return "python3", each
    return "python3", ""


def _request(url: str, command: Sequence[str], options: RunOptions) -> ImageRequest:
    return ImageRequest(
        url,
        options.name,
        workload=workload_names(command),
        writable=options.writable,
        given=options.binds,
        environ=options.environ,
        work=[_working_directory(), os.environ.get("HOME", "")],
        own=[
            directory
            for directory in (os.environ.get("TMPDIR", ""),)
            if directory.startswith("/") and directory != "/"
        ],
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _own_command(url: str, name: str) -> list[str]:
    """Return the command that the image defines."""
    if not url.startswith(ROOTFS):
        with opened(url, name=name) as tree:
            config = tree.index.config
        aio.close()
        if config.entrypoint or config.cmd:
            return [*config.entrypoint, *config.cmd]
    raise ConfigError(f"{shown(url)}: the image has no command; give one, such as: run URL -- python train.py")
