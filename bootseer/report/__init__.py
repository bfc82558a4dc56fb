"""Where a start spent its time, from event files; pages, comparisons and exports of it."""

from __future__ import annotations

from bootseer.report.stages import StageTime, StartSummary, start_line, summarise_start

__all__ = ["StageTime", "StartSummary", "start_line", "summarise_start"]
