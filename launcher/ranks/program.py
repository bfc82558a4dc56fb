"""How the ranks of a node are run: the interpreter, Bootseer's files for it, and the prefix of the command.

Compiling bootstrap.py takes 3-5 ms in each rank, loading the compiled file 0.1 ms. Only for the launcher's own
interpreter; another one (PYTHON_EXEC, an image's) gets the source, as the format of its compiled files is unknown.
"""

from __future__ import annotations

import _frozen_importlib_external as external  # the half of importlib that is always loaded
import os
import sys

from bootseer.light_typing import Mapping, NamedTuple
from launcher.ranks.command import INSIDE

UNCHECKED = 1  # flags of a compiled file that is not compared with its source (reproducible builds)


FORK_SERVER = INSIDE.rpartition("/")[0] + "/fork_server.py"
# bootstrap.py and fork_server.py find these files beside themselves.
TRACER, IMPORT_WATCH, RANK_VALUES, STORE_GATE = (
    f"{INSIDE.rpartition('/')[0]}/{name}.py" for name in ("tracer", "import_watch", "rank_values", "store_gate")
)


class RankProgram(NamedTuple):
    """How ranks are run; the same for all ranks of a node."""

    python: str
    inside: str  # the rank bootstrap, as their interpreter finds it
    fork_server: str  # the program of the fork server
    prefix: tuple[str, ...] = ()  # arguments before each command that move it to where it runs
    environ: Mapping[str, str] = {}  # noqa: RUF012 # variables that the rank's own override
    unset: tuple[str, ...] = ()  # variables of bootrun that ranks do not see
    image: str = ""  # separates images whose interpreters have the same path; "" for this node itself

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return bootrun's environment as ranks inherit it."""
        return {**{name: value for name, value in environ.items() if name not in self.unset}, **self.environ}


def inside_of(program: RankProgram) -> dict[str, object]:
    """PURE: return what moves a command to where ranks run, for bootseer.env.exec_place."""
    return {
        "prefix": program.prefix,
        "set": dict(program.environ),
        "unset": program.unset,
        "python": program.python,
    }


def own_program(python: str) -> RankProgram:
    """Return the program for ranks that see this node as it is."""
    return RankProgram(python, inside_path(python), fork_server_path(python))


def inside_path(python: str) -> str:
    """Return the path of the rank bootstrap for this interpreter; compile it if it is not compiled yet."""
    return _program_path(python, INSIDE)


def fork_server_path(python: str) -> str:
    """Return the same for the program of the fork server, which the rank bootstrap loads."""
    return _program_path(python, FORK_SERVER)


def compile_beside(python: str) -> None:
    """Compile the files that the fork server finds beside its program, if they are not compiled yet."""
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
                return path  # the directory is not writable
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
