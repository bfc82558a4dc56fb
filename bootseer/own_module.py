"""The command that runs a module of Bootseer in its own process.

In: the module's name and its arguments. It uses the path of `_bootseer_entry.py`, not `-m`, so the user's
PYTHONPATH and working directory do not matter.
"""

from __future__ import annotations

import os
import sys

ENTRY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_bootseer_entry.py")


def command_of(module: str, *args: str) -> list[str]:
    """Return the command to execute; -P, as another module may be in the directory of the entry file."""
    return [sys.executable, "-P", ENTRY, module, *args]
