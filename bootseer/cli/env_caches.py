"""`bootseer env caches ...`: compile caches of first training steps, in a store or on this node."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from bootseer.cli import running
from bootseer.cli.env_words import Config, Store, store_url
from bootseer.cli.image_words import Json, print_result, short
from bootseer.cli.sizes import parse_age
from bootseer.counted import counted, format_bytes, format_time
from bootseer.errors import UsageError

app = running.new_app()

Node = Annotated[bool, typer.Option("--node", help="Use the caches of this node, not those of the store")]


@app.command("list", epilog="bootseer env caches list --env-store hdfs://namenode/environments")
def list_(env_store: Store = "", node: Node = False, config: Config = "", as_json: Json = False) -> None:
    """List compile caches of the store, or of this node (--node, or if no store is named)."""
    from bootseer.env.commands import caches as commands

    url = _url(env_store, node, config)
    if not url:
        there = commands.list_node(os.environ)
        lines = [
            f"{each.path}  {counted(each.files, 'file')}, {format_bytes(each.size)},"
            f" {'in use' if each.is_used else f'unused for {format_time(each.unused_s)}'}"
            for each in there
        ]
        record = {"caches": [each._asdict() for each in there]}
        print_result(record, as_json, "\n".join(lines or ["this node has no compile caches"]))
        return
    found = commands.list_store(url, os.environ)
    now_s = time.time()
    lines = []
    for each in found:
        if each.generation:
            lines.append(
                f"{short(each.key)}  generation {each.generation}, {counted(each.files, 'file')},"
                f" {format_bytes(each.size)}, made {format_time(now_s - each.made_s)} ago, {each.because}"
            )
        lines += [f"{short(each.key)}  not used: {why}" for why in each.refused]
    record = {"caches": [each._asdict() for each in found]}
    print_result(record, as_json, "\n".join(lines or ["the store has no compile caches"]))


@app.command(epilog="bootseer env caches gc --env-store hdfs://namenode/environments --older 60 --dry-run")
def gc(
    env_store: Store = "",
    node: Node = False,
    older: Annotated[
        str, typer.Option(metavar="DAYS", help="Minimum time since the last use, as in 60, 60d or 12h")
    ] = "30",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted")] = False,
    config: Config = "",
    as_json: Json = False,
) -> None:
    """Delete compile caches that no job has used for a while, of the store or of this node."""
    from bootseer.env.commands import caches as commands

    url, unused_s = _url(env_store, node, config), parse_age(older, "--older") or 0.0
    if url:
        done = commands.collect_store(url, os.environ, unused_s=unused_s, is_dry=dry_run)
    else:
        done = commands.collect_node(os.environ, unused_s=unused_s, is_dry=dry_run)
    would = "would be deleted" if dry_run else "deleted"
    lines = [*done.removed, f"{len(done.removed)} {would}, {format_bytes(done.freed_bytes)}"]
    if done.generations:
        lines.append(f"{counted(done.generations, 'file')} of replaced generations deleted")
    print_result(done._asdict() | {"is_dry_run": dry_run}, as_json, "\n".join(lines))


def _url(env_store: str, node: bool, config: str) -> str:
    """Return the URL of the store; empty for this node."""
    if node and env_store:
        raise UsageError("both --node and --env-store are given; give only one")
    return "" if node else store_url(env_store, config)
