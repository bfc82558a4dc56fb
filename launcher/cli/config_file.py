"""bootseer.toml for bootrun: the command line takes precedence, then BOOTSEER_* variables, then the file.

A flag that the file can set has a default that shows that it was not given: None, an empty list, False.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bootseer.job_file import NAME, RULES, TABLES, TUNING, read_job_file
from launcher.cli.flags import FLAGS

if TYPE_CHECKING:
    from launcher.cli.quick_parse import Arguments


def apply_config(args: Arguments, environ: Mapping[str, str]) -> str:
    """Set the flags that neither the command line nor a variable sets.

    Read the file of --config; else bootseer.toml beside the script, else that in the working directory.

    Returns: a line that names the file; "" if there is none. Raises: ConfigError.
    """
    settings, shown, passed_over = None, args.config or "", ""
    if shown:
        settings = read_job_file(shown, os.getcwd())
    else:
        for directory in find_directories(args):
            path = os.path.join(directory, NAME)
            if settings is not None:
                passed_over = f"; ignoring {path}" if os.path.exists(path) else ""
            elif (settings := read_job_file("", os.path.abspath(directory), path)) is not None:
                shown = path
    if settings is None:
        return ""
    fill(args, settings, environ)
    args.rules, args.rules_file = settings.get(RULES, []), shown
    return f"using settings of {shown}{passed_over}"


def find_directories(args: Arguments) -> list[str]:
    """Return where bootseer.toml may be, in order: beside the script, in the working directory ("")."""
    script = args.training_script
    beside = os.path.dirname(script) if script and not args.module else ""
    is_other = beside and os.path.isfile(script) and os.path.realpath(beside) != os.path.realpath(".")
    return [beside, ""] if is_other else [""]


def fill(args: Arguments, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """PURE: copy the settings of a file into a parsed command line that does not set them."""
    args.tuning = settings.get(TUNING, {})
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
