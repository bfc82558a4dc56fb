"""`bootseer env ...`: snapshot, restore, key. Other commands are in env_look.py and env_caches.py.

In: a command line; flags have the same names as in bootrun. Out: results on stdout (`--json` for scripts),
progress, the output of set-up commands and errors on stderr, an exit status (docs/reference/errors.md). The
commands are implemented in bootseer.env.commands_*.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import typer

from bootseer.cli import env_caches, env_look, running
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
    SetupTimeout,
    SetupVariable,
    SetupWait,
    Store,
    facts_of,
    format_expiry,
    store_url,
    to_flags,
)
from bootseer.cli.image_words import (
    Json,
    Key,
    Quiet,
    Unsigned,
    print_message,
    print_result,
    short,
)
from bootseer.cli.progress import ProgressLine
from bootseer.counted import counted, format_bytes, format_time
from bootseer.errors import UsageError

app = running.new_app("env", "Environments: installed once, restored everywhere.")


@app.command(epilog=f"bootseer env snapshot {SETUP} --env-store {URL}")
def snapshot(
    setup: Setup = None,
    setup_input: SetupInput = None,
    setup_target: SetupTarget = None,
    setup_variable: SetupVariable = None,
    setup_timeout: SetupTimeout = None,
    setup_wait: SetupWait = None,
    env_store: Store = "",
    env_key: EnvKey = "",
    env_max_age: MaxAge = None,
    python: Python = "",
    config: Config = "",
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Run set-up although the store has the environment")
    ] = False,
    log: Annotated[
        str, typer.Option("--log", metavar="FILE", help="File to append the output of the commands to")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads that compress (default: one for each core)")
    ] = None,
    key: Key = "",
    unsigned: Unsigned = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run set-up commands now and publish the result, in CI or on a login node: later starts restore it."""
    from bootseer.env.commands.snapshot import SnapshotOptions
    from bootseer.env.commands.snapshot import snapshot as make
    from bootseer.env.commands.spec import make_spec
    from bootseer.trust.trust import Signing

    flags = to_flags(
        setup, setup_input, setup_target, setup_variable, env_store, env_key, env_max_age, python, config,
        timeout_s=setup_timeout, wait_s=setup_wait,
    )  # fmt: skip
    spec = make_spec(flags, os.environ, os.getcwd())
    options = SnapshotOptions(Signing(key, unsigned), rebuild, os.path.abspath(log) if log else "", threads)
    line = ProgressLine("bootseer env snapshot", is_quiet=quiet, as_json=as_json)
    with line:
        made = make(
            spec,
            options,
            os.environ,
            on_line=_ignore if quiet else _show_line,
            count=line.count,
        )
    found = made.found.snapshot
    record = _record_of(made.found.snapshot) | {
        "is_ours": made.is_ours, "setup_here_s": made.setup_s, "capture_s": made.capture_s,
        "stored_bytes": made.stored_bytes, "because": made.found.because, "generation": made.found.generation,
    }  # fmt: skip
    expiry = format_expiry(found.expires_s, time.time())
    if made.is_ours:
        text = (
            f"{found.key}\n{counted(found.files, 'file')}, {format_bytes(found.bytes)} became"
            f" {format_bytes(made.stored_bytes)}; set-up took {format_time(made.setup_s)},"
            f" publishing {format_time(made.capture_s)}; {expiry}"
        )
    elif made.setup_s:
        text = f"{found.key}\nanother process has published it first, and its snapshot is used; {expiry}"
    else:
        how = "--rebuild makes a new one"
        if made.is_in_place:
            how = f"for a new one recreate {', '.join(found.targets)} first, then use --rebuild"
        text = f"{found.key}\nexists already ({made.found.because}); {expiry}; {how}"
    print_result(record, as_json, text)


@app.command(epilog=f"bootseer env restore {SETUP} --env-store {URL}")
def restore(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="Key of the environment, or its first letters (default: the key of the flags)"
        ),
    ] = "",
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="DIR", help="Directory to use instead of a target; one for each, in order"),
    ] = None,
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
    quiet: Quiet = False,
) -> None:
    """Restore an environment to its targets, or to other directories, atomically. Needs no root."""
    from bootseer.env.commands.restore import restore_key, restore_spec
    from bootseer.env.commands.spec import has_commands, make_spec

    flags = to_flags(
        setup, setup_input, setup_target, setup_variable, env_store, env_key, env_max_age, python, config
    )
    directories = [os.path.abspath(each) for each in to or ()]
    if key and setup:
        raise UsageError("both a key and --setup are given; give only one")
    if not key and not has_commands(flags, os.environ, os.getcwd()):
        raise UsageError("no environment is named; give its key (`bootseer env list`), or --setup as in the job")
    line = ProgressLine("bootseer env restore", is_quiet=quiet, as_json=as_json)
    with line:
        if key:
            done = restore_key(store_url(env_store, config), key, directories, os.environ, count=line.count)
        else:
            spec = make_spec(flags, os.environ, os.getcwd())
            done = restore_spec(spec, directories, os.environ, count=line.count)
    for what, count in sorted(done.skipped.items()):
        print_message(f"not restored, as this user or file system does not support it: {count} {what}")
    where = ", ".join(done.targets)
    found = done.found.snapshot
    text = (
        f"{where}: has the environment {short(done.key)} already"
        if done.how == "there"
        else f"{where}: restored the environment {short(done.key)}: {counted(found.files, 'file')},"
        f" {format_bytes(found.bytes)} in {format_time(done.seconds)} ({done.found.because})"
    )
    record = _record_of(found) | {
        "how": done.how, "seconds": done.seconds, "restored_to": done.targets, "because": done.found.because,
        "skipped": done.skipped,
    }  # fmt: skip
    print_result(record, as_json, text)


@app.command("key", epilog=f"bootseer env key {SETUP} --json")
def key_(
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
    """Print the key of the environment that a start would use here and now; --json adds everything in the key."""
    import msgspec

    from bootseer.env.commands.common import key_of_start
    from bootseer.env.commands.spec import make_spec

    flags = to_flags(
        setup, setup_input, setup_target, setup_variable, env_store, env_key, env_max_age, python, config
    )
    keyed = key_of_start(make_spec(flags, os.environ, os.getcwd()), os.environ)
    record = {"key": keyed.key, "document": msgspec.to_builtins(keyed.document), **facts_of(keyed)}
    print_result(record, as_json, keyed.key)


for command, name, epilog in env_look.COMMANDS:
    app.command(name, epilog=epilog)(command)
app.add_typer(env_caches.app, name="caches", help="Compile caches in a store or on this node.")


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    return running.run(app, "bootseer env", argv, logs=True)


# ---- output --------------------------------------------------------------------------------------------------


def _show_line(line: str) -> None:
    sys.stderr.write(f"[setup] {line}\n")
    sys.stderr.flush()


def _ignore(_: str) -> None:
    pass


def _record_of(snapshot: Any) -> dict[str, Any]:
    import msgspec

    record: dict[str, Any] = msgspec.to_builtins(snapshot)
    return record
