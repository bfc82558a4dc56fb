"""`bootseer image run` and `record`: one program in an image.

To be called in a process without threads, as the image's root is made by a fork; what has to be read of the tree
before is read, and its threads are ended again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.image.commands import Say, Signing, find_digest, node_cache, node_folder, opened, shown, tree_url
from bootseer.mounts.binds import Bind, Without
from bootseer.mounts.image_root import ImageRequest
from bootseer.mounts.image_run import run_in_image
from bootseer.mounts.image_source import ROOTFS
from bootseer.mounts.root import TMPFS
from bootseer.trust import Trust

_PYTHON = re.compile(r"python[0-9.]*")


class RunOptions(NamedTuple):
    """How a program is run."""

    name: str = ""
    writable: str = TMPFS  # tmpfs, none or a folder
    binds: Sequence[Bind | Without] = ()
    environ: Mapping[str, str] = {}


class Recorded(NamedTuple):
    """A recording."""

    status: int  # of the program
    digest: str
    workload: str
    blocks: int  # of the merged trace
    hot_blocks: int
    hot_bytes: int  # as stored
    runs: int
    where: str  # the file on this node
    is_published: bool


def run(url: str, command: Sequence[str], options: RunOptions, say: Say) -> int:
    """Runs a program in an image and waits for it; without one, what the image is made to run. Its exit status.

    Raises: ConfigError, StorageError, IntegrityError, Untrusted.
    """
    url = url if url.startswith(ROOTFS) else tree_url(url)
    if not command:
        command = _own_command(url, options.name)
    return run_in_image(_request(url, command, options), command, say=say).status


def record(
    url: str, command: Sequence[str], options: RunOptions, *, publishes: bool, signing: Signing, say: Say
) -> Recorded:
    """Runs a program in an image that nobody uses yet, and keeps what it read as a hot trace.

    Raises: ConfigError when the tree cannot be mounted, or is in use; as `run`.
    """
    from bootseer.blocks.trace import workload_key
    from bootseer.mounts.tree_mount import probe_mount

    if url.startswith(ROOTFS):
        raise ConfigError(f"{url}: a folder is read as it is; what is recorded is a tree: build one first")
    url = tree_url(url)
    trust = Trust.load()
    if why := probe_mount():
        raise ConfigError(f"{shown(url)}: a start is recorded while the tree is mounted, and it cannot be: {why}")
    if publishes:
        signing.key(trust)  # a key that cannot be used is told before
    digest = find_digest(url, trust, name=options.name)
    folder = node_folder(node_cache(say), digest)
    if not command:
        command = _own_command(url, options.name)
    aio.close()
    _take_away(digest)
    request = _request(url, command, options)._replace(reads_ahead=False)
    ran = run_in_image(request, command, is_whole_start=True, say=say)
    if not ran.figures.get("recorded"):
        raise StorageError(
            f"{shown(url)}: the program ended with status {ran.status}, and nothing was recorded: did another job"
            " use the tree at the same time?"
        )
    workload = workload_key(*request.workload)
    path = os.path.join(folder, f"trace-{workload}.json")
    return _finish(url, digest, workload, path, ran.status, options, publishes, signing, trust, say)


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
    say: Say,
) -> Recorded:
    from bootseer.image.commands_traces import known_traces, publish

    with opened(url, name=options.name, trust=trust) as tree:
        if tree.digest != digest:
            raise ConfigError(
                f"{shown(url)}: means another tree now than when the program was started: record again"
            )
        known = known_traces(tree.store, digest, tree.index.block_count, trust, say)
        mine = next((each for each in known if each.is_own and each.trace.workload == workload), None)
        if mine is None:
            raise StorageError(f"{path}: the recording is not there: is there room in the cache?")
        if publishes:
            publish(tree, url, [mine.trace], signing.key(trust), say)
        hot = mine.trace.hot()
        hot_bytes = sum(tree.index.block(number).stored_bytes for number in hot)
    trace = mine.trace
    return Recorded(
        status, digest, workload, len(trace.blocks), len(hot), hot_bytes, trace.runs, mine.where, publishes
    )


def _take_away(digest: str) -> None:
    """What was read before is in the kernel's cache, and would not be seen. Raises: ConfigError while in use."""
    from bootseer.image.commands_node import list_mounts
    from bootseer.mounts.tree_ending import unmount_tree

    for each in list_mounts():
        if each.digest != digest:
            continue
        if len(each.folders) > 1:
            raise ConfigError(
                f"{each.folders[-1]}: the tree is mounted there, and a recording needs it alone: bootseer image"
                f" umount {each.folders[-1]}"
            )
        try:
            unmount_tree(digest)
        except BootseerError as error:
            raise type(error)(f"a recording needs the tree alone: {error}") from error


def workload_names(command: Sequence[str]) -> tuple[str, str]:
    """PURE: program and script, by which recordings are told apart: the same as of a job that bootrun starts so.

    Python is python3 whatever its version; of `-c` the code does not count, of other programs no argument.
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
        own=[folder for folder in (os.environ.get("TMPDIR", ""),) if folder.startswith("/") and folder != "/"],
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was taken away


def _own_command(url: str, name: str) -> list[str]:
    """What the image says."""
    if not url.startswith(ROOTFS):
        with opened(url, name=name) as tree:
            config = tree.index.config
        aio.close()
        if config.entrypoint or config.cmd:
            return [*config.entrypoint, *config.cmd]
    raise ConfigError(
        f"{shown(url)}: the image does not say what to run: say it, as in: run URL -- python train.py"
    )
