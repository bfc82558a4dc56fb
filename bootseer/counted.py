"""Numbers for messages: "2 files", "4.1 kB", "3.4 h". PURE; a separate module, as every package needs it."""

from __future__ import annotations

_UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0))


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


def format_time(seconds: float) -> str:
    """PURE: format a time: 12 s, 3.4 h, 7 days."""
    for name, unit_s in _UNITS:
        if abs(seconds) >= unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"
