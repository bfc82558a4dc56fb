"""The former name of `bootseer.report`, for programs that import it."""

from __future__ import annotations

from bootseer.report import StageTime, StartSummary, start_line, summarise_start

__all__ = ["StageTime", "StartSummary", "start_line", "summarise_start"]
