"""A number of things in words, for messages: "1 file", "2 files". PURE; of its own, as all have messages."""

from __future__ import annotations


def counted(number: float, what: str, many: str = "") -> str:
    """PURE: "1 file", "12,345 files", "0.5 days". Args: many: what others than one are called, if not by an s."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{shown} {what if shown == '1' else many or what + 's'}"
