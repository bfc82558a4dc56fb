"""PURE: packages that other files than requirement files name: conda's lists and environments, pyproject.toml.

The same `Named` comes out as of a requirement file. environment.yml is read as far as it is a list with one entry
a line, which is how tools write it; anything else counts as not pinned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.env.requirements import MOST_LINES, Collector, Named, Wanted, add_line, joined_lines

_COMMENT = re.compile(r"(^|\s+)#.*$")
_DASH = re.compile(r"(\s*)-\s+(.*)")


def parse_conda_list(text: str) -> Named:
    """What `conda install --file` reads: one package a line, or after `@EXPLICIT` one URL."""
    into = Collector()
    lines = list(joined_lines(text))
    is_explicit = "@EXPLICIT" in lines
    for line in lines:
        if line == "@EXPLICIT":
            continue
        into.add_conda(line)
    named = into.named()
    if is_explicit:  # names of files there never get another content
        named = named._replace(wanted=tuple(each._replace(is_pinned=True) for each in named.wanted))
    return named


def parse_conda_environment(text: str, environ: Mapping[str, str] | None = None) -> Named:
    """The dependencies of an environment.yml, as far as they are a list with one entry a line."""
    into = Collector()
    is_inside, pip_indent, found_any = False, -1, False
    for line in (_COMMENT.sub("", each).rstrip() for each in text.splitlines()[:MOST_LINES]):
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
        into.notes.append("its dependencies are not understood: it counts as not pinned")
        into.wanted.append(Wanted("", "dependencies", False))
    return into.named()


def parse_pyproject(
    text: str,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    markers: Mapping[str, str] | None = None,
    has_dependencies: bool = True,
) -> Named:
    """What installing a project with this pyproject.toml asks for; groups also without the project's own."""
    import tomllib

    into = Collector(markers)
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        into.notes.append("is no TOML")
        return into.named()
    project = _table(content, "project")
    optional = _table(project, "optional-dependencies")
    lists = [project.get("dependencies"), *(optional.get(extra) for extra in extras)] if has_dependencies else []
    dynamic = project.get("dynamic")
    if has_dependencies and isinstance(dynamic, list) and "dependencies" in dynamic:
        into.wanted.append(Wanted("", "dependencies that the project computes", False))
    lists += [_table(content, "dependency-groups").get(group) for group in groups]
    for each in lists:
        for requirement in each if isinstance(each, list) else []:
            if isinstance(requirement, str):
                into.add_requirement(requirement)
    return into.named()


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}
