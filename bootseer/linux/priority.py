"""The lowest priority for the calling thread and its children, for background work.

Linux keeps both priorities by thread, and new threads and processes inherit them. An ordinary user cannot raise
them again, so work at this priority needs its own thread.
"""

from __future__ import annotations

import os
import platform
import threading

from bootseer.linux.syscalls import libc

NICE = 19
_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "ppc64le": 273,
    "s390x": 282,
}  # libc has no function for it
_WHO_PROCESS = 1
_IDLE = 3 << 13  # class 3: only while the disk is otherwise idle


def lower() -> None:
    """Lower both priorities; one that the system refuses to change stays."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        pass
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc().syscall(number, _WHO_PROCESS, 0, _IDLE)
