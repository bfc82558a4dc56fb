"""Detects whether set-up may compile code, and collects the facts of the machine on which such code depends.

Code that is compiled on a node runs only on similar nodes: a CPU with fewer instructions ends it by SIGILL, and
another driver or system library does not load it. Wheels are compiled already, so the machine must not change
their key. Requirements that name a package of an index count as wheels, unless an option requests a build.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from bootseer.env.compile_cache.key import instructions, read_accelerators, read_compilers
from bootseer.env.key.document import to_utf8_text
from bootseer.env.parse.requirements import RequestedPackage

_MAX_BYTES = 1 << 20
_SOURCES = re.compile(r"\.(?:zip|tar|tgz|tbz|txz|tlz|tar\.(?:gz|bz2|xz|lz|lzma|Z))$")
_REPOSITORY = re.compile(r"(?:^|[\s@])(?:git|hg|svn|bzr)\+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://\S+")
_OPTION = re.compile(r"(?<![\w-])--no-(?:binary|build-isolation)(?:-package)?(?![\w-])")
_VARIABLES = (
    *("PIP_NO_BINARY", "UV_NO_BINARY", "UV_NO_BINARY_PACKAGE", "PIP_NO_BUILD_ISOLATION", "UV_NO_BUILD_ISOLATION"),
)
_BUILDERS = {"cargo", "go", "gem", "npm"}  # of the programs that download
# Build backends that compile nothing, unless a project adds code to its build.
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


def requests_build(text: str) -> bool:
    """PURE: return whether a command or a requirement file requests a build on this node."""
    return _OPTION.search(text) is not None


def needs_build(wanted: RequestedPackage) -> bool:
    """PURE: return whether a requirement is a repository, an archive of sources, or of a program that builds."""
    if wanted.fetcher in _BUILDERS or _REPOSITORY.search(wanted.text):
        return True
    found = _URL.search(wanted.text)
    return found is not None and is_of_sources(urlsplit(found[0]).path)


def is_of_sources(path: str) -> bool:
    """PURE: return whether an archive contains sources, by its name."""
    return _SOURCES.search(path) is not None


def variables_request_build(environ: Mapping[str, str]) -> bool:
    """PURE: return whether variables of installers request a build, as `requests_build`."""
    return any(environ.get(name) for name in _VARIABLES)


def may_compile(project: str) -> bool:
    """Return whether the build of a directory may compile code; True if it cannot be read."""
    import tomllib

    if any(os.path.lexists(os.path.join(project, name)) for name in ("setup.py", "build.py", "hatch_build.py")):
        return True
    try:
        with open(os.path.join(project, "pyproject.toml"), "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        table = tomllib.loads(text.decode()) if len(text) <= _MAX_BYTES else {}
        build, tool = table["build-system"], table.get("tool", {})
        is_plain = build["build-backend"] in _PURE_BACKENDS and "backend-path" not in build
        hooks = (("hatch", "build", "hooks"), ("poetry", "build"), ("pdm", "build", "run-setuptools"))
        return not is_plain or len(build.get("requires", [])) > 1 or any(_has(tool, names) for names in hooks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def machine_facts(environ: Mapping[str, str], *, in_image: bool = False) -> dict[str, str]:
    """Return the facts for a key on which compiled code depends. `in_image`: without compilers and libraries."""
    driver, accelerators = read_accelerators()
    flags = instructions(_read("/proc/cpuinfo"))
    found = {
        # The digest first: reports of a difference show only the beginning.
        "cpu": f"{hashlib.sha256(' '.join(flags).encode()).hexdigest()} {' '.join(flags)}",
        "driver": driver,
        "accelerators": ", ".join(accelerators),
    }
    if not in_image:
        found |= read_compilers(environ)
        release = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)', _read("/etc/os-release"), re.MULTILINE))
        found["os"] = " ".join(release[name] for name in ("ID", "VERSION_ID") if name in release)
    return {to_utf8_text(f"machine:{name}"): to_utf8_text(value) for name, value in found.items() if value}


def _has(table: object, names: tuple[str, ...]) -> bool:
    for name in names:
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return bool(table)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return ""
