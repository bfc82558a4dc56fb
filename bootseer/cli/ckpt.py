"""`bootseer ckpt ...`: stripe, unstripe, ls, verify, cat, prefetch and mount.

In: a command line. Out: results on stdout (`--json` for scripts), progress and errors on stderr, an exit status
(docs/reference/errors.md). The commands are implemented in bootseer.checkpoint.
"""

from __future__ import annotations

import asyncio
import datetime
import shlex
import sys
from typing import Annotated, Any

import typer

from bootseer import aio
from bootseer.checkpoint import convert
from bootseer.checkpoint.io.inputs import Input
from bootseer.checkpoint.versions.pinned import NoCompleteCheckpoint
from bootseer.checkpoint.versions.resolve import Pinned, list_versions, resolve
from bootseer.checkpoint.versions.verify import verify as verify_version
from bootseer.checkpoint.versions.version_input import inputs_of
from bootseer.cli import running
from bootseer.cli.image_words import Json, Quiet, print_result, size_of
from bootseer.cli.node_arena import NodeArena, run_command, until_signal
from bootseer.cli.progress import ProgressLine
from bootseer.counted import counted, format_bytes
from bootseer.errors import IntegrityError, NotFound, UsageError
from bootseer.storage.paths import HDFS_SCHEMES, redact, scheme_of

app = running.new_app("ckpt", "Checkpoints: striped over many files, read and written in parallel.")

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Path or URL of a checkpoint directory, a version, or a file")
]
Unit = Annotated[str | None, typer.Option(metavar="SIZE", help="Size of a chunk (default: 16MiB)")]
Stripes = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Number of stripe files (default: 8 on HDFS, else 1)")
]
Keep = Annotated[int | None, typer.Option(min=1, help="Number of newest versions to keep; delete the others")]
Replication = Annotated[int | None, typer.Option(min=1, max=512, help="Replication of new files on HDFS")]
CHUNK_BYTES = 64 << 20  # of `cat`


