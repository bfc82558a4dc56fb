"""`bootseer image ...` on a node: mount, umount, mounts, run, record, prefetch, materialise."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootseer.cli.image_words import (
    Json,
    Key,
    Name,
    Quiet,
    Unsigned,
    Url,
    Workload,
    report,
    say,
    short,
    size_of,
)
from bootseer.cli.progress import ProgressLine, format_bytes
from bootseer.counted import counted

if TYPE_CHECKING:
    from bootseer.image.commands_run import RunOptions

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="an empty folder")]
Image = Annotated[str, typer.Argument(metavar="URL", help="of a tree; rootfs:FOLDER runs in a folder as it is")]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND", help="program (default what the image says)")
]
Writable = Annotated[
    str, typer.Option(metavar="WHERE", help="what is written goes: tmpfs (and is lost), none, or a FOLDER")
]
Binds = Annotated[
    list[str] | None,
    typer.Option("--bind", metavar="SRC:DST[:ro]", help="a folder of the node; no:DST leaves one out"),
]
Environ = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="a variable of the program")
]


def mount(
    url: Url,
    folder: Folder,
    name: Name = "",
    workload: Workload = "",
    no_record: Annotated[bool, typer.Option("--no-record", help="do not record what is read")] = False,
    no_prefetch: Annotated[bool, typer.Option("--no-prefetch", help="fetch only what is read")] = False,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="a second, of what is fetched when nobody waits")
    ] = None,
    idle: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="its server ends so long after the last use; 0: never")
    ] = 60.0,
    deadline: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="a read that waits longer fails")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Show a tree in FOLDER, read-only, at once: blocks come as they are read. Needs root. End: umount."""
    from bootseer.image.commands_node import MountOptions
    from bootseer.image.commands_node import mount as mount_tree
    from bootseer.image.commands_traces import check_workload

    options = MountOptions(
        name, check_workload(workload), not no_record, not no_prefetch, size_of(rate, "--rate"), idle, deadline
    )
    done = mount_tree(url, folder, options)
    end = f"end it by: bootseer image umount {shlex.quote(folder)}; log: {done.log}"
    report(done._asdict(), as_json, f"{folder} shows tree {short(done.digest)}; {end}")


def umount(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="where it is mounted, or the tree's digest or its begin")
    ],
    force: Annotated[bool, typer.Option("--force", help="also while programs use it")] = False,
    as_json: Json = False,
) -> None:
    """End a mount. The process that serves the tree ends by itself when nobody uses it any more."""
    from bootseer.image.commands_node import umount as end

    done = end(folder, force=force)
    what = "its server ends by itself when nobody uses the tree" if done.is_served else "its server has ended"
    if done.is_saving:
        what = "its server ends when it has saved what it keeps for the next time"
    report(done._asdict(), as_json, f"{done.folder or short(done.digest)}: is not mounted any more; {what}")


def mounts(as_json: Json = False) -> None:
    """List the trees that this user has mounted on this node."""
    from bootseer.image.commands_node import list_mounts

    found = list_mounts()
    lines = [
        f"{each.digest}  {each.state}  {each.url}  held {each.leases} times,"
        f" {format_bytes(each.read_bytes)} fetched, readers waited {each.blocked_s:.2f} s\n  "
        + "\n  ".join(each.folders)
        for each in found
    ]
    report({"trees": [each._asdict() for each in found]}, as_json, "\n".join(lines) or "no tree is mounted")


def run(
    url: Image,
    command: Command = None,
    name: Name = "",
    writable: Writable = "tmpfs",
    bind: Binds = None,
    env: Environ = None,
) -> None:
    """Run a program in an image, as this user, with this folder and environment; its exit status is this one's."""
    from bootseer.image.commands_run import run as run_program

    raise typer.Exit(run_program(url, command or [], _run_options(name, writable, bind, env), say))


def record(
    url: Url,
    command: Command = None,
    name: Name = "",
    writable: Writable = "tmpfs",
    bind: Binds = None,
    env: Environ = None,
    publish: Annotated[
        bool, typer.Option("--publish", help="put it into the tree's store, for all nodes")
    ] = False,
    key: Key = "",
    unsigned: Unsigned = False,
    as_json: Json = False,
) -> None:
    """Run a program in an image and keep what it touched: the next starts have it fetched ahead. Needs root."""
    from bootseer.image.commands import Signing
    from bootseer.image.commands_run import record as record_start

    options = _run_options(name, writable, bind, env)
    done = record_start(url, command or [], options, publishes=publish, signing=Signing(key, unsigned), say=say)
    text = (
        f"workload {done.workload}: {done.hot_blocks:,} hot blocks, {format_bytes(done.hot_bytes)}, of {done.runs}"
        f" runs; {done.where}"
    )
    if as_json:
        report(done._asdict(), True, "")
    else:
        say(text)  # stdout is the program's
    raise typer.Exit(done.status)


