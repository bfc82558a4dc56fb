"""By what the ranks of a node are run: the interpreter, our files for it, what goes before the command.

Compiling inside.py takes 3-5 ms in each rank, loading the compiled file 0.1 ms. Only for the launcher's own
interpreter; another one (PYTHON_EXEC, an image's) gets the source, as its format of compiled files is not known.
"""

from __future__ import annotations

import _frozen_importlib_external as external  # importlib's own half that is loaded anyway
import os
import sys
from collections.abc import Mapping

from bootseer.light_typing import NamedTuple
from launcher.ranks.command import INSIDE

UNCHECKED = 1  # flags of a compiled file that is not compared with its source (reproducible builds)


PRELOADED = INSIDE.rpartition("/")[0] + "/preloaded.py"
# Found by the two, beside themselves.
TRACER, IMPORT_WATCH, RANK_VALUES, STORE_GATE = (
    f"{INSIDE.rpartition('/')[0]}/{name}.py" for name in ("tracer", "import_watch", "rank_values", "store_gate")
)


class RankProgram(NamedTuple):
    """What ranks are run by; the same for all ranks of a node."""

    python: str
    inside: str  # the rank-side file, as their interpreter finds it
    preloaded: str  # the program of the preloaded process
    prefix: tuple[str, ...] = ()  # words before each command: they bring it to where it runs
    environ: Mapping[str, str] = {}  # variables below the rank's own
    unset: tuple[str, ...] = ()  # variables of bootrun's that are not seen
    image: str = ""  # what tells it from another one with an interpreter of the same path; "" for this node itself

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What is left of bootrun's environment for ranks."""
        return {**{name: value for name, value in environ.items() if name not in self.unset}, **self.environ}


def inside_of(program: RankProgram) -> dict[str, object]:
    """PURE: what brings a command to where ranks run, for bootseer.env.inside."""
    return {
        "prefix": program.prefix,
        "set": dict(program.environ),
        "unset": program.unset,
        "python": program.python,
    }


def own_program(python: str) -> RankProgram:
    """For ranks that see this node as it is."""
    return RankProgram(python, inside_path(python), preloaded_path(python))


def inside_path(python: str) -> str:
    """The path of the rank-side file for this interpreter; compiles it when that was not done before."""
    return _program_path(python, INSIDE)


def preloaded_path(python: str) -> str:
    """The same for the program of the preloaded process, which the rank-side file loads."""
    return _program_path(python, PRELOADED)


def compile_beside(python: str) -> None:
    """Compiles what the preloaded process finds beside its program, when that was not done before."""
    for path in (IMPORT_WATCH, RANK_VALUES, STORE_GATE):
        _program_path(python, path)


def _program_path(python: str, path: str) -> str:
    if python != sys.executable:
        return path
    try:
        compiled = external.cache_from_source(path)
        if not _is_fresh(compiled, path):
            external.SourceFileLoader("program", path).get_code("program")
            if not _is_fresh(compiled, path):
                return path  # the folder cannot be written
    except (OSError, ImportError, NotImplementedError):
        return path
    return compiled


def _is_fresh(compiled: str, path: str) -> bool:
    try:
        with open(compiled, "rb", 0) as file:
            header = file.read(16)
    except FileNotFoundError:
        return False
    magic, flags = header[:4], int.from_bytes(header[4:8], "little")
    if magic != external.MAGIC_NUMBER or flags & ~UNCHECKED or len(header) < 16:
        return False
    source = os.stat(path)
    stamp = int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF
    return bool(flags) or stamp == (int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:], "little"))
