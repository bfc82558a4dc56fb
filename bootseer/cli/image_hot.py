"""`bootseer image hot ...`: what starts touch first, as it was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli import running
from bootseer.cli.image_words import Json, Key, Name, Unsigned, Url, Workload, report, say
from bootseer.cli.progress import format_bytes
from bootseer.counted import counted
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.image.commands_hot import ShownTrace

app = running.new_app()


@app.command(epilog="bootseer image hot show hdfs://namenode/images/train --files")
def show(
    url: Url,
    name: Name = "",
    workload: Workload = "",
    files: Annotated[bool, typer.Option("--files", help="the files, as starts touch them")] = False,
    as_json: Json = False,
) -> None:
    """Show the recordings of a tree: those of this node, and those of its store."""
    from bootseer.image import commands_hot as hot
    from bootseer.image.commands_traces import check_workload, hot_blocks, hot_files

    wanted = check_workload(workload)
    tree, traces, known = hot.show(url, name=name, say=say)
    chosen = [each for each in traces if wanted in ("", each.workload)]
    lines = [_line(each) for each in chosen]
    found = hot_files(tree.index, hot_blocks(known, wanted)) if files else []
    lines += [f"{each.blocks:6}  {each.path!r}" if not each.path.isprintable() else f"{each.blocks:6}  {each.path}"
              for each in found]  # fmt: skip
    if not lines:
        lines = ["no start was recorded: `bootseer image record` records one, and so does each job"]
    record = {"digest": tree.digest, "traces": [each._asdict() for each in chosen]}
    if files:
        record["files"] = [each._asdict() for each in found]
    report(record, as_json, "\n".join(lines))


@app.command(epilog="bootseer image hot merge hdfs://namenode/images/train")
def merge(
    url: Url,
    recordings: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="of other nodes, written by --output there")
    ] = None,
    name: Name = "",
    workload: Workload = "",
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="into this file instead of the tree's store")
    ] = "",
    key: Key = "",
    unsigned: Unsigned = False,
    as_json: Json = False,
) -> None:
    """Put what this node has recorded together with what the store has, for all nodes."""
    from bootseer.image import commands_hot as hot
    from bootseer.image.commands import Signing
    from bootseer.image.commands_traces import check_workload

    done = hot.merge(
        url, recordings or [], name=name, workload=check_workload(workload), output=output,
        signing=Signing(key, unsigned), say=say,
    )  # fmt: skip
    report({"traces": [each._asdict() for each in done]}, as_json, "\n".join(map(_line, done)))


@app.command(epilog="bootseer image hot prune hdfs://namenode/images/train --share 0.5")
def prune(
    url: Url,
    name: Name = "",
    workload: Workload = "",
    share: Annotated[float, typer.Option(min=0, max=1, help="blocks go that fewer of the recordings saw")] = 0.5,
    forget: Annotated[bool, typer.Option("--forget", help="the whole recordings go")] = False,
    key: Key = "",
    unsigned: Unsigned = False,
    as_json: Json = False,
) -> None:
    """Take out of the recordings, here and in the store, what starts seldom need."""
    from bootseer.image import commands_hot as hot
    from bootseer.image.commands import Signing
    from bootseer.image.commands_traces import check_workload

    if forget and share != 0.5:
        raise UsageError("--forget takes all away; --share says what stays")
    done = hot.prune(
        url, name=name, workload=check_workload(workload), share=share, forgets=forget,
        signing=Signing(key, unsigned), say=say,
    )  # fmt: skip
    lines = [_line(each) for each in done] or ["nothing is recorded any more"]
    report({"traces": [each._asdict() for each in done]}, as_json, "\n".join(lines))


def _line(each: ShownTrace) -> str:
    return (
        f"{each.workload}  {counted(each.runs, 'run')}, {each.hot_blocks:,} of {each.blocks:,} blocks hot,"
        f" {format_bytes(each.hot_bytes)}, the last after {each.last_ms / 1000:.1f} s  {each.where}"
    )
