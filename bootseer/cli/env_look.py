"""`bootseer env list`, `explain`, `verify`, `gc` and `rm`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootseer.cli.env_words import (
    SETUP,
    URL,
    Config,
    EnvKey,
    MaxAge,
    Python,
    Setup,
    SetupInput,
    SetupTarget,
    SetupVariable,
    Store,
    facts_of,
    format_expiry,
    store_url,
    to_flags,
)
from bootseer.cli.image_words import Json, Quiet, print_result, short, size_of
from bootseer.cli.progress import ProgressLine
from bootseer.cli.sizes import parse_age
from bootseer.counted import counted, format_bytes, format_time

if TYPE_CHECKING:
    from bootseer.env.commands.look import VerifyResult
    from bootseer.env.store.store import ListedKey

Keys = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY...", help="Key of an environment, or its first letters (6 or more)"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted")]


def list_(env_store: Store = "", config: Config = "", as_json: Json = False) -> None:
    """List the environments of a store: age, size, expiry, targets, and why they are trusted."""
    from bootseer.env.commands.look import list_store, to_record

    found, now_s = list_store(store_url(env_store, config), os.environ)
    lines = [line for each in found for line in _lines_of(each, now_s)]
    record = {"environments": [to_record(each) for each in found]}
    print_result(record, as_json, "\n".join(lines or ["the store has no environments"]))


def explain(
    other: Annotated[
        str,
        typer.Argument(metavar="[KEY]", help="Environment to compare with (default: the one that differs least)"),
    ] = "",
    setup: Setup = None,
    setup_input: SetupInput = None,
    setup_target: SetupTarget = None,
    setup_variable: SetupVariable = None,
    env_store: Store = "",
    env_key: EnvKey = "",
    env_max_age: MaxAge = None,
    python: Python = "",
    config: Config = "",
    as_json: Json = False,
) -> None:
    """Explain field by field why a start would find no environment here and now; nothing is run or changed."""
    from bootseer.env.commands.look import explain as look
    from bootseer.env.commands.spec import make_spec
    from bootseer.env.key import explain as explaining

    flags = to_flags(
        setup, setup_input, setup_target, setup_variable, env_store, env_key, env_max_age, python, config
    )
    found = look(make_spec(flags, os.environ, os.getcwd()), os.environ, other)
    lines = found.lines
    if found.found is not None:
        expiry = format_expiry(found.found.snapshot.expires_s, time.time())
        lines = [f"found: {found.keyed.key} ({found.found.because}; {expiry})", *lines]
    else:
        guess = "" if found.keyed.reads is not None else " (a first guess, until set-up has run)"
        lines = [f"not found: {found.keyed.key}{guess}", *lines]
    record = {
        "key": found.keyed.key,
        "is_found": found.found is not None,
        "because": found.found.because if found.found is not None else "",
        "refused": found.refused,
        "builder": found.builder,
        "compared_with": found.nearest.key if found.nearest is not None else "",
        "changes": explaining.explain_rows(found.nearest) if found.nearest is not None else [],
        "lines": found.lines,
        "observed": found.keyed.document.reads,
        "guessed": found.keyed.guessed_names,
        **facts_of(found.keyed),
    }
    print_result(record, as_json, "\n".join([*lines, *found.inputs]))


def verify(
    keys: Keys = None, env_store: Store = "", config: Config = "", as_json: Json = False, quiet: Quiet = False
) -> None:
    """Verify every block of environments (default: of all); status 1 if there is any fault."""
    from bootseer.env.commands.look import verify as check

    with ProgressLine("bootseer env verify", is_quiet=quiet, as_json=as_json) as line:
        found = check(store_url(env_store, config), keys or (), os.environ, progress=line)
    lines = [text for each in found for text in _verdict_lines(each)]
    record = {"environments": [_verdict_record(each) for each in found], "seconds": line.elapsed_s}
    print_result(record, as_json, "\n".join(lines or ["the store has no usable environments"]))
    if not all(each.is_right for each in found):
        raise typer.Exit(1)


def gc(
    env_store: Store = "",
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Maximum size of all environments; the least recently used are deleted first"
        ),
    ] = None,
    older: Annotated[
        str | None, typer.Option(metavar="DAYS", help="Minimum time since the last use, as in 60, 60d or 12h")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Include environments that jobs use, or used within two hours")
    ] = False,
    dry_run: DryRun = False,
    config: Config = "",
    as_json: Json = False,
) -> None:
    """Delete expired environments, remains of unfinished builds, and those selected by --older and --limit."""
    from bootseer.env.commands.look import collect

    done = collect(
        store_url(env_store, config),
        os.environ,
        max_bytes=size_of(limit, "--limit"),
        unused_s=parse_age(older, "--older"),
        is_forced=force,
        is_dry=dry_run,
    )
    lines = [
        f"{short(each.key)}  {format_bytes(each.freed_bytes)}"
        f"{', ' + counted(len(each.paths), 'file') if each.paths else ''}: {each.why}"
        for each in done.removals
    ]
    lines.append(
        f"{format_bytes(done.freed_bytes)} {'would be deleted' if dry_run else 'deleted'},"
        f" {format_bytes(done.left_bytes)} left"
    )
    if done.leased:
        lines.append(f"{done.leased} kept: they are being built")
    if done.recent:
        more = "" if force else "; --force includes those used within two hours"
        lines.append(f"{done.recent} kept: they are in use or new{more}")
    record = done._asdict() | {"removals": [each._asdict() for each in done.removals], "is_dry_run": dry_run}
    print_result(record, as_json, "\n".join(lines))


def rm(
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY...", help="Key of an environment, or its first letters (6 or more)"),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Delete although jobs use it, or used it within two hours")
    ] = False,
    dry_run: DryRun = False,
    env_store: Store = "",
    config: Config = "",
    as_json: Json = False,
) -> None:
    """Delete environments by their keys; all or none: status 1 if one is missing, in use or being built."""
    from bootseer.env.commands.look import remove

    done = remove(store_url(env_store, config), keys, os.environ, is_forced=force, is_dry=dry_run)
    lines = [f"{short(each.key)}  {format_bytes(each.freed_bytes)}" for each in done.removals]
    lines.append(f"{format_bytes(done.freed_bytes)} {'would be deleted' if dry_run else 'deleted'}")
    record = done._asdict() | {"removals": [each._asdict() for each in done.removals], "is_dry_run": dry_run}
    print_result(record, as_json, "\n".join(lines))


def _lines_of(listed: ListedKey, now_s: float) -> list[str]:
    refused = [f"{short(listed.key)}  not used: {why}" for why in listed.refused]
    if listed.found is None:
        return refused or [f"{short(listed.key)}  has no usable snapshot: expired, or never published"]
    found = listed.found.snapshot
    python = f", Python {found.python}" if found.python else ""
    line = (
        f"{short(listed.key)}  {format_time(now_s - found.created_s)} old, {format_bytes(found.bytes)} in"
        f" {counted(found.files, 'file')} ({format_bytes(listed.stored_bytes)} stored),"
        f" {format_expiry(found.expires_s, now_s)}; set-up took {format_time(found.setup_s)}{python};"
        f" {', '.join(found.targets)}; {listed.found.because}"
    )
    return [line, *refused]


def _verdict_lines(verdict: VerifyResult) -> list[str]:
    name = short(verdict.key)
    if verdict.checked is None:
        return [f"{name}  {verdict.error}"]
    checked = verdict.checked
    lines = [
        f"{name}  {each.pack}: {each.what}"
        if each.block < 0
        else f"{name}  block {each.block} at byte {each.offset} of {each.pack}: {each.what}"
        for each in checked.faults
    ]
    lines.append(
        f"{name}  {checked.right_blocks:,} of {checked.blocks:,} blocks correct,"
        f" {format_bytes(checked.checked_bytes)} read, {counted(len(checked.faults), 'fault')}; {verdict.because}"
    )
    return lines


def _verdict_record(verdict: VerifyResult) -> dict[str, Any]:
    from bootseer.env.commands.look import MAX_NAMED

    record: dict[str, Any] = {
        "key": verdict.key, "tree": verdict.tree, "because": verdict.because, "error": verdict.error,
        "is_right": verdict.is_right,
    }  # fmt: skip
    if verdict.checked is not None:
        faults = verdict.checked.faults
        record |= verdict.checked._asdict() | {"fault_count": len(faults)}
        record["faults"] = [each._asdict() for each in faults[:MAX_NAMED]]
    return record


# (function, name, example), in display order.
COMMANDS: list[tuple[Callable[..., None], str, str]] = [
    (list_, "list", f"bootseer env list --env-store {URL}"),
    (explain, "explain", f"bootseer env explain {SETUP} --env-store {URL}"),
    (verify, "verify", f"bootseer env verify --env-store {URL}"),
    (gc, "gc", f"bootseer env gc --env-store {URL} --older 60 --limit 500GB --dry-run"),
    (rm, "rm", f"bootseer env rm 5f1c0a --env-store {URL}"),
]
