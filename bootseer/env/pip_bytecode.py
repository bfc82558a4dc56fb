"""Bytecode of what pip installs, by all cores: pip itself compiles file by file, most of its time.

Where set-up is pip alone and nobody has said how it is to compile, pip is told not to, and what it has installed
is compiled after it, to the same places, before a rank starts. In: the targets, when set-up began. What goes wrong
costs nothing but time: a rank compiles what it imports.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer.env import bytecode
from bootseer.env.image_target import python_of
from bootseer.env.inside import Inside
from bootseer.env.installed import new_records
from bootseer.env.scratch import scratch
from bootseer.errors import BootseerError
from bootseer.storage.os_errors import map_os_errors

OFF = {"PIP_COMPILE": "0"}  # pip's --no-compile, by the name of its opposite, which all versions read alike
MAX_SETTINGS_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
SETTINGS_S = 10.0
# Whoever sets one of these has decided what is compiled, how, or where to.
_DECIDED = {"PIP_COMPILE", "PIP_NO_COMPILE", "SOURCE_DATE_EPOCH", "PYTHONPYCACHEPREFIX", "PYTHONOPTIMIZE"}
_ASKS = re.compile(r"(?i:compile)|SOURCE_DATE_EPOCH|PYTHONPYCACHEPREFIX|PYTHONOPTIMIZE|\s-\w*O")
# Where pip looks for its settings, in an image those of the image. https://pip.pypa.io/en/stable/topics/configuration/
_SETTINGS = r"""
for each in "${PIP_CONFIG_FILE:-/dev/null}" /etc/pip.conf "$HOME/.pip/pip.conf" "${VIRTUAL_ENV:-/-}/pip.conf" \
    "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" /etc/xdg/pip/pip.conf "${XDG_CONFIG_DIRS:-/-}/pip/pip.conf"
do
    while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; done <"$each"
done 2>/dev/null
exit 0
"""


def variables(
    commands: Iterable[str], environ: Mapping[str, str], inside: Inside, *, only_installs: bool
) -> dict[str, str]:
    """Variables of set-up commands by which pip leaves compiling to `compile_installed`; none where it must not.

    Args: commands: of set-up. environ: of theirs. only_installs: they are pip alone, into the targets.
    """
    if not only_installs or not _DECIDED.isdisjoint(environ) or any(map(_ASKS.search, commands)):
        return {}
    settings = _settings(environ, inside)
    return {} if settings is None or b"compile" in settings else dict(OFF)


def _settings(environ: Mapping[str, str], inside: Inside) -> bytes | None:
    """What pip's settings say; None where that cannot be known."""
    try:
        said = bytecode.output_of(["/bin/sh", "-c", _SETTINGS], environ, inside, SETTINGS_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return said if len(said) <= MAX_SETTINGS_BYTES else None


def compile_installed(
    targets: Sequence[str], began_ns: int, python: str, workers: int, environ: Mapping[str, str], inside: Inside
) -> str:
    """Compiles what pip has installed since then. Returns: why not all of it could be; "" if it could.

    Args: began_ns: by the clock of files. python: the interpreter of the ranks. environ: of the node.
    """
    try:
        with scratch(environ) as folder:
            for target in targets:
                jobs = [bytecode.Job(os.fsencode(path), 0) for path in find_sources(target, began_ns)]
                if not jobs:
                    continue
                own = (
                    python_of([target]) or inside.python if inside.prefix else bytecode.find_python(target, python)
                )
                interpreter = bytecode.probe(own, inside) if own else None
                if interpreter is None:
                    return f"{target}: no interpreter could compile it"
                bytecode.compile_all(
                    jobs, interpreter, folder, workers=workers, on_wait=lambda: None, inside=inside, in_place=True
                )
    except (BootseerError, OSError) as error:
        return str(error)
    return ""


def find_sources(target: str, began_ns: int) -> list[str]:
    """Modules of packages that pip has installed since then, as their records name them.

    Not what lies outside the target, or in its folder of programs.
    """
    above, programs = target.rstrip("/") + "/", os.path.join(target, "bin") + "/"
    found = {
        path
        for record in new_records([target], began_ns)
        for path in _recorded(record)
        if path.startswith(above) and not path.startswith(programs)
    }
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def _recorded(record: str) -> Iterator[str]:
    """Python files of a package, absolute.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    folder = os.path.dirname(os.path.dirname(record))
    with map_os_errors(record), open(record, "rb") as file:
        data = file.read(MAX_RECORD_BYTES)
    try:
        for row in csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
            if row and row[0].endswith(".py"):
                yield os.path.normpath(os.path.join(folder, row[0]))
    except csv.Error:
        return  # a record that is cut: pip would not have written it
