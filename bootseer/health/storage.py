"""Verdicts on paths that a job reads and writes. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.health.finding import FAIL, OK, Finding, if_above, if_below
from bootseer.health.limits import Limits

if TYPE_CHECKING:
    from bootseer.health.storage_facts import StorageFacts

_LEAST_JUDGED_BYTES = 1 << 20  # less tells of latency, not of speed
_SLOW = "look at the disk or the file server, and at who else uses it"


def judge_storage(path: str, facts: StorageFacts, limits: Limits) -> list[Finding]:
    if facts.error:
        way_out = "name a path that is there and that this user may use, or mount it"
        return [Finding("storage", FAIL, f"{facts.doing} failed: {facts.error}", path, way_out=way_out)]
    if facts.has_changed:
        what, way_out = "other bytes came back than were written", "use another disk; have this one looked at"
        return [Finding("storage", FAIL, what, path, way_out=way_out)]
    findings = []
    if facts.write_s is not None:
        level, limit = if_above(facts.write_s, limits.storage_warn_s)
        what = "4 MiB written and synced in"
        findings.append(Finding("storage", level, what, path, facts.write_s, limit, "s", _SLOW))
    if facts.read_s is not None and facts.read_bytes >= _LEAST_JUDGED_BYTES:
        rate = facts.read_bytes / max(facts.read_s, 1e-6)
        level, limit = if_below(rate, 0, limits.storage_warn_bytes_per_s)
        what = "read, bytes in a second"
        findings.append(Finding("storage", level, what, path, rate, limit, "bytes", _SLOW))
    elif facts.read_s is not None:
        level, limit = if_above(facts.read_s, limits.storage_warn_s)
        what = f"{facts.read_bytes} bytes read in"
        findings.append(Finding("storage", level, what, path, facts.read_s, limit, "s", _SLOW))
    return findings or [Finding("storage", OK, "can be listed, and has no file to read", path)]
