"""Checkpoints: striped or plain, written in parallel, read once per node.

From a training script: `bootseer.checkpoint.open`, `load_file`, `safe_open`, `load_pt`, `BootseerReader` and
`BootseerWriter`. Each is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.checkpoint.api import Checkpoint, open  # noqa: A004
    from bootseer.checkpoint.dcp.api import BootseerReader, BootseerWriter
    from bootseer.checkpoint.pt import load_pt
    from bootseer.checkpoint.safetensors import load_file, safe_open

_HOMES = {
    "Checkpoint": "api",
    "open": "api",
    "BootseerReader": "bootseer.checkpoint.dcp.api",
    "BootseerWriter": "bootseer.checkpoint.dcp.api",
    "load_pt": "pt",
    "load_file": "safetensors",
    "safe_open": "safetensors",
}

__all__ = ["BootseerReader", "BootseerWriter", "Checkpoint", "load_file", "load_pt", "open", "safe_open"]
__getattr__ = loader(__name__, _HOMES)
