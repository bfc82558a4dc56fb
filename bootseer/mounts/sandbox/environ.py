"""PURE: the variables of processes inside an image.

From the lowest layer: the image's own; the caller's, except those that locate the node's Python, packages and
shared libraries; those for the accelerators; the user's. The launcher's variables for its ranks come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Read by the loader before a program's first instruction. The node's own programs before the image is entered, its
# interpreter among them, need the node's values; bootseer/mounts/sandbox/enter.py exchanges them.
LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT")
# They name files of the node.
_OF_THE_NODE = frozenset(
    {
        *("PATH", "MANPATH", "PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "PYTHONUSERBASE"),
        *("PYTHON_EXEC", "__PYVENV_LAUNCHER__"),
    }
)
_OF_THE_NODE_STARTS = ("VIRTUAL_ENV", "CONDA_", "_CONDA_", "MAMBA_", "PYENV_", "_CE_")
NO_USER_SITE = "PYTHONNOUSERSITE"
MAX_VARIABLES = 10_000


class EnvironChanges(NamedTuple):
    """Changes to the caller's environment."""

    set: dict[str, str]  # without LOADER
    unset: tuple[str, ...]  # the caller's that are removed, without LOADER
    loader: dict[str, str]  # those of LOADER that are set inside


def is_of_the_node(name: str) -> bool:
    """Return whether a variable of the caller locates its Python, packages or libraries."""
    return name in LOADER or name in _OF_THE_NODE or name.startswith(_OF_THE_NODE_STARTS)


def parse_variable(text: str, flag: str = "--image-env") -> tuple[str, str]:
    """Parse NAME=VALUE. Raises: UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name or "\0" in text:
        raise UsageError(f"{flag} {text!r}: give NAME=VALUE, as in {flag} NCCL_DEBUG=INFO")
    return name, value


def image_environ(
    image: Sequence[str],
    caller: Mapping[str, str],
    devices: Mapping[str, str],
    library_directories: Iterable[str],
    given: Mapping[str, str],
) -> EnvironChanges:
    """Args: image: NAME=value of its config; devices, library_folders: for the accelerators (cdi.py)."""
    own: dict[str, str] = {}
    for each in image[:MAX_VARIABLES]:
        name, equals, value = each.partition("=")
        if equals and name and "\0" not in each:
            own[name] = value
    wanted = {name: value for name, value in own.items() if name not in caller or is_of_the_node(name)}
    wanted.setdefault("PATH", DEFAULT_PATH)
    if NO_USER_SITE not in caller:
        # HOME is the caller's: packages that lie there were installed for another Python.
        wanted.setdefault(NO_USER_SITE, "1")
    wanted.update(devices)
    directories = [each for each in wanted.get(LOADER[0], "").split(":") if each]
    directories += [directory for directory in library_directories if directory not in directories]
    if directories:
        wanted[LOADER[0]] = ":".join(directories)
    wanted.update(given)
    return EnvironChanges(
        {name: value for name, value in wanted.items() if name not in LOADER},
        tuple(name for name in caller if is_of_the_node(name) and name not in wanted and name not in LOADER),
        {name: value for name, value in wanted.items() if name in LOADER},
    )
