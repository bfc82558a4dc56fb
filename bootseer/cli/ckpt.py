"""`bootseer ckpt ...`: stripe, unstripe, ls, verify, cat, prefetch and mount.

In: a command line. Out: results on stdout (`--json` for scripts), progress and errors on stderr, an exit status
(docs/errors.md). What the commands do is in bootseer.checkpoint.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Annotated, Any

import typer

from bootseer import aio
from bootseer.checkpoint import convert
from bootseer.checkpoint.verify import verify as verify_version
from bootseer.checkpoint.version_input import inputs_of
from bootseer.checkpoint.versions import Pinned, list_versions, resolve
from bootseer.cli.progress import ProgressLine, format_bytes
from bootseer.cli.sizes import parse_size
from bootseer.errors import BootseerError, IntegrityError, NotFound

app = typer.Typer(
    name="ckpt",
    help="Checkpoints: striped over many files, read and written in parallel.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="path or URL: a checkpoint folder, a version, or a file")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]
CHUNK_BYTES = 64 << 20  # of `cat`


@app.command(epilog="bootseer ckpt stripe model.safetensors hdfs://namenode/run1/ckpt --step 1000 --keep 3")
def stripe(
    source: Url,
    target: Annotated[str, typer.Argument(metavar="CKPT", help="checkpoint folder that gets a new version")],
    unit: Annotated[str | None, typer.Option(help="size of a unit (default 16MiB)")] = None,
    stripes: Annotated[int | None, typer.Option(min=1, max=1024, help="stripe files (default 8 on HDFS)")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="training step to note")] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="take away all but so many of the newest versions")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the newest checkpoint of URL as a new striped version of CKPT."""
    unit_bytes = None if unit is None else parse_size(unit, "--unit")
    with ProgressLine("bootseer ckpt stripe", is_quiet=quiet) as line:
        done = convert.stripe(
            source, target, unit_bytes=unit_bytes, stripes=stripes, step=step, keep=keep, progress=line
        )
    _report(done._asdict() | {"seconds": line.elapsed_s}, as_json, f"version {done.version}: {_sum(done, line)}")


@app.command(epilog="bootseer ckpt unstripe hdfs://namenode/run1/ckpt /data/plain")
def unstripe(
    source: Url,
    target: Annotated[str, typer.Argument(metavar="FOLDER", help="where the plain files go")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the files of the newest checkpoint of URL as plain files that every tool reads."""
    with ProgressLine("bootseer ckpt unstripe", is_quiet=quiet) as line:
        done = convert.unstripe(source, target, progress=line)
    _report(done._asdict() | {"seconds": line.elapsed_s}, as_json, _sum(done, line))


@app.command("ls", epilog="bootseer ckpt ls hdfs://namenode/run1/ckpt --files")
def list_(
    url: Url, files: Annotated[bool, typer.Option("--files", help="the files of the newest one")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the versions of a checkpoint, newest last, and which one a job would load."""

    async def run() -> tuple[list[dict[str, Any]], Pinned | None, str]:
        async with convert.opened(url) as (store, path):
            found = [each._asdict() for each in await list_versions(store, path)]
            try:
                return found, await resolve(store, path), ""
            except (NotFound, IntegrityError) as error:
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
        _print(json.dumps(record))
        return
    for each in versions:
        created = datetime.datetime.fromtimestamp(int(each["version"][:20]) / 1e9, datetime.UTC)
        _print(
            f"{each['version']}  {created:%Y-%m-%d %H:%M:%S} UTC  {'' if each['is_complete'] else 'unfinished'}"
        )
    if newest is None:
        _print(f"a job would load none: {why}")
        return
    step = "" if newest.step is None else f", step {newest.step}"
    name = newest.version or "these files"
    _print(f"a job would load {name}{step}: {len(newest.files)} files, {format_bytes(newest.size)}")
    for file in newest.files if files else ():
        _print(f"  {file.path}  {format_bytes(file.layout.size)}  {len(file.stripes)} stripes")


@app.command(epilog="bootseer ckpt verify hdfs://namenode/run1/ckpt")
def verify(url: Url, as_json: Json = False, quiet: Quiet = False) -> None:
    """Read every byte of the newest version and compare sums; ends with status 1 if anything is wrong."""
    with ProgressLine("bootseer ckpt verify", is_quiet=quiet) as line:

        async def run() -> tuple[Pinned, Any]:
            async with convert.opened(url) as (store, path):
                pinned = await resolve(store, path)
                note = convert.summing(line, pinned.size)
                return pinned, await verify_version(store, pinned, note)

        pinned, verdict = aio.run_sync(run())
    record = verdict._asdict() | {"version": pinned.version, "faults": [each._asdict() for each in verdict.faults]}
    lines = [f"{each.path}: unit {each.unit} in {each.stripe}: {each.what}" for each in verdict.faults]
    lines = [text.replace(": unit -1 in ", ": ") for text in lines]
    unsummed = f", {format_bytes(verdict.unsummed_bytes)} have no sums" if verdict.unsummed_bytes else ""
    right = f"{verdict.files} files: {format_bytes(verdict.checked_bytes)} right"
    lines.append(f"{right}{unsummed}, {verdict.fault_count} faults ({line.rate()})")
    _report(record, as_json, "\n".join(lines))
    if verdict.fault_count:
        raise typer.Exit(1)


@app.command(epilog="bootseer ckpt cat hdfs://namenode/run1/ckpt config.json")
def cat(
    url: Url,
    file: Annotated[str, typer.Argument(metavar="FILE", help="path in it, if it has several")] = "",
) -> None:  # fmt: skip
    """Write one file of the newest checkpoint to stdout."""

    async def run() -> None:
        async with convert.opened(url) as (store, path):
            pinned = await resolve(store, path)
            inputs = dict(inputs_of(store, pinned))
            name = file or (next(iter(inputs)) if len(inputs) == 1 else "")
            if name not in inputs:
                shown = ", ".join(sorted(inputs)[:8])
                raise NotFound(f"{url}: has no file {name!r}; name one of: {shown}")
            size = inputs[name].size
            buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
            for offset in range(0, size, CHUNK_BYTES):
                view = buffer[: min(CHUNK_BYTES, size - offset)]
                await inputs[name].read_into(offset, view)
                await aio.run_io(sys.stdout.buffer.write, view)
            await aio.run_io(sys.stdout.buffer.flush)

    aio.run_sync(run())


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status."""
    try:
        ended = app(args=argv, prog_name="bootseer ckpt", standalone_mode=False)
    except typer.Abort:
        return 130
    except BrokenPipeError:
        return 141  # as of SIGPIPE: a reader of stdout has seen enough
    except BootseerError as error:
        print(f"bootseer: error: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        show = getattr(error, "show", None)  # of the command line
        if show is None:
            raise
        show(file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    return ended if isinstance(ended, int) else 0  # of typer.Exit


def _sum(done: convert.Copied, line: ProgressLine) -> str:
    return f"{done.files} files, {format_bytes(done.size)} in {line.elapsed_s:.1f} s ({line.rate()})"


def _report(record: dict[str, Any], as_json: bool, text: str) -> None:
    _print(json.dumps(record) if as_json else text)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
