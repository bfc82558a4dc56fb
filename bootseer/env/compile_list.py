"""Compiles the Python files of a list: `PYTHON compile_list.py FOLDER`. Run by path in a target's interpreter.

Any Python from 3.8 on, standard library only; bootseer need not be installed there. Standard input: a number and
a path for each file, each with a NUL behind it. Of each one that compiles, FOLDER/NUMBER.pyc is written, as if it
lay where Python looks for it; where FOLDER is empty it does. What cannot be compiled (templates, other versions'
syntax) is passed over.
"""

from __future__ import annotations

import os
import sys

# Neither files beside this one nor the user's must hide modules of Python's.
_LIBRARY = os.path.dirname(os.__file__)
sys.path[:] = [each for each in sys.path if each == _LIBRARY or each.endswith("/lib-dynload")] or sys.path

import py_compile
import warnings


def main() -> None:
    """See the module's docstring. Ends when its parent does."""
    folder, parent = sys.argv[1], os.getppid()
    warnings.simplefilter("ignore")
    fields = sys.stdin.buffer.read().split(b"\0")
    for number, path in zip(fields[::2], fields[1::2]):  # noqa: B905  # Python 3.8
        if os.getppid() != parent:
            return
        source = os.fsdecode(path)
        try:
            py_compile.compile(
                source,
                cfile=os.path.join(folder, os.fsdecode(number) + ".pyc") if folder else None,
                dfile=source,
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )
        except Exception:  # noqa: S112  # whatever the compiler says of a file, the others are compiled
            continue


if __name__ == "__main__":
    main()
