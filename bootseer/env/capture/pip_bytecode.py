"""Compiling what pip installs on all cores: pip itself compiles file by file, which takes most of its time.

If set-up is pip alone and no setting decides how to compile, pip is run without compiling. Its files are then
compiled to the same places before a rank starts. In: the targets, the start time of set-up. A failure costs only
time: each rank compiles what it imports.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer.env.capture import bytecode
from bootseer.env.exec_place import ExecPlace
from bootseer.env.parse.installed import find_new_records
from bootseer.env.scratch import scratch
from bootseer.errors import BootseerError
from bootseer.storage.os_errors import map_os_errors

OFF = {"PIP_COMPILE": "0"}  # pip's --no-compile, by the opposite option, which all versions parse alike
MAX_SETTINGS_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
SETTINGS_S = 10.0
# If one of these is set, the user has decided what is compiled, how, or where to.
_DECIDED = {"PIP_COMPILE", "PIP_NO_COMPILE", "SOURCE_DATE_EPOCH", "PYTHONPYCACHEPREFIX", "PYTHONOPTIMIZE"}
_ASKS = re.compile(r"(?i:compile)|SOURCE_DATE_EPOCH|PYTHONPYCACHEPREFIX|PYTHONOPTIMIZE|\s-\w*O")
# Where pip looks up its settings; in an image, those of the image.
# https://pip.pypa.io/en/stable/topics/configuration/
_SETTINGS = r"""
for each in "${PIP_CONFIG_FILE:-/dev/null}" /etc/pip.conf "$HOME/.pip/pip.conf" "${VIRTUAL_ENV:-/-}/pip.conf" \
    "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" /etc/xdg/pip/pip.conf "${XDG_CONFIG_DIRS:-/-}/pip/pip.conf"
do
    while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; done <"$each"
done 2>/dev/null
exit 0
"""


def variables(
    commands: Iterable[str], environ: Mapping[str, str], inside: ExecPlace, *, only_installs: bool
) -> dict[str, str]:
    """Return variables that make pip leave compiling to `compile_installed`; none if pip must compile.

    Args: commands: of set-up. environ: their variables. only_installs: they are pip alone, into the targets.
    """
    if not only_installs or not _DECIDED.isdisjoint(environ) or any(map(_ASKS.search, commands)):
        return {}
    settings = _settings(environ, inside)
    return {} if settings is None or b"compile" in settings else dict(OFF)


def _settings(environ: Mapping[str, str], inside: ExecPlace) -> bytes | None:
    """Return the text of pip's settings; None if unknown."""
    try:
        said = bytecode.output_of(["/bin/sh", "-c", _SETTINGS], environ, inside, SETTINGS_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return said if len(said) <= MAX_SETTINGS_BYTES else None


def compile_installed(
    targets: Sequence[str], began_ns: int, python: str, workers: int, environ: Mapping[str, str], inside: ExecPlace
) -> str:
    """Compile what pip has installed since `began_ns`. Return why some of it could not be compiled; "" for
    success.

    Args: began_ns: by the clock of file timestamps. python: the interpreter of the ranks. environ: of the node.
    """
    try:
        with scratch(environ) as directory:
            for target in targets:
                jobs = [bytecode.CompileJob(os.fsencode(path), 0) for path in find_sources(target, began_ns)]
                if not jobs:
                    continue
                own = (
                    bytecode.python_of([target]) or inside.python
                    if inside.prefix
                    else bytecode.find_python(target, python)
                )
                interpreter = bytecode.probe(own, inside) if own else None
                if interpreter is None:
                    return f"{target}: no interpreter found that can compile it"
                bytecode.compile_all(
                    jobs,
                    interpreter,
                    directory,
                    workers=workers,
                    on_wait=lambda: None,
                    inside=inside,
                    in_place=True,
                )
    except (BootseerError, OSError) as error:
        return str(error)
    return ""


def find_sources(target: str, began_ns: int) -> list[str]:
    """Return modules that pip has installed since `began_ns`, by the records of their packages.

    Modules outside the target and in its directory of programs are left out.
    """
    above, programs = target.rstrip("/") + "/", os.path.join(target, "bin") + "/"
    found = {
        path
        for record in find_new_records([target], began_ns)
        for path in _recorded(record)
        if path.startswith(above) and not path.startswith(programs)
    }
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def _recorded(record: str) -> Iterator[str]:
    """Yield the absolute paths of a package's Python files.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    directory = os.path.dirname(os.path.dirname(record))
    with map_os_errors(record), open(record, "rb") as file:
        data = file.read(MAX_RECORD_BYTES)
    try:
        for row in csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
            if row and row[0].endswith(".py"):
                yield os.path.normpath(os.path.join(directory, row[0]))
    except csv.Error:
        return  # a truncated record, which pip would not have written
