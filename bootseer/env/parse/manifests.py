"""PURE: parsers of files that name packages, except requirement files: conda lists, environments, pyproject.toml.

The result is a `Requirements`, as of a requirement file. environment.yml is parsed as a list with one entry a
line, the form that tools write; anything else counts as not pinned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.env.parse.requirements import (
    MAX_LINES,
    Collector,
    RequestedPackage,
    Requirements,
    add_line,
    joined_lines,
)

_COMMENT = re.compile(r"(^|\s+)#.*$")
_DASH = re.compile(r"(\s*)-\s+(.*)")


def parse_conda_list(text: str) -> Requirements:
    """Parse a file for `conda install --file`: one package a line, or after `@EXPLICIT` one URL."""
    into = Collector()
    lines = list(joined_lines(text))
    is_explicit = "@EXPLICIT" in lines
    for line in lines:
        if line == "@EXPLICIT":
            continue
        into.add_conda(line)
    named = into.named()
    if is_explicit:  # the content of a named file never changes there
        named = named._replace(wanted=tuple(each._replace(is_pinned=True) for each in named.wanted))
    return named


def parse_conda_environment(text: str, environ: Mapping[str, str] | None = None) -> Requirements:
    """Parse the dependencies of an environment.yml, if they are a list with one entry a line."""
    into = Collector()
    is_inside, pip_indent, found_any = False, -1, False
    for line in (_COMMENT.sub("", each).rstrip() for each in text.splitlines()[:MAX_LINES]):
        if not line.strip():
            continue
        entry = _DASH.fullmatch(line)
        if entry is None:
            if not line[0].isspace():
                is_inside, pip_indent = line.startswith("dependencies:"), -1
                if is_inside and line != "dependencies:":
                    break
            continue
        if not is_inside:
            continue
        found_any = True
        indent, text_of = len(entry[1]), entry[2].strip().strip("\"'")
        if pip_indent >= 0 and indent > pip_indent:
            add_line(into, text_of, environ or {})
        elif text_of == "pip:":
            pip_indent = indent
        else:
            pip_indent = -1
            into.add_conda(text_of)
    if not found_any:
        into.notes.append("its dependencies cannot be parsed, so it counts as not pinned")
        into.wanted.append(RequestedPackage("", "dependencies", False))
    return into.named()


def parse_pyproject(
    text: str,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    markers: Mapping[str, str] | None = None,
    has_dependencies: bool = True,
) -> Requirements:
    """Parse the requirements of a project's pyproject.toml; groups also without the project's dependencies."""
    import tomllib

    into = Collector(markers)
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        into.notes.append("is not valid TOML")
        return into.named()
    project = _table(content, "project")
    optional = _table(project, "optional-dependencies")
    lists = [project.get("dependencies"), *(optional.get(extra) for extra in extras)] if has_dependencies else []
    dynamic = project.get("dynamic")
    if has_dependencies and isinstance(dynamic, list) and "dependencies" in dynamic:
        into.wanted.append(RequestedPackage("", "dependencies that the project computes", False))
    lists += [_table(content, "dependency-groups").get(group) for group in groups]
    for each in lists:
        for requirement in each if isinstance(each, list) else []:
            if isinstance(requirement, str):
                into.add_requirement(requirement)
    return into.named()


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}