@app.command(epilog="bootseer ckpt stripe model.safetensors hdfs://namenode/run1/ckpt --step 1000 --keep 3")
def stripe(
    source: Url,
    target: Annotated[str, typer.Argument(metavar="CKPT", help="Checkpoint directory that gets a new version")],
    unit: Unit = None,
    stripes: Stripes = None,
    step: Annotated[int | None, typer.Option(min=0, help="Training step of the checkpoint")] = None,
    keep: Keep = None,
    replication: Replication = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the newest checkpoint of URL as a new striped version of CKPT."""
    with ProgressLine("bootseer ckpt stripe", is_quiet=quiet, as_json=as_json) as line:
        done = convert.stripe(
            source, target, unit_bytes=size_of(unit, "--unit"), stripes=stripes, step=step, keep=keep,
            options=_options(target, replication), progress=line, on_passed=_warn,
        )  # fmt: skip
    print_result(
        done._asdict() | {"seconds": line.elapsed_s}, as_json, f"version {done.version}: {_sum(done, line)}"
    )
    if done.fewer and not as_json:
        files = "a file has" if done.fewer == 1 else f"{done.fewer} files have"
        print(f"{files} fewer stripes than {stripes}: a stripe has at least one chunk; use a smaller --unit")


@app.command(epilog="bootseer ckpt unstripe hdfs://namenode/run1/ckpt /data/plain")
def unstripe(
    source: Url,
    target: Annotated[str, typer.Argument(metavar="DIR", help="Directory for the plain files")],
    replication: Replication = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the files of the newest checkpoint of URL as plain files that every tool can read."""
    with ProgressLine("bootseer ckpt unstripe", is_quiet=quiet, as_json=as_json) as line:
        options = _options(target, replication)
        done = convert.unstripe(source, target, options=options, progress=line, on_passed=_warn)
    print_result(done._asdict() | {"seconds": line.elapsed_s}, as_json, _sum(done, line))


@app.command("ls", epilog="bootseer ckpt ls hdfs://namenode/run1/ckpt --files")
def list_(
    url: Url, files: Annotated[bool, typer.Option("--files", help="List the files of the newest version")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the versions of a checkpoint, newest last, and which one a job would load."""

    async def run() -> tuple[list[dict[str, Any]], Pinned | None, str]:
        async with convert.opened(url) as (store, path):
            found = [each._asdict() for each in await list_versions(store, path)]
            try:
                return found, await resolve(store, path, on_passed=_warn), ""
            except (NotFound, IntegrityError, NoCompleteCheckpoint) as error:
                if not found:
                    raise
                return found, None, str(error)

    versions, newest, why = aio.run_sync(run())
    record: dict[str, Any] = {"versions": versions, "loads": None, "why": why}
    if newest is not None:
        record["loads"] = {
            "kind": newest.kind, "version": newest.version, "digest": newest.digest, "step": newest.step,
            "bytes": newest.size, "files": [{"path": f.path, "bytes": f.layout.size} for f in newest.files],
        }  # fmt: skip
    if as_json:
        print_result(record, True, "")
        return
    for each in versions:
        created = datetime.datetime.fromtimestamp(int(each["version"][:20]) / 1e9, datetime.UTC)
        print(f"{each['version']}  {created:%Y-%m-%d %H:%M:%S} UTC  {'' if each['is_complete'] else 'unfinished'}")
    if newest is None:
        print(f"a job would load none: {why}")
        return
    step = "" if newest.step is None else f", step {newest.step}"
    name = newest.version or "these files"
    print(f"a job would load {name}{step}: {counted(len(newest.files), 'file')}, {format_bytes(newest.size)}")
    for file in newest.files if files else ():
        print(f"  {file.path}  {format_bytes(file.layout.size)}  {counted(len(file.stripes), 'stripe')}")


@app.command(epilog="bootseer ckpt verify hdfs://namenode/run1/ckpt")
def verify(url: Url, as_json: Json = False, quiet: Quiet = False) -> None:
    """Verify every byte of the newest version by checksums, and the formats of its files. Status 1: faults."""
    passed: list[str] = []
    with ProgressLine("bootseer ckpt verify", is_quiet=quiet, as_json=as_json) as line:

        async def run() -> tuple[Pinned, Any]:
            async with convert.opened(url) as (store, path):
                pinned = await resolve(store, path, on_passed=passed.append)
                note = convert.summing(line, pinned.size)
                return pinned, await verify_version(store, pinned, note)

        pinned, verdict = aio.run_sync(run())
    faults = [each._asdict() for each in verdict.faults]
    record = verdict._asdict() | {"version": pinned.version, "faults": faults, "passed_over": passed}
    lines = [f"{each.path}: unit {each.unit} in {each.stripe}: {each.what}" for each in verdict.faults]
    lines = [text.replace(": unit -1 in ", ": ").removeprefix(": ") for text in lines]
    lines += [f"newer, but incomplete: {each}" for each in passed]
    unsummed = f", {format_bytes(verdict.unsummed_bytes)} have no checksums" if verdict.unsummed_bytes else ""
    right = f"{counted(verdict.files, 'file')}: {format_bytes(verdict.checked_bytes)} right"
    lines.append(f"{right}{unsummed}, {counted(verdict.fault_count, 'fault')} ({line.rate()})")
    print_result(record, as_json, "\n".join(lines))
    if verdict.fault_count or passed:
        raise typer.Exit(1)


@app.command(epilog="bootseer ckpt cat hdfs://namenode/run1/ckpt config.json")
def cat(
    url: Url,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Path in it, if it has several files")] = "",
) -> None:  # fmt: skip
    """Write one file of the newest checkpoint to stdout."""

    async def run() -> None:
        async with convert.opened(url) as (store, path):
            pinned = await resolve(store, path, on_passed=_warn)
            inputs = dict(inputs_of(store, pinned))
            name = file or (next(iter(inputs)) if len(inputs) == 1 else "")
            if name not in inputs:
                shown = ", ".join(sorted(inputs)[:8])
                raise NotFound(f"{redact(url)}: has no file {name!r}; name one of: {shown}")
            await _pour(inputs[name])

    aio.run_sync(run())


@app.command(epilog="bootseer ckpt prefetch hdfs://namenode/run1/ckpt -- torchrun --nproc-per-node 8 train.py")
def prefetch(
    url: Url,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Program that finds the checkpoint in its environment"),
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Maximum memory (default: a quarter)")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load the newest checkpoint of URL into this node's memory, and hold it while COMMAND runs, or until Ctrl-C.

    Programs of this user find it by variables, which COMMAND gets, and which are printed without COMMAND.
    """
    with NodeArena(url, size_of(memory, "--memory")) as arena:
        with ProgressLine("bootseer ckpt prefetch", is_quiet=quiet, as_json=as_json) as line:
            environ = arena.load(line)
        if command:
            arena.follow()
            raise typer.Exit(run_command(command, environ))
        print_result(
            environ, as_json, "\n".join(f"export {name}={shlex.quote(environ[name])}" for name in environ)
        )
        sys.stdout.flush()
        with until_signal():
            arena.wait()


@app.command(epilog="bootseer ckpt mount hdfs://namenode/run1/ckpt /mnt/ckpt --writable --keep 3")
def mount(
    url: Url,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Empty directory")],
    writable: Annotated[
        bool, typer.Option("--writable", help="Turn files that are written into versions")
    ] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this process, until Ctrl-C")] = False,
    version: Annotated[
        str | None, typer.Option(help="Version to mount (default: the newest complete one)")
    ] = None,
    verify: Annotated[
        str | None, typer.Option(metavar="HOW", help="Verification: units, sampled, full or none")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for reading ahead (default: 256MiB)")
    ] = None,
    allow_other: Annotated[bool, typer.Option("--allow-other", help="Give other users access")] = False,
    spool: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for written data; the rest goes to the disk")
    ] = None,
    spool_directory: Annotated[
        str,
        typer.Option("--spool-folder", metavar="PATH", help="Directory for written data (default: TMPDIR)"),
    ] = "",
    settle: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Seconds without a write after which a save is complete"),
    ] = 30.0,
    never_settle: Annotated[
        bool, typer.Option("--never-settle", help="Complete a save only when the saver commits it")
    ] = False,
    keep: Keep = None,
    unit: Unit = None,
    stripes: Stripes = None,
    log: Annotated[str, typer.Option(metavar="PATH", help="Log file of the background process")] = "",
) -> None:
    """Mount the newest checkpoint of URL as a directory that any program can read. Needs FUSE. End: umount DIR."""
    from bootseer.checkpoint.mounting import mount_checkpoint

    path = mount_checkpoint(
        url, directory, writable=writable, foreground=foreground, version=version, verify=verify,
        window_bytes=size_of(window, "--window"), allow_other=allow_other, spool_bytes=size_of(spool, "--spool"),
        spool_directory=spool_directory, settle_s=None if never_settle else settle, keep=keep,
        unit_bytes=size_of(unit, "--unit"), stripes=stripes, log_path=log,
    )  # fmt: skip
    if path:
        print(f"{directory} shows {redact(url)}; to end it: umount {shlex.quote(directory)}; log: {path}")


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    return running.run(app, "bootseer ckpt", argv)


async def _pour(file: Input) -> None:
    """Write a file to stdout; the next bytes are read during each write."""
    size = max(1, min(CHUNK_BYTES, file.size))
    views = [memoryview(bytearray(size)), memoryview(bytearray(size))]

    async def read(offset: int) -> memoryview:
        view = views[offset // size % 2][: min(size, file.size - offset)]
        await file.read_into(offset, view)
        return view

    reading = asyncio.create_task(read(0))
    try:
        for offset in range(0, file.size, size):
            view = await reading
            if offset + size < file.size:
                reading = asyncio.create_task(read(offset + size))
            await aio.run_io(sys.stdout.buffer.write, view)
        await aio.run_io(sys.stdout.buffer.flush)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _options(target: str, replication: int | None) -> dict[str, object]:
    """Return the options of the target's store."""
    if replication is None:
        return {}
    if scheme_of(target) not in HDFS_SCHEMES:
        raise UsageError(f"--replication is an option of HDFS; {redact(target)} is not on HDFS")
    return {"replication": replication}


def _sum(done: convert.ConvertResult, line: ProgressLine) -> str:
    return f"{counted(done.files, 'file')}, {format_bytes(done.size)} in {line.elapsed_s:.1f} s ({line.rate()})"


def _warn(line: str) -> None:
    """Print why a newer save is not used."""
    print(f"bootseer: warning: skipped: {line}", file=sys.stderr)
