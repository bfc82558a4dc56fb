"""`bootseer env list`, `explain`, `verify` and `gc`."""

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
    format_time,
    store_url,
    to_flags,
)
from bootseer.cli.image_words import Json, Quiet, report, say, short, size_of
from bootseer.cli.progress import ProgressLine, format_bytes
from bootseer.counted import counted

if TYPE_CHECKING:
    from bootseer.env.commands_look import Verdict
    from bootseer.env.store import Listed

DAY_S = 86_400.0
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="KEY...", help="of an environment, or its first letters (6 or more)")
]


def list_(env_store: Store = "", config: Config = "", as_json: Json = False) -> None:
    """List the environments of a store: age, size, expiry, targets, who is believed for them."""
    from bootseer.env.commands_look import list_store, to_record

    found, now_s = list_store(store_url(env_store, config), os.environ, say=say)
    lines = [line for each in found for line in _lines_of(each, now_s)]
    record = {"environments": [to_record(each) for each in found]}
    report(record, as_json, "\n".join(lines or ["the store has no environments"]))


def explain(
    other: Annotated[
        str, typer.Argument(metavar="[KEY]", help="compare with this one (default: the one that differs least)")
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
    """Say field by field why a start here and now would find no environment; nothing is run or changed."""
    from bootseer.env import explain as explaining
    from bootseer.env.commands_look import explain as look
    from bootseer.env.commands_spec import make_spec

    flags = to_flags(
        setup, setup_input, setup_target, setup_variable, env_store, env_key, env_max_age, python, config
    )
    found = look(make_spec(flags, os.environ, os.getcwd()), os.environ, other, say=say)
    lines = found.lines
    if found.found is not None:
        expiry = format_expiry(found.found.snapshot.expires_s, time.time())
        lines = [f"found: {found.keyed.key} ({found.found.because}; {expiry})", *lines]
    else:
        lines = [f"not found: {found.keyed.key}", *lines]
    record = {
        "key": found.keyed.key,
        "is_found": found.found is not None,
        "because": found.found.because if found.found is not None else "",
        "refused": found.refused,
        "builder": found.builder,
        "compared_with": found.nearest.key if found.nearest is not None else "",
        "changes": explaining.rows(found.nearest) if found.nearest is not None else [],
        "lines": found.lines,
        "observed": found.keyed.document.reads,
        "guessed": found.keyed.guessed_names,
        **facts_of(found.keyed),
    }
    report(record, as_json, "\n".join([*lines, *found.inputs]))


def verify(
    keys: Keys = None, env_store: Store = "", config: Config = "", as_json: Json = False, quiet: Quiet = False
) -> None:
    """Read every block of environments (default: of all) and compare it; status 1 if anything is wrong."""
    from bootseer.env.commands_look import verify as check

    with ProgressLine("bootseer env verify", is_quiet=quiet) as line:
        found = check(store_url(env_store, config), keys or (), os.environ, say=say, progress=line)
    lines = [text for each in found for text in _verdict_lines(each)]
    record = {"environments": [_verdict_record(each) for each in found], "seconds": line.elapsed_s}
    report(record, as_json, "\n".join(lines or ["the store has no environments that can be used"]))
    if not all(each.is_right for each in found):
        raise typer.Exit(1)


def gc(
    env_store: Store = "",
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="of all environments: those used least recently go first")
    ] = None,
    older: Annotated[float | None, typer.Option(min=0, metavar="DAYS", help="unused for so long")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    config: Config = "",
    as_json: Json = False,
) -> None:
    """Take away what has expired, what builds left that never ended, and what --older and --limit say."""
    from bootseer.env.commands_look import collect

    done = collect(
        store_url(env_store, config),
        os.environ,
        most_bytes=size_of(limit, "--limit"),
        unused_s=None if older is None else older * DAY_S,
        is_dry=dry_run,
        say=say,
    )
    lines = [
        f"{short(each.key)}  {format_bytes(each.freed_bytes)}"
        f"{', ' + counted(len(each.paths), 'file') if each.paths else ''}: {each.why}"
        for each in done.removals
    ]
    lines.append(
        f"{format_bytes(done.freed_bytes)} {'would go' if dry_run else 'gone'},"
        f" {format_bytes(done.left_bytes)} left"
    )
    if done.leased:
        lines.append(f"{done.leased} are being built and were left alone")
    if done.recent:
        lines.append(f"{done.recent} beyond the limit are in use, or were made a moment ago: left")
    record = done._asdict() | {"removals": [each._asdict() for each in done.removals], "is_dry_run": dry_run}
    report(record, as_json, "\n".join(lines))


def _lines_of(listed: Listed, now_s: float) -> list[str]:
    refused = [f"{short(listed.key)}  not used: {why}" for why in listed.refused]
    if listed.found is None:
        return refused or [f"{short(listed.key)}  has no snapshot that can be used: expired, or never published"]
    found = listed.found.snapshot
    python = f", Python {found.python}" if found.python else ""
    line = (
        f"{short(listed.key)}  {format_time(now_s - found.created_s)} old, {format_bytes(found.bytes)} in"
        f" {counted(found.files, 'file')} ({format_bytes(listed.stored_bytes)} stored),"
        f" {format_expiry(found.expires_s, now_s)}; set-up took {format_time(found.setup_s)}{python};"
        f" {', '.join(found.targets)}; {listed.found.because}"
    )
    return [line, *refused]


def _verdict_lines(verdict: Verdict) -> list[str]:
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
        f"{name}  {checked.right_blocks:,} of {checked.blocks:,} blocks right,"
        f" {format_bytes(checked.checked_bytes)} read, {counted(len(checked.faults), 'fault')}; {verdict.because}"
    )
    return lines


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    from bootseer.env.commands_look import MOST_NAMED

    record: dict[str, Any] = {
        "key": verdict.key, "tree": verdict.tree, "because": verdict.because, "error": verdict.error,
        "is_right": verdict.is_right,
    }  # fmt: skip
    if verdict.checked is not None:
        faults = verdict.checked.faults
        record |= verdict.checked._asdict() | {"fault_count": len(faults)}
        record["faults"] = [each._asdict() for each in faults[:MOST_NAMED]]
    return record


# (function, name, example), in the order in which they are shown.
COMMANDS: list[tuple[Callable[..., None], str, str]] = [
    (list_, "list", f"bootseer env list --env-store {URL}"),
    (explain, "explain", f"bootseer env explain {SETUP} --env-store {URL}"),
    (verify, "verify", f"bootseer env verify --env-store {URL}"),
    (gc, "gc", f"bootseer env gc --env-store {URL} --older 60 --limit 500GB --dry-run"),
]
