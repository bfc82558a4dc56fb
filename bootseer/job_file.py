"""bootseer.toml, the settings file of a job: its tables and keys, and its parser.

    [image]       url, name, writable, binds, python, variables
    [setup]       commands, inputs, targets, variables, timeout_s, wait_s, max_age_s, key, ways
    [env]         store
    [caches]      keep, dirs (a table: name = "directory")
    [checkpoint]  url, memory, disk, fallback, require, files, keep, save_memory
    [peers]       use, upload
    [ranks]       fork, preload, preload_timeout_s
    [start]       strict
    [check]       use, pairs, own, paths, nics, expect_gpus, every_s, timeout_s, limits (a table: name = number)
    [rules]       use; and [[rule]], any number of them: log rules (docs/guide/rules.md)
    [tuning.*]    limits of a package, listed in bootseer/tuning_limits.py
    [job]         folder, command, python: for `bootseer warm --jobs`, which has no command line for them

Each key except those of [job], [[rule]] and [tuning.*] stands for one flag of bootrun; TABLES has all of these.
Paths are relative to the working directory, as in flags.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from bootseer.errors import ConfigError

NAME = "bootseer.toml"
# Keys of [job], which are no flags: the working directory, the arguments of `bootrun`, and PYTHON_EXEC.
JOB_DIRECTORY, JOB_COMMAND, JOB_PYTHON = "job folder", "job command", "job python"
RULES = "rules"  # the [[rule]]s, unchecked: launcher/rules/rule.py checks them
TUNING = "tuning"  # the limits of [tuning.*], checked, by PACKAGE.NAME
MAX_BYTES = 1 << 20


class Kind(Enum):
    """The type of a key's value."""

    TEXT = "a text"
    TEXTS = "a list of texts"
    SECONDS = "a number of seconds"
    NUMBER = "a whole number"
    SWITCH = "true or false"
    FOLDERS = 'a table of directories: name = "directory"'
    NUMBERS = "a table of numbers: name = number"


class Setting(NamedTuple):
    """A key of a table."""

    flag: str
    kind: Kind
    off: str = ""  # of a switch: the flag that stands for false and wins over the file
    choices: tuple[str, ...] = ()  # of a text: the allowed values


