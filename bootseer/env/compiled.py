"""Whether set-up may compile something, and what that would depend on: facts of the machine that then decide, too.

What is compiled on a node runs on nodes like it: a CPU with fewer instructions ends it by SIGILL, another driver
or system library does not load it. Wheels come compiled, the same everywhere, so no fact of a machine may make
another key of them. Requirements that name a package of an index count as wheels, unless something says that they
are built.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from bootseer.env.caches_key import instructions, read_accelerators, read_compilers
from bootseer.env.document import plain

_MOST_BYTES = 1 << 20
_SOURCES = re.compile(r"\.(?:zip|tar|tgz|tbz|txz|tlz|tar\.(?:gz|bz2|xz|lz|lzma|Z))$")
_REPOSITORY = re.compile(r"(?:^|[\s@])(?:git|hg|svn|bzr)\+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://\S+")
_OPTION = re.compile(r"(?<![\w-])--no-(?:binary|build-isolation)(?:-package)?(?![\w-])")
_VARIABLES = (
    *("PIP_NO_BINARY", "UV_NO_BINARY", "UV_NO_BINARY_PACKAGE", "PIP_NO_BUILD_ISOLATION", "UV_NO_BUILD_ISOLATION"),
)
_FETCHERS = {f"what {program} fetches" for program in ("cargo", "go", "gem", "npm")}
# They compile nothing, unless a project adds code of its own to its build.
_PURE_BACKENDS = {
    *(
        "hatchling.build",
        "flit_core.buildapi",
        "flit.buildapi",
        "poetry.core.masonry.api",
        "pdm.backend",
        "uv_build",
    ),
}


def asks_to_compile(text: str) -> bool:
    """PURE: whether a command or a requirement file says that something is built here."""
    return _OPTION.search(text) is not None


def has_to_be_built(wanted: str) -> bool:
    """PURE: of a requirement as it is written: from a repository, or an archive of sources, at a URL."""
    if wanted in _FETCHERS or _REPOSITORY.search(wanted):
        return True
    found = _URL.search(wanted)
    return found is not None and is_of_sources(urlsplit(found[0]).path)


def is_of_sources(path: str) -> bool:
    """PURE: whether an archive has sources, by its name."""
    return _SOURCES.search(path) is not None


def variables_ask(environ: Mapping[str, str]) -> bool:
    """PURE: the same as `asks_to_compile`, of installers' variables."""
    return any(environ.get(name) for name in _VARIABLES)


def may_compile(project: str) -> bool:
    """Whether the build of a folder may compile something. What cannot be read may."""
    import tomllib

    if any(os.path.lexists(os.path.join(project, name)) for name in ("setup.py", "build.py", "hatch_build.py")):
        return True
    try:
        with open(os.path.join(project, "pyproject.toml"), "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        table = tomllib.loads(text.decode()) if len(text) <= _MOST_BYTES else {}
        build, tool = table["build-system"], table.get("tool", {})
        is_plain = build["build-backend"] in _PURE_BACKENDS and "backend-path" not in build
        hooks = (("hatch", "build", "hooks"), ("poetry", "build"), ("pdm", "build", "run-setuptools"))
        return not is_plain or len(build.get("requires", [])) > 1 or any(_has(tool, names) for names in hooks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def machine_facts(environ: Mapping[str, str], *, in_image: bool = False) -> dict[str, str]:
    """What compiled code depends on, for the base of a key. `in_image`: compilers, libraries are those there."""
    driver, accelerators = read_accelerators()
    flags = instructions(_read("/proc/cpuinfo"))
    found = {
        # The sum first: of what differs, people see the beginning.
        "cpu": f"{hashlib.sha256(' '.join(flags).encode()).hexdigest()} {' '.join(flags)}",
        "driver": driver,
        "accelerators": ", ".join(accelerators),
    }
    if not in_image:
        found |= read_compilers(environ)
        release = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)', _read("/etc/os-release"), re.MULTILINE))
        found["os"] = " ".join(release[name] for name in ("ID", "VERSION_ID") if name in release)
    return {plain(f"machine:{name}"): plain(value) for name, value in found.items() if value}


def _has(table: object, names: tuple[str, ...]) -> bool:
    for name in names:
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return bool(table)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""
