"""Numbers for messages: "1 file", "2 files", "4.1 kB". PURE; a separate module, as every package needs it."""

from __future__ import annotations


def counted(number: float, what: str, many: str = "") -> str:
    """PURE: return "1 file", "12,345 files", "0.5 days". Args: many: the plural, if it is not `what` plus s."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{shown} {what if shown == '1' else many or what + 's'}"


def format_bytes(count: float) -> str:
    """PURE: format a size in powers of 1000: 12 B, 4.1 kB, 830 MB, 1.4 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
