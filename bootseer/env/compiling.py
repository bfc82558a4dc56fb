"""Finds which files of a difference lack bytecode, and has it made: the acting half of bytecode.py.

In: what a walk found in each target, and what of it changed. Out: names of .pyc files in a scratch folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from bootseer.env import bytecode
from bootseer.env.image_target import python_of
from bootseer.env.inside import HERE, Inside
from bootseer.env.source import Compiled, open_files
from bootseer.env.walk import Walk
from bootseer.tree.building import Progress


class Compiler:
    """Bytecode for all targets, into one scratch folder."""

    def __init__(
        self,
        scratch: str,
        python: str,
        workers: int,
        on_progress: Progress,
        notes: list[str],
        inside: Inside = HERE,
    ) -> None:
        self._scratch = scratch
        self._python = python
        self._workers = workers
        self._on_progress = on_progress
        self._notes = notes
        self._inside = inside
        self._count = 0

    def compile(self, target: str, after: Walk, changed: Sequence[bytes]) -> dict[bytes, Compiled]:
        """What was made for the files of a target, by the path where Python looks for it."""
        sources = bytecode.sources_of(changed, after)
        if not sources:
            return {}
        if self._inside.prefix:
            python = python_of([target]) or self._inside.python
        else:
            python = bytecode.find_python(target, self._python)
        interpreter = bytecode.probe(python, self._inside) if python else None
        if interpreter is None:
            self._notes.append(
                f"{target}: {len(sources)} Python files are as they are: no interpreter could compile them"
            )
            return {}
        wanted = self._without_valid(target, after, sources, interpreter)
        jobs = {}
        for path, source in wanted.items():
            jobs[path] = bytecode.Job(os.fsencode(target) + b"/" + source, self._count)
            self._count += 1
        bytecode.compile_all(
            list(jobs.values()),
            interpreter,
            self._scratch,
            workers=self._workers,
            inside=self._inside,
            on_wait=lambda: self._on_progress(0, 0),
        )
        made = {}
        for path, job in jobs.items():
            name = b"%d.pyc" % job.number
            try:
                with open(os.path.join(os.fsencode(self._scratch), name), "rb") as file:
                    header = file.read(bytecode.HEADER_BYTES)
            except FileNotFoundError:
                continue  # no valid Python
            if bytecode.is_valid(header, interpreter.magic, after[wanted[path]]):
                made[path] = Compiled(name, wanted[path])
        return made

    def _without_valid(
        self, target: str, after: Walk, sources: Sequence[bytes], interpreter: bytecode.Interpreter
    ) -> dict[bytes, bytes]:
        """Sources without bytecode that is believed, by the path where it should be."""
        wanted = {bytecode.bytecode_path(source, interpreter.tag): source for source in sources}
        for path in list(wanted):
            cache = after.get(path.rpartition(b"/")[0])
            if cache is not None and not stat.S_ISDIR(cache.mode):
                del wanted[path]  # a link to somewhere: whoever made it wants no bytecode here
        there = [path for path in wanted if path in after and stat.S_ISREG(after[path].mode)]
        for path, header in open_files(target, after, there, bytecode.HEADER_BYTES):
            if bytecode.is_valid(header, interpreter.magic, after[wanted[path]]):
                del wanted[path]
        return wanted
