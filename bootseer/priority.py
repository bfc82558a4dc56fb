"""The lowest priority for the calling thread and what it starts, for work that nobody waits for.

Linux keeps both priorities by thread, and new threads and processes inherit them. Neither can be taken back by an
ordinary user: work at this priority runs in a thread of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

NICE = 19
_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "ppc64le": 273,
    "s390x": 282,
}  # has no function in libc
_WHO_PROCESS = 1
_IDLE = 3 << 13  # class 3: when nobody else wants the disk


def lower() -> None:
    """What the system refuses stays as it is."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        pass
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0, _IDLE)