def prefetch(
    url: Url,
    name: Name = "",
    workload: Workload = "",
    everything: Annotated[bool, typer.Option("--all", help="all blocks, not only the hot ones")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch what starts of a tree touch, or all of it, into this node's cache. Needs no root."""
    from bootseer.image.commands_node import prefetch as fetch
    from bootseer.image.commands_traces import check_workload

    with ProgressLine("bootseer image prefetch", is_quiet=quiet) as line:
        done = fetch(
            url, name=name, workload=check_workload(workload), is_whole=everything, progress=line, say=say
        )
    text = (
        f"tree {short(done.digest)}: {counted(done.blocks, 'block')}, {format_bytes(done.size)} are here,"
        f" {format_bytes(done.fetched_bytes)} of them fetched in {line.elapsed_s:.1f} s"
        f" ({format_bytes(done.fetched_bytes / max(line.elapsed_s, 1e-6))}/s)"
    )
    report(done._asdict() | {"seconds": line.elapsed_s}, as_json, text)


def materialise(
    url: Url,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="a new or empty folder")],
    name: Name = "",
    workload: Workload = "",
    mine: Annotated[bool, typer.Option("--mine", help="as root too, all files belong to this user")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="go on where an interrupted run stopped; what is older than the last boot is written again",
        ),
    ] = False,
    ready: Annotated[
        str, typer.Option("--ready", metavar="FILE", help="made as soon as the hot files are there")
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unpack a tree into FOLDER, hot files first, in parallel. Needs neither root nor mounts."""
    from bootseer.image.commands_node import MaterialiseOptions
    from bootseer.image.commands_node import materialise as unpack
    from bootseer.image.commands_traces import check_workload

    options = MaterialiseOptions(
        name,
        check_workload(workload),
        "mine" if mine else "as stored",
        resume,
        os.path.abspath(ready) if ready else "",
    )
    with ProgressLine("bootseer image materialise", is_quiet=quiet) as line:
        found = unpack(url, folder, options, line, say)
    done = found.done
    record: dict[str, Any] = {
        "digest": found.digest, "hot_s": found.hot_s, "seconds": line.elapsed_s, **done._asdict(),
    }  # fmt: skip
    kept = f", {done.kept_files:,} were there" if done.kept_files else ""
    hot = f", {done.hot_files:,} hot ones after {found.hot_s:.1f} s" if done.hot_files else ""
    text = (
        f"tree {short(found.digest)}: {counted(done.files, 'file')}{kept}, {format_bytes(done.written_bytes)} in"
        f" {line.elapsed_s:.1f} s ({line.rate()}){hot}"
    )
    report(record, as_json, text)


def _run_options(name: str, writable: str, bind: list[str] | None, env: list[str] | None) -> RunOptions:
    from bootseer.image.commands_run import RunOptions
    from bootseer.mounts.binds import parse_bind
    from bootseer.mounts.image_environ import parse_variable

    if writable not in ("tmpfs", "none"):
        writable = os.path.abspath(writable)
    return RunOptions(
        name,
        writable,
        [parse_bind(each) for each in bind or ()],
        dict(parse_variable(each, "--env") for each in env or ()),
    )


_URL = "hdfs://namenode/images/train"
# (function, name, example), in the order in which they are shown.
COMMANDS: list[tuple[Callable[..., None], str, str]] = [
    (mount, "mount", f"bootseer image mount {_URL} /mnt/train"),
    (umount, "umount", "bootseer image umount /mnt/train"),
    (mounts, "mounts", "bootseer image mounts --json"),
    (run, "run", f"bootseer image run {_URL} -- python -c 'import torch'"),
    (record, "record", f"bootseer image record {_URL} --publish -- python -c 'import torch'"),
    (prefetch, "prefetch", f"bootseer image prefetch {_URL} --all"),
    (materialise, "materialise", f"bootseer image materialise {_URL} /scratch/train --ready /scratch/train.ready"),
]
