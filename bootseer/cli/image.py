"""`bootseer image ...`: build, push, pull, inspect, verify, gc. Others are in image_node.py and image_hot.py.

In: a command line. Out: results on stdout (`--json` for scripts), progress and errors on stderr, an exit status
(docs/reference/errors.md). The commands are implemented in bootseer.image.commands_*.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bootseer.cli import image_hot, image_node, running
from bootseer.cli.image_words import (
    Json,
    Key,
    Name,
    Quiet,
    Unsigned,
    Url,
    print_message,
    print_result,
    short,
    size_of,
)
from bootseer.cli.progress import ProgressLine
from bootseer.cli.sizes import parse_age
from bootseer.counted import counted, format_bytes
from bootseer.errors import UsageError

app = running.new_app("image", "Images as trees: built once, used before they are fetched.")

DAY_S = 86_400.0


@app.command(
    epilog="bootseer image build docker://python:3.11 hdfs://namenode/images/python",
)
def build(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Directory, OCI layout, docker://REGISTRY/IMAGE:TAG, or rootfs:DIR"),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="Destination of the tree: a directory, a store's URL, or oci://REGISTRY/NAME:TAG"
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name that readers ask for (default: the URL of DST)")
    ] = "",
    key: Key = "",
    unsigned: Unsigned = False,
    hot: Annotated[
        str,
        typer.Option("--hot", metavar="TREE", help="Earlier tree, whose access traces decide the order of blocks"),
    ] = "",
    hot_name: Annotated[
        str, typer.Option("--hot-name", metavar="NAME", help="Name of that tree, if not the URL's")
    ] = "",
    platform: Annotated[
        str, typer.Option(metavar="OS/ARCH", help="Platform of a multi-platform image (default: this machine's)")
    ] = "",
    reference: Annotated[
        str, typer.Option(metavar="NAME", help="Image of an OCI layout with several images")
    ] = "",
    owner: Annotated[
        str, typer.Option(metavar="UID:GID", help="Owner of all files of a directory (default: as found)")
    ] = "",
    cross_mounts: Annotated[
        bool, typer.Option("--cross-mounts", help="Include file systems that are mounted below a directory")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads that compress (default: one for each core)")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build a tree from a directory, an OCI layout or a registry's image. Needs no root; nothing is unpacked."""
    from bootseer.image.commands.build import BuildOptions
    from bootseer.image.commands.build import build as build_tree
    from bootseer.image.commands.common import Signing

    options = BuildOptions(
        name=name, signing=Signing(key, unsigned), hot=hot, hot_name=hot_name, platform=platform,
        reference=reference, owner=_owner(owner), crosses_mounts=cross_mounts, threads=threads,
    )  # fmt: skip
    line = ProgressLine("bootseer image build", is_quiet=quiet, as_json=as_json)
    with line:
        built = build_tree(source, target, options, line.count)
    found = built.statistics
    for what, count in sorted(found.left_out.items()):
        print_message(f"warning: left out, as a tree cannot hold them: {count} {what}")
    record = {
        "digest": built.digest, "name": built.name, "signed_by": built.signer, "index_bytes": built.index_bytes,
        "carried_traces": built.carried_traces, "seconds": line.elapsed_s, **found._asdict(),
        "left_out": dict(found.left_out),
    }  # fmt: skip
    ratio = found.raw_bytes / found.stored_bytes if found.stored_bytes else 1.0
    text = (
        f"tree {built.digest}\n{counted(found.files, 'file')}, {format_bytes(found.raw_bytes)} became"
        f" {format_bytes(found.stored_bytes)} in {counted(found.blocks, 'block')} ({ratio:.2f} : 1)"
        f" in {line.elapsed_s:.1f} s ({line.rate()})"
    )
    print_result(record, as_json, text)