TABLES: Mapping[str, Mapping[str, Setting]] = {
    "image": {
        "url": Setting("--image", Kind.TEXT),
        "name": Setting("--image-name", Kind.TEXT),
        "writable": Setting("--image-writable", Kind.TEXT),
        "binds": Setting("--image-bind", Kind.TEXTS),
        "python": Setting("--image-python", Kind.TEXT),
        "variables": Setting("--image-env", Kind.TEXTS),
    },
    "setup": {
        "commands": Setting("--setup", Kind.TEXTS),
        "inputs": Setting("--setup-input", Kind.TEXTS),
        "targets": Setting("--setup-target", Kind.TEXTS),
        "variables": Setting("--setup-variable", Kind.TEXTS),
        "timeout_s": Setting("--setup-timeout", Kind.SECONDS),
        "wait_s": Setting("--setup-wait", Kind.SECONDS),
        "max_age_s": Setting("--env-max-age", Kind.SECONDS),
        "key": Setting("--env-key", Kind.TEXT),
        "ways": Setting("--env-way", Kind.TEXTS),
    },
    "env": {"store": Setting("--env-store", Kind.TEXT)},
    "caches": {
        "keep": Setting("--keep-caches", Kind.SWITCH, off="--no-keep-caches"),
        "dirs": Setting("--cache-dir", Kind.FOLDERS),
    },
    "checkpoint": {
        "url": Setting("--load-checkpoint", Kind.TEXT),
        "memory": Setting("--checkpoint-memory", Kind.TEXT),
        "disk": Setting("--checkpoint-disk", Kind.TEXT),
        "fallback": Setting("--checkpoint-fallback", Kind.TEXT, choices=("none", "older")),
        "require": Setting("--require-checkpoint", Kind.SWITCH),
        "files": Setting("--checkpoint-files", Kind.TEXT, choices=("on", "off")),
        "keep": Setting("--keep-arena", Kind.SWITCH),
        "save_memory": Setting("--arena-bytes", Kind.TEXT),
    },
    "peers": {
        "use": Setting("--peers", Kind.TEXT, choices=("on", "off")),
        "upload": Setting("--peers-upload", Kind.TEXT),
    },
    "ranks": {
        "fork": Setting("--fork-ranks", Kind.TEXT, choices=("auto", "restarts", "on", "off")),
        "preload": Setting("--preload", Kind.TEXTS),
        "preload_timeout_s": Setting("--preload-timeout", Kind.SECONDS),
    },
    "hang": {
        "action": Setting("--on-hang", Kind.TEXT, choices=("report", "restart", "off")),
        "least_s": Setting("--hang-least", Kind.SECONDS),
        "trace_collectives": Setting("--trace-collectives", Kind.SWITCH),
    },
    "restart": {
        "same_error": Setting("--same-error", Kind.TEXT, choices=("give-up", "restart")),
        "exclude": Setting("--exclude-nodes", Kind.TEXT, choices=("auto", "off")),
        "no_progress": Setting("--no-progress", Kind.TEXT, choices=("give-up", "restart")),
        "give_up_status": Setting("--give-up-status", Kind.NUMBER),
        "refill_s": Setting("--restart-refill", Kind.SECONDS),
        "post_mortem": Setting("--post-mortem", Kind.TEXT),
        "post_mortem_timeout_s": Setting("--post-mortem-timeout", Kind.SECONDS),
        "checks": Setting("--stop-checks", Kind.TEXT, choices=("off", "auto", "always")),
        "checks_timeout_s": Setting("--stop-checks-timeout", Kind.SECONDS),
        "rollback_command": Setting("--rollback-command", Kind.TEXT),
        "rollback_timeout_s": Setting("--rollback-timeout", Kind.SECONDS),
        "replay_command": Setting("--replay-command", Kind.TEXT),
        "replay_timeout_s": Setting("--replay-timeout", Kind.SECONDS),
    },
    "rules": {"use": Setting("--log-rules", Kind.TEXT, choices=("all", "own", "off"))},
    "check": {
        "use": Setting("--check", Kind.TEXT, choices=("off", "report", "fail")),
        "pairs": Setting("--check-pairs", Kind.TEXT, choices=("auto", "always", "off")),
        "own": Setting("--check-own", Kind.TEXTS),
        "paths": Setting("--check-path", Kind.TEXTS),
        "nics": Setting("--check-nic", Kind.TEXTS),
        "expect_gpus": Setting("--check-expect-gpus", Kind.NUMBER),
        "every_s": Setting("--check-every", Kind.SECONDS),
        "timeout_s": Setting("--check-timeout", Kind.SECONDS),
        "limits": Setting("--check-limit", Kind.NUMBERS),
    },
    "start": {"strict": Setting("--strict", Kind.SWITCH)},
    "job": {
        "folder": Setting(JOB_DIRECTORY, Kind.TEXT),
        "command": Setting(JOB_COMMAND, Kind.TEXTS),
        "python": Setting(JOB_PYTHON, Kind.TEXT),
    },
}


def read_job_file(path: str, directory: str, shown: str = NAME) -> dict[str, Any] | None:
    """Return values by flag; None if there is no file and none was named.

    Args: path: of the file, from `directory`; "" for its ./bootseer.toml, which is used only if no other user
    could have written it; shown: the name of that file in messages.
    Raises: ConfigError for an unreadable or invalid file, an unknown name or a wrong type of value.
    """
    if path:
        return parse(_read_named(os.path.join(directory, path), path), path)
    from bootseer.trust.implicit_config import read_implicit_config

    data = read_implicit_config(os.path.join(directory, NAME), shown, max_bytes=MAX_BYTES)
    return None if data is None else parse(data, shown)


