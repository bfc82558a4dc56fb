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
    print_message,
    print_result,
    short,
    size_of,
)
from bootseer.cli.progress import ProgressLine
from bootseer.counted import counted, format_bytes

if TYPE_CHECKING:
    from bootseer.image.commands.run import RunOptions

Directory = Annotated[str, typer.Argument(metavar="DIR", help="Empty directory")]
Image = Annotated[str, typer.Argument(metavar="URL", help="URL of a tree, or rootfs:DIR for a directory as it is")]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND", help="Program to run (default: the image's)")
]
Writable = Annotated[
    str, typer.Option(metavar="WHERE", help="Destination of writes: tmpfs (lost at the end), none, or a directory")
]
Binds = Annotated[
    list[str] | None,
    typer.Option(
        "--bind", metavar="SRC:DST[:ro]", help="Directory of the node to show in the image; no:DST omits one"
    ),
]
Environ = Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable of the program")]


def mount(
    url: Url,
    directory: Directory,
    name: Name = "",
    workload: Workload = "",
    no_record: Annotated[bool, typer.Option("--no-record", help="Do not record an access trace")] = False,
    no_prefetch: Annotated[bool, typer.Option("--no-prefetch", help="Fetch only what is read")] = False,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum bytes per second of prefetches")
    ] = None,
    idle: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Stop the server after this many idle seconds; 0 = never"),
    ] = 60.0,
    deadline: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds after which a read fails")
    ] = 30.0,
    status_folder: Annotated[
        bool,
        typer.Option("--status-folder", help="Add a directory .bootseer with the mount's state, for any user"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Mount a tree at DIR, read-only: blocks are fetched as they are read. Needs root. End: umount."""
    from bootseer.image.commands.node import MountOptions
    from bootseer.image.commands.node import mount as mount_tree
    from bootseer.image.commands.traces import check_workload

    options = MountOptions(
        name,
        check_workload(workload),
        not no_record,
        not no_prefetch,
        size_of(rate, "--rate"),
        idle,
        deadline,
        status_folder,
    )
    done = mount_tree(url, directory, options)
    end = f"to end it: bootseer image umount {shlex.quote(directory)}; log: {done.log}"
    print_result(done._asdict(), as_json, f"{directory} shows tree {short(done.digest)}; {end}")


def umount(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Mount point, or the tree's digest or its first digits")
    ],
    force: Annotated[bool, typer.Option("--force", help="Unmount although programs use it")] = False,
    as_json: Json = False,
) -> None:
    """End a mount. The process that serves the tree ends by itself once the tree is unused."""
    from bootseer.image.commands.node import umount as end

    done = end(directory, force=force)
    what = "its server ends by itself once the tree is unused" if done.is_served else "its server has ended"
    if done.is_saving:
        what = "its server ends after it has saved its state"
    print_result(done._asdict(), as_json, f"{done.folder or short(done.digest)}: unmounted; {what}")


def mounts(as_json: Json = False) -> None:
    """List the trees that this user has mounted on this node."""
    from bootseer.image.commands.node import list_mounts

    found = list_mounts()
    lines = [
        f"{each.digest}  {each.state}  {each.url}  held {each.leases} times,"
        f" {format_bytes(each.read_bytes)} fetched, readers waited {each.blocked_s:.2f} s\n  "
        + "\n  ".join(each.folders)
        for each in found
    ]
    print_result({"trees": [each._asdict() for each in found]}, as_json, "\n".join(lines) or "no tree is mounted")


def run(
    url: Image,
    command: Command = None,
    name: Name = "",
    writable: Writable = "tmpfs",
    bind: Binds = None,
    env: Environ = None,
) -> None:
    """Run a program in an image, as this user, in this directory and environment; return its exit status."""
    from bootseer.image.commands.run import run as run_program

    raise typer.Exit(run_program(url, command or [], _run_options(name, writable, bind, env)))


def record(
    url: Url,
    command: Command = None,
    name: Name = "",
    writable: Writable = "tmpfs",
    bind: Binds = None,
    env: Environ = None,
    publish: Annotated[
        bool, typer.Option("--publish", help="Publish the trace to the tree's store, for all nodes")
    ] = False,
    key: Key = "",
    unsigned: Unsigned = False,
    as_json: Json = False,
) -> None:
    """Run a program in an image and record an access trace, which later starts prefetch. Needs root."""
    from bootseer.image.commands.common import Signing
    from bootseer.image.commands.run import record as record_start

    options = _run_options(name, writable, bind, env)
    done = record_start(url, command or [], options, publishes=publish, signing=Signing(key, unsigned))
    text = (
        f"workload {done.workload}: {done.hot_blocks:,} hot blocks, {format_bytes(done.hot_bytes)}, of {done.runs}"
        f" runs; {done.where}"
    )
    if as_json:
        print_result(done._asdict(), True, "")
    else:
        print_message(text)  # stdout is the program's
    raise typer.Exit(done.status)


def prefetch(
    url: Url,
    name: Name = "",
    workload: Workload = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Fetch all blocks, not only those of the access traces")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch the blocks of a tree's access traces, or all, into this node's cache. Needs no root."""
    from bootseer.image.commands.node import prefetch as fetch
    from bootseer.image.commands.traces import check_workload

    with ProgressLine("bootseer image prefetch", is_quiet=quiet, as_json=as_json) as line:
        done = fetch(
            url,
            name=name,
            workload=check_workload(workload),
            is_whole=everything,
            progress=line,
        )
    text = (
        f"tree {short(done.digest)}: {counted(done.blocks, 'block')}, {format_bytes(done.size)} in the cache,"
        f" {format_bytes(done.fetched_bytes)} of them fetched in {line.elapsed_s:.1f} s"
        f" ({format_bytes(done.fetched_bytes / max(line.elapsed_s, 1e-6))}/s)"
    )
    print_result(done._asdict() | {"seconds": line.elapsed_s}, as_json, text)


def materialise(
    url: Url,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="New or empty directory")],
    name: Name = "",
    workload: Workload = "",
    mine: Annotated[bool, typer.Option("--mine", help="Give all files to this user, also as root")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run; files from before the last boot are written again",
        ),
    ] = False,
    ready: Annotated[
        str,
        typer.Option(
            "--ready", metavar="FILE", help="File to create as soon as the files of the access traces are there"
        ),
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unpack a tree to DIR, hot files first, in parallel. Needs neither root nor mounts."""
    from bootseer.image.commands.node import MaterialiseOptions
    from bootseer.image.commands.node import materialise as unpack
    from bootseer.image.commands.traces import check_workload

    options = MaterialiseOptions(
        name,
        check_workload(workload),
        "mine" if mine else "as stored",
        resume,
        os.path.abspath(ready) if ready else "",
    )
    with ProgressLine("bootseer image materialise", is_quiet=quiet, as_json=as_json) as line:
        found = unpack(url, directory, options, line)
    done = found.done
    record: dict[str, Any] = {
        "digest": found.digest, "hot_s": found.hot_s, "seconds": line.elapsed_s, **done._asdict(),
    }  # fmt: skip
    kept = f", {done.kept_files:,} kept" if done.kept_files else ""
    hot = f", {done.hot_files:,} hot ones after {found.hot_s:.1f} s" if done.hot_files else ""
    text = (
        f"tree {short(found.digest)}: {counted(done.files, 'file')}{kept}, {format_bytes(done.written_bytes)} in"
        f" {line.elapsed_s:.1f} s ({line.rate()}){hot}"
    )
    print_result(record, as_json, text)


def _run_options(name: str, writable: str, bind: list[str] | None, env: list[str] | None) -> RunOptions:
    from bootseer.image.commands.run import RunOptions
    from bootseer.mounts.sandbox.binds import parse_bind
    from bootseer.mounts.sandbox.environ import parse_variable

    if writable not in ("tmpfs", "none"):
        writable = os.path.abspath(writable)
    return RunOptions(
        name,
        writable,
        [parse_bind(each) for each in bind or ()],
        dict(parse_variable(each, "--env") for each in env or ()),
    )


_URL = "hdfs://namenode/images/train"
# (function, name, example), in display order.
COMMANDS: list[tuple[Callable[..., None], str, str]] = [
    (mount, "mount", f"bootseer image mount {_URL} /mnt/train"),
    (umount, "umount", "bootseer image umount /mnt/train"),
    (mounts, "mounts", "bootseer image mounts --json"),
    (run, "run", f"bootseer image run {_URL} -- python -c 'import torch'"),
    (record, "record", f"bootseer image record {_URL} --publish -- python -c 'import torch'"),
    (prefetch, "prefetch", f"bootseer image prefetch {_URL} --all"),
    (materialise, "materialise", f"bootseer image materialise {_URL} /scratch/train --ready /scratch/train.ready"),
]
