"""Finds the files of a difference without bytecode, and compiles them; bytecode.py has the parts for it.

In: a walk of each target, and its changed names. Out: names of .pyc files in a scratch directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from bootseer.env.capture import bytecode
from bootseer.env.capture.source import CompiledFile, open_files
from bootseer.env.capture.walk import Walk
from bootseer.env.exec_place import HERE, ExecPlace
from bootseer.tree.builder.building import Progress


class Compiler:
    """A compiler for all targets, which writes to one scratch directory."""

    def __init__(
        self,
        scratch: str,
        python: str,
        workers: int,
        on_progress: Progress,
        notes: list[str],
        inside: ExecPlace = HERE,
    ) -> None:
        self._scratch = scratch
        self._python = python
        self._workers = workers
        self._on_progress = on_progress
        self._notes = notes
        self._inside = inside
        self._count = 0

    def compile(self, target: str, after: Walk, changed: Sequence[bytes]) -> dict[bytes, CompiledFile]:
        """Compile the changed files of a target. Return the results by the path where Python expects them."""
        sources = bytecode.sources_of(changed, after)
        if not sources:
            return {}
        if self._inside.prefix:
            python = bytecode.python_of([target]) or self._inside.python
        else:
            python = bytecode.find_python(target, self._python)
        interpreter = bytecode.probe(python, self._inside) if python else None
        if interpreter is None:
            self._notes.append(f"{target}: {len(sources)} Python files are not compiled: no usable interpreter")
            return {}
        wanted = self._without_valid(target, after, sources, interpreter)
        jobs = {}
        for path, source in wanted.items():
            jobs[path] = bytecode.CompileJob(os.fsencode(target) + b"/" + source, self._count)
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
                continue  # not valid Python
            if bytecode.is_valid(header, interpreter.magic, after[wanted[path]]):
                made[path] = CompiledFile(name, wanted[path])
        return made

    def _without_valid(
        self, target: str, after: Walk, sources: Sequence[bytes], interpreter: bytecode.BytecodeFormat
    ) -> dict[bytes, bytes]:
        """Return the sources without valid bytecode, by the path where it should be."""
        wanted = {bytecode.bytecode_path(source, interpreter.tag): source for source in sources}
        for path in list(wanted):
            cache = after.get(path.rpartition(b"/")[0])
            if cache is not None and not stat.S_ISDIR(cache.mode):
                del wanted[path]  # not a directory: its maker wants no bytecode here
        there = [path for path in wanted if path in after and stat.S_ISREG(after[path].mode)]
        for path, header in open_files(target, after, there, bytecode.HEADER_BYTES):
            if bytecode.is_valid(header, interpreter.magic, after[wanted[path]]):
                del wanted[path]
        return wanted
