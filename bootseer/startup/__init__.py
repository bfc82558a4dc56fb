"""What a start was made of: events in, durations of its stages out."""

from __future__ import annotations

from bootseer.startup.stages import StageTime, StartSummary, start_line, summarise_start

__all__ = ["StageTime", "StartSummary", "start_line", "summarise_start"]
