"""Query of NVIDIA's driver for the activity of its devices, in a separate process, as it may not answer.

`python -m launcher.monitor.collectives.devices_child`; in: a line; out: a line {"devices": [[number, busy, memory,
watts, [pid, ...]], ...]}, as in bootseer/health/nvml.py; empty if there is no driver, or a device does not answer.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from bootseer.health.nvml import NvmlError, sample_use
from bootseer.ipc.framing import encode

NVML = "libnvidia-ml.so.1"
LOOKS, BETWEEN_LOOKS_S = 4, 0.15


def look() -> list[list[Any]]:
    """Sample the devices. See the module's docstring."""
    try:
        uses = sample_use(NVML, LOOKS, lambda: time.sleep(BETWEEN_LOOKS_S))
    except NvmlError:
        return []
    return [[*use[:4], list(use.processes)] for use in uses]


def main() -> None:
    """Answer one request."""
    sys.stdin.readline()
    sys.stdout.buffer.write(encode({"devices": look()}))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