@app.command(epilog="bootseer image push /data/trees/train oci://registry.example.com/team/train:v3")
def push(
    source: Url,
    target: Annotated[str, typer.Argument(metavar="DST", help="Location in a registry, oci://REGISTRY/NAME:TAG")],
    source_name: Annotated[
        str, typer.Option("--source-name", metavar="NAME", help="Name of the tree at URL, if not the URL's")
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the copy (default: DST)")] = "",
    key: Key = "",
    unsigned: Unsigned = False,
    as_is: Annotated[bool, typer.Option("--as-is", help="Keep the name and the signatures")] = False,
    subject: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image in the same repository that the tree was made from")
    ] = "",
    no_traces: Annotated[bool, typer.Option("--no-traces", help="Omit the access traces of the store")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a tree of any store to a registry. Blobs that the registry has are not sent."""
    from bootseer.image.commands.common import Signing
    from bootseer.image.commands.transfer import TransferOptions
    from bootseer.image.commands.transfer import push as push_tree

    options = TransferOptions(
        source_name, name, Signing(key, unsigned), as_is=as_is, has_traces=not no_traces, subject=subject
    )
    with ProgressLine("bootseer image push", is_quiet=quiet, as_json=as_json) as line:
        done = push_tree(source, target, options, line)
    text = (
        f"{done.reference}\ntree {done.digest}: {format_bytes(done.size)}, {format_bytes(done.moved_bytes)} sent,"
        f" {done.traces} traces, in {line.elapsed_s:.1f} s ({line.rate()})"
    )
    print_result(done._asdict() | {"seconds": line.elapsed_s}, as_json, text)


@app.command(epilog="bootseer image pull oci://registry.example.com/team/train:v3 hdfs://namenode/images/train")
def pull(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Location in a registry, oci://REGISTRY/NAME:TAG")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory or URL of a store")],
    source_name: Annotated[
        str, typer.Option("--source-name", metavar="NAME", help="Name of the tree at SRC, if not the URL's")
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the copy (default: DST)")] = "",
    key: Key = "",
    unsigned: Unsigned = False,
    as_is: Annotated[
        bool,
        typer.Option("--as-is", help="Keep the name and the signatures, one of which must be of a trusted key"),
    ] = False,
    no_traces: Annotated[bool, typer.Option("--no-traces", help="Omit the access traces")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy a tree of a registry to a directory or a store. Data that the target has is not read."""
    from bootseer.image.commands.common import Signing
    from bootseer.image.commands.transfer import TransferOptions
    from bootseer.image.commands.transfer import pull as pull_tree

    options = TransferOptions(source_name, name, Signing(key, unsigned), as_is=as_is, has_traces=not no_traces)
    with ProgressLine("bootseer image pull", is_quiet=quiet, as_json=as_json) as line:
        done = pull_tree(source, target, options, line)
    text = (
        f"tree {done.digest}: {format_bytes(done.size)}, {format_bytes(done.moved_bytes)} received,"
        f" {done.traces} traces, in {line.elapsed_s:.1f} s ({line.rate()})"
    )
    print_result(done._asdict() | {"seconds": line.elapsed_s}, as_json, text)


@app.command(epilog="bootseer image inspect hdfs://namenode/images/train --json")
def inspect(url: Url, name: Name = "", as_json: Json = False) -> None:
    """Show a tree's signature, how it is run, its sizes, and its hot blocks."""
    from bootseer.image.commands.look import inspect as look
    from bootseer.image.commands.look import to_record

    found = look(url, name=name)
    config = found.config
    counts = ", ".join(
        counted(number, what)
        for number, what in (
            (found.files, "file"),
            (found.folders, "folder"),
            (found.symlinks, "link"),
            (found.others, "other"),
        )
    )
    sizes = f"{format_bytes(found.file_bytes)} of files, {format_bytes(found.stored_bytes)} stored"
    hot = f"{counted(found.hot_blocks, 'block')}, {format_bytes(found.hot_bytes)}"
    hot += f" ({found.hot_share:.1%} of the stored size)"
    lines = [
        f"tree      {found.digest}",
        f"name      {found.name or '(named by its digest)'}",
        f"trusted   {found.because}",
        f"made      from {found.source or 'a directory'} by {found.tool}",
        f"files     {counts}",
        f"sizes     {sizes} ({found.ratio:.2f} : 1), index {format_bytes(found.index_bytes)}",
        f"blocks    {found.blocks:,} in {found.packs:,} packs",
        f"hot       {hot}, {found.traces} traces",
    ]
    for label, value in (
        ("runs", " ".join([*config.entrypoint, *config.cmd])), ("in", config.workdir), ("as", config.user),
        ("for", config.architecture),
    ):  # fmt: skip
        if value:
            lines.append(f"{label:<10}{value!r}" if not value.isprintable() else f"{label:<10}{value}")
    lines += [f"env       {each!r}" if not each.isprintable() else f"env       {each}" for each in config.env]
    print_result(to_record(found), as_json, "\n".join(lines))


@app.command(epilog="bootseer image verify hdfs://namenode/images/train")
def verify(url: Url, name: Name = "", as_json: Json = False, quiet: Quiet = False) -> None:
    """Verify every block of the store against the index; ends with status 1 if there is any fault."""
    from bootseer.image.commands.look import verify as check

    with ProgressLine("bootseer image verify", is_quiet=quiet, as_json=as_json) as line:
        found = check(url, name=name, progress=line)
    lines = [
        f"{each.pack}: {each.what}"
        if each.block < 0
        else f"block {each.block} at byte {each.offset} of {each.pack}: {each.what}"
        for each in found.faults
    ]
    lines += found.trace_faults
    lines.append(
        f"tree {short(found.digest)}: {found.right_blocks:,} of {found.blocks:,} blocks correct,"
        f" {format_bytes(found.checked_bytes)} read, {found.fault_count} faults ({line.rate()}); {found.because}"
    )
    record = found._asdict() | {"faults": [each._asdict() for each in found.faults], "seconds": line.elapsed_s}
    print_result(record, as_json, "\n".join(lines))
    if found.fault_count:
        raise typer.Exit(1)


@app.command(epilog="bootseer image gc --store hdfs://namenode/images/train --dry-run")
def gc(
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Directory of a tree (default: this node's cache)")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted")] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Maximum size of blocks, and of unpacked trees (default: BOOTSEER_CACHE_LIMIT)"
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete everything that is not in use")] = False,
    older: Annotated[
        str | None,
        typer.Option(
            metavar="DAYS",
            help="Minimum time since the last use, as in 12h: of unpacked trees (default: 30), of a store (7)",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="DIGEST", help="Further tree to keep, with --store")
    ] = None,
    name: Name = "",
    as_json: Json = False,
) -> None:
    """Delete cached data beyond the limit; with --store, files that no tree of a directory needs."""
    from bootseer.image.commands.gc import collect_node, collect_store

    would = "would be deleted" if dry_run else "deleted"
    given_s = parse_age(older, "--older")
    if store:
        if limit is not None or everything:
            raise UsageError("--limit and --all are options for this node's cache; omit --store")
        older_s = 7.0 * DAY_S if given_s is None else given_s
        done = collect_store(store, name=name, keep=keep or [], older_s=older_s, is_dry=dry_run)
        text = (
            f"{would}: {counted(done.packs, 'pack')}, {counted(done.indexes, 'index', 'indexes')},"
            f" {counted(done.traces, 'directory of traces', 'directories of traces')},"
            f" {format_bytes(done.freed_bytes)}"
        )
        lines = [*done.paths, text] if dry_run else [text]
        print_result(done._asdict() | {"is_dry_run": dry_run}, as_json, "\n".join(lines))
        return
    if keep or name:
        raise UsageError("--keep and --name need the directory of a tree: give --store URL")
    max_bytes = 0 if everything else size_of(limit, "--limit")
    unused_s = given_s if given_s is not None else 0.0 if everything else 30.0 * DAY_S
    found = collect_node(max_bytes=max_bytes, unused_s=unused_s, is_dry=dry_run)
    lines = [
        f"{each.digest}  {each.kind}  {format_bytes(each.size)}  unused for {each.unused_s / DAY_S:.1f} days"
        for each in found.removed
    ]
    lines.append(
        f"{found.folder}: {len(found.removed)} trees {would}, {format_bytes(found.freed_bytes)};"
        f" {format_bytes(found.left_bytes)} cached of at most {format_bytes(found.limit_bytes)}"
    )
    record = found._asdict() | {"removed": [each._asdict() for each in found.removed], "is_dry_run": dry_run}
    print_result(record, as_json, "\n".join(lines))


for command, shown, epilog in image_node.COMMANDS:
    app.command(shown, epilog=epilog)(command)
app.command("unmount", hidden=True)(image_node.umount)  # an alternative spelling
app.add_typer(image_hot.app, name="hot", help="Access traces of starts: show, merge and prune them.")


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    return running.run(app, "bootseer image", argv, logs=True)


def _owner(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    uid, colon, gid = text.partition(":")
    if not colon or not uid.isdecimal() or not gid.isdecimal() or max(int(uid), int(gid)) > (1 << 32) - 2:
        raise UsageError(f"--owner {text!r}: give two numbers, as in 0:0")
    return int(uid), int(gid)
