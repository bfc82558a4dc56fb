"""The command that runs a module of ours in a process of its own.

In: the module's name and its arguments. By the path of `_bootseer_entry.py`, and not by `-m`: what a user's
PYTHONPATH and working folder have does not matter then.
"""

from __future__ import annotations

import os
import sys

ENTRY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_bootseer_entry.py")


def command_of(module: str, *args: str) -> list[str]:
    """To be executed; -P as a module may lie beside the file that is run."""
    return [sys.executable, "-P", ENTRY, module, *args]
