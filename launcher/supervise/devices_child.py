"""Asks NVIDIA's driver what its devices do, in a process of its own, as it may not answer.

`python -m launcher.supervise.devices_child`; in: a line; out: a line {"devices": [[number, busy, memory, watts,
[pid, ...]], ...]}, as bootseer/health/nvml.py has it; none where there is no driver, or a device does not tell.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from bootseer.health.nvml import NvmlError, read_use

NVML = "libnvidia-ml.so.1"
LOOKS, BETWEEN_LOOKS_S = 4, 0.15


def look() -> list[list[Any]]:
    """See the module's docstring."""
    try:
        uses = read_use(NVML, LOOKS, lambda: time.sleep(BETWEEN_LOOKS_S))
    except NvmlError:
        return []
    return [[*use[:4], list(use.processes)] for use in uses]


def main() -> None:
    """Answers one order."""
    sys.stdin.readline()
    print(json.dumps({"devices": look()}), flush=True)


if __name__ == "__main__":
    main()
