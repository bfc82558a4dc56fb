"""Bootseer's library, usable from a training script; importing it loads no torch and takes almost no time."""

from __future__ import annotations

from bootseer.heartbeat import heartbeat
from bootseer.layout import layout

__version__ = "0.2.0"
__all__ = ["__version__", "heartbeat", "layout"]
