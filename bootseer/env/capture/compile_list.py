"""Compiles the Python files of a list: `PYTHON compile_list.py DIR`. Runs by path in a target's interpreter.

Any Python from 3.8 on, standard library only, without bootseer. Standard input: a number and a path for each file,
each followed by NUL. For each file that compiles, it writes DIR/NUMBER.pyc, with the content that Python
expects in `__pycache__`. If DIR is empty, it writes to `__pycache__`. Files that do not compile (templates,
syntax of other versions) are skipped.
"""

from __future__ import annotations

import os
import sys

# Neither files beside this one nor those of the user must hide modules of Python.
_LIBRARY = os.path.dirname(os.__file__)
sys.path[:] = [each for each in sys.path if each == _LIBRARY or each.endswith("/lib-dynload")] or sys.path

import py_compile
import warnings


def main() -> None:
    """Compile the files; see the module's docstring. End when the parent process ends."""
    directory, parent = sys.argv[1], os.getppid()
    warnings.simplefilter("ignore")
    fields = sys.stdin.buffer.read().split(b"\0")
    for number, path in zip(fields[::2], fields[1::2]):  # noqa: B905  # Python 3.8
        if os.getppid() != parent:
            return
        source = os.fsdecode(path)
        try:
            py_compile.compile(
                source,
                cfile=os.path.join(directory, os.fsdecode(number) + ".pyc") if directory else None,
                dfile=source,
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )
        except Exception:  # noqa: S112  # an error in one file must not stop the others
            continue


if __name__ == "__main__":
    main()
