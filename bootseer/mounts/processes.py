"""Who closes a file: a program that goes on or ends well, or one that dies with the file half written.

The kernel closes the files of a killed process as if it had done so itself; only the process table tells.
"""

from __future__ import annotations

import os

_EXITING = 0x4  # PF_EXITING
_FLAGS, _EXIT_CODE = 6, 49  # fields of /proc/PID/stat after the state, which is field 0


def process_of(thread_id: int) -> int:
    """The process that a thread belongs to; 0 if it cannot be seen."""
    try:
        with open(f"/proc/{thread_id}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def why_dying(thread_id: int) -> str:
    """Why a thread that is closing a file does not do so of its own will, "" if it does."""
    try:
        with open(f"/proc/{thread_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        flags, code = int(fields[_FLAGS]), int(fields[_EXIT_CODE])
    except (OSError, ValueError, IndexError):
        return "it was closed by a process that cannot be seen from here"
    if not flags & _EXITING or not code:
        return ""
    how = f"was killed by signal {code & 0x7F}" if code & 0x7F else f"ended with status {code >> 8}"
    return f"its writer, process {thread_id}, {how} before it closed the file"