def _read_named(path: str, shown: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"--config {shown}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None


def parse(data: bytes, shown: str) -> dict[str, Any]:
    """PURE: return values by flag. Raises: as `read_job_file`."""
    import tomllib

    if len(data) > MAX_BYTES:
        raise ConfigError(f"{shown}: larger than {MAX_BYTES} bytes: is it the right file?")
    try:
        text = data.decode()
        tables = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{shown}: is not valid TOML: {error}") from None
    found: dict[str, Any] = {}
    for table, keys in tables.items():
        if table == "rule":
            if not isinstance(keys, list) or not all(isinstance(each, dict) for each in keys):
                raise ConfigError(f"{_at(shown, text, table)}: each rule is a table: write [[rule]]")
            found[RULES] = keys
            continue
        if table == TUNING:
            found[TUNING] = _read_tuning(keys, text, shown)
            continue
        known = TABLES.get(table)
        if known is None:
            tables_known = f"{_names(TABLES)}, {TUNING}"
            raise ConfigError(f"{_at(shown, text, table)}: unknown table [{table}]; there are {tables_known}")
        if not isinstance(keys, dict):
            raise ConfigError(f"{_at(shown, text, table)}: {table} is a table: write [{table}]")
        for key, value in keys.items():
            where = _at(shown, text, table, key)
            setting = known.get(key)
            if setting is None:
                raise ConfigError(f"{where}: unknown key {key!r} in [{table}]; there are {_names(known)}")
            found[setting.flag] = _check(setting, value, f"{where}: [{table}] {key}")
    return found


def _read_tuning(packages: Any, text: str, shown: str) -> dict[str, float | int]:
    """Return the limits of [tuning.PACKAGE], by PACKAGE.NAME. Raises: ConfigError."""
    from bootseer.tuning_limits import LIMITS, check_value

    if not isinstance(packages, dict):
        raise ConfigError(f"{_at(shown, text, TUNING)}: tuning is a table: write [tuning.PACKAGE]")
    found: dict[str, float | int] = {}
    for package, values in packages.items():
        known = LIMITS.get(package)
        where = _at(shown, text, TUNING, package)
        if known is None:
            raise ConfigError(f"{where}: unknown table [tuning.{package}]; there are {_names(LIMITS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: tuning.{package} is a table: write [tuning.{package}]")
        for name, value in values.items():
            where = _at(shown, text, TUNING, package, name)
            if name not in known:
                raise ConfigError(
                    f"{where}: unknown key {name!r} in [tuning.{package}]; there are {_names(known)}"
                )
            try:
                found[f"{package}.{name}"] = check_value(package, name, value)
            except ValueError as error:
                raise ConfigError(f"{where}: [tuning.{package}] {name} = {error}") from None
    return found


def _check(setting: Setting, value: Any, where: str) -> Any:
    kind = setting.kind
    if kind is Kind.TEXT and isinstance(value, str):
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"{where}: {value!r}: the values are {', '.join(setting.choices)}")
        return value
    if kind is Kind.TEXTS and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    is_number = _is_number(value)
    if kind is Kind.SECONDS and is_number and math.isfinite(value):
        return float(value)
    if kind is Kind.NUMBER and is_number and isinstance(value, int):
        return value
    if kind is Kind.SWITCH and isinstance(value, bool):
        return value
    if kind is Kind.FOLDERS and isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        return [f"{name}={directory}" for name, directory in value.items()]
    if kind is Kind.NUMBERS and isinstance(value, dict) and all(_is_number(each) for each in value.values()):
        return [f"{name}={number!r}" for name, number in value.items()]
    raise ConfigError(f"{where}: has to be {kind.value}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(shown: str, text: str, *path: str) -> str:
    """Return FILE:LINE of a table, or of a key in it; FILE if this simple search does not find it."""
    within: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            found = within = _words(header[1])
        elif name := re.match(r"\s*([^=#]+?)\s*=", line):
            found = within + _words(name[1])
        else:
            continue
        if found[: len(path)] == list(path):
            return f"{shown}:{number}"
    return shown


def _words(path: str) -> list[str]:
    return [word.strip(" \t\"'") for word in path.split(".")]


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(known)
