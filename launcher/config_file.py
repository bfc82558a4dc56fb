"""bootseer.toml for bootrun: the command line wins, then BOOTSEER_* variables, then the file.

A flag that can stand in the file has a default by which it is seen that it was not given: None, an empty list,
False.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from bootseer.job_file import NAME, RULES, TABLES, read_job_file
from launcher.flags import FLAGS


def apply_config(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Fills in what neither the command line nor a variable says.

    The file of --config; else bootseer.toml beside the script, else that of the working folder.

    Returns: a line that says which file was read; "" if there is none. Raises: ConfigError.
    """
    settings, shown, passed_over = None, args.config or "", ""
    if shown:
        settings = read_job_file(shown, os.getcwd())
    else:
        for folder in find_folders(args):
            path = os.path.join(folder, NAME)
            if settings is not None:
                passed_over = f"; {path} is not read" if os.path.exists(path) else ""
            elif (settings := read_job_file("", os.path.abspath(folder), path)) is not None:
                shown = path
    if settings is None:
        return ""
    fill(args, settings, environ)
    args.rules, args.rules_file = settings.get(RULES, []), shown
    return f"settings of {shown}{passed_over}"


def find_folders(args: argparse.Namespace) -> list[str]:
    """Where bootseer.toml may lie, the first one first: beside the script, in the working folder ("")."""
    script = args.training_script
    beside = os.path.dirname(script) if script and not args.module else ""
    is_other = beside and os.path.isfile(script) and os.path.realpath(beside) != os.path.realpath(".")
    return [beside, ""] if is_other else [""]


def fill(args: argparse.Namespace, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """PURE: puts the settings of a file into a parsed command line where that says nothing."""
    flags = {flag.names[0]: flag for flag in FLAGS}
    switches = {setting.flag: setting.off for keys in TABLES.values() for setting in keys.values() if setting.off}
    for name, value in settings.items():
        if name not in flags:
            continue  # [job]
        flag = flags[name]
        given = getattr(args, flag.dest)
        is_given = not (given is None or given is False or given == []) or flag.env in environ  # 0 is given
        off = switches.get(name)
        if is_given or (off and getattr(args, flags[off].dest)):
            continue
        setattr(args, flag.dest, value)
