"""Privileges of this process; checked before other modules are imported."""

from __future__ import annotations

_CAP_SYS_ADMIN = 21


def may_mount() -> bool:
    """Return whether a mount can be tried: without the capability the kernel refuses it in any case."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            found = next(line for line in file if line.startswith("CapEff:"))
        return bool(int(found.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return True
