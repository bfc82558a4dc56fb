"""Verdicts on paths that a job reads and writes. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.health.finding import FAIL, OK, Finding, if_above, if_below
from bootseer.health.limits import Limits

if TYPE_CHECKING:
    from bootseer.health.storage_facts import StorageFacts

_MIN_JUDGED_BYTES = 1 << 20  # fewer bytes measure latency, not speed
_SLOW = "check the disk or the file server, and its other users"


def judge_storage(path: str, facts: StorageFacts, limits: Limits) -> list[Finding]:
    if facts.error:
        way_out = "name an existing path that this user may use, or mount it"
        return [Finding("storage", FAIL, f"{facts.doing} failed: {facts.error}", path, way_out=way_out)]
    if facts.has_changed:
        what, way_out = "other bytes were read than were written", "use another disk; have this one inspected"
        return [Finding("storage", FAIL, what, path, way_out=way_out)]
    findings = []
    if facts.write_s is not None:
        level, limit = if_above(facts.write_s, limits.storage_warn_s)
        what = "4 MiB written and synced in"
        findings.append(Finding("storage", level, what, path, facts.write_s, limit, "s", _SLOW))
    if facts.read_s is not None and facts.read_bytes >= _MIN_JUDGED_BYTES:
        rate = facts.read_bytes / max(facts.read_s, 1e-6)
        level, limit = if_below(rate, 0, limits.storage_warn_bytes_per_s)
        what = "read, bytes per second"
        findings.append(Finding("storage", level, what, path, rate, limit, "bytes", _SLOW))
    elif facts.read_s is not None:
        level, limit = if_above(facts.read_s, limits.storage_warn_s)
        what = f"{facts.read_bytes} bytes read in"
        findings.append(Finding("storage", level, what, path, facts.read_s, limit, "s", _SLOW))
    return findings or [Finding("storage", OK, "can be listed, but has no file to read", path)]
