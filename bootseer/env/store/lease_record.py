"""The content of lease-NNNNNN.json, and the rule by which its holder counts as dead. Pure.

A lease is not signed: a user who can write to the store can also delete its files. A lease only saves work; the
store decides which result is published, as it creates a name once.
"""

from __future__ import annotations

import math
import re

import msgspec

from bootseer.errors import IntegrityError
from bootseer.formats import one_line

FORMAT = "bootseer-env-lease/1"
WORKING, DONE, FAILED = "working", "done", "failed"
MAX_LEASE_BYTES = 8 << 10
MAX_OWNER = 200  # characters
MAX_TEXT = 500
MAX_BEAT = 1 << 53
MAX_MISSED = 3  # heartbeats

_NONCE = re.compile(r"[0-9a-f]{32}")


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    nonce: str  # 32 hex digits, of this lease alone
    beat: int  # from 1; incremented each time the holder writes it
    owner: str  # host and process, for messages
    state: str  # WORKING, DONE or FAILED
    text: str  # present action, or why it failed; for messages
    held_s: float  # by the holder's clock


def make_record(nonce: str, beat: int, owner: str, state: str, text: str, held_s: float) -> LeaseRecord:
    """Make a record with its texts cut to their bounds."""
    return LeaseRecord(
        nonce=nonce,
        beat=beat,
        owner=one_line(owner)[:MAX_OWNER],
        state=state,
        text=one_line(text)[:MAX_TEXT],
        held_s=round(max(0.0, held_s), 3),
    )


def encode(record: LeaseRecord) -> bytes:
    """Return the stored form; raises IntegrityError for fields that no reader would accept."""
    _check(record, "this lease")
    return msgspec.json.encode(record)


def decode(data: bytes, where: str) -> LeaseRecord:
    """Decode a record. Raises: IntegrityError."""
    if len(data) > MAX_LEASE_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; at most {MAX_LEASE_BYTES}")
    try:
        record = msgspec.json.decode(data, type=LeaseRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not a lease, or damaged: {one_line(str(error))}") from error
    _check(record, where)
    return record


def _check(record: LeaseRecord, where: str) -> None:
    is_right = (
        record.format == FORMAT
        and _NONCE.fullmatch(record.nonce) is not None
        and 0 < record.beat <= MAX_BEAT
        and record.state in (WORKING, DONE, FAILED)
        and math.isfinite(record.held_s)
        and record.held_s >= 0
        and all(
            len(text) <= most and (text.isprintable() or not text)
            for text, most in ((record.owner, MAX_OWNER), (record.text, MAX_TEXT))
        )
    )
    if not is_right:
        raise IntegrityError(f"{where}: is not a lease: a field is out of its bounds")


class MissedHeartbeats:
    """Counts the heartbeats that a holder has missed, by the clock of the observer.

    It counts at most one for each sample. A late sample, as this process was stopped, or a time in which the store
    could not be read proves nothing about the holder.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._token = ""
        self._counted_s = 0.0
        self.missed = 0

    def see(self, token: str, now_s: float) -> bool:
        """Record a sample; return whether the holder is dead. `token`: changes with each heartbeat."""
        if token != self._token:
            self._token, self._counted_s, self.missed = token, now_s, 0
        elif now_s - self._counted_s >= self._beat_s:
            self._counted_s = now_s
            self.missed += 1
        return self.missed >= MAX_MISSED

    def reset(self) -> None:
        """Restart counting, as the lease could not be read."""
        self._token, self.missed = "", 0
