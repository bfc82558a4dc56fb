"""What lease-NNNNNN.json says, and when its holder counts as dead. Pure.

A lease is not signed: whoever can write to the store can also delete what is in it. It only saves work; what is
published is decided by the store, which creates a name once.
"""

from __future__ import annotations

import math
import re

import msgspec

from bootseer.errors import IntegrityError
from bootseer.formats import one_line

FORMAT = "bootseer-env-lease/1"
WORKING, DONE, FAILED = "working", "done", "failed"
MOST_LEASE_BYTES = 8 << 10
MOST_OWNER = 200  # characters
MOST_TEXT = 500
MOST_BEAT = 1 << 53
MISSES = 3  # beats

_NONCE = re.compile(r"[0-9a-f]{32}")


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who builds."""

    format: str = FORMAT
    nonce: str  # 32 hex digits, of this lease alone
    beat: int  # from 1; one more each time the holder writes it
    owner: str  # host and process, for people
    state: str  # WORKING, DONE or FAILED
    text: str  # what it does, or why it failed; for people
    held_s: float  # by the holder's clock


def make_record(nonce: str, beat: int, owner: str, state: str, text: str, held_s: float) -> LeaseRecord:
    """Cut to its bounds."""
    return LeaseRecord(
        nonce=nonce,
        beat=beat,
        owner=one_line(owner)[:MOST_OWNER],
        state=state,
        text=one_line(text)[:MOST_TEXT],
        held_s=round(max(0.0, held_s), 3),
    )


def encode(record: LeaseRecord) -> bytes:
    """As it is stored; raises IntegrityError for what no reader would take."""
    _check(record, "this lease")
    return msgspec.json.encode(record)


def decode(data: bytes, where: str) -> LeaseRecord:
    """Raises: IntegrityError."""
    if len(data) > MOST_LEASE_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; at most {MOST_LEASE_BYTES}")
    try:
        record = msgspec.json.decode(data, type=LeaseRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is no lease, or damaged: {one_line(str(error))}") from error
    _check(record, where)
    return record


def _check(record: LeaseRecord, where: str) -> None:
    is_right = (
        record.format == FORMAT
        and _NONCE.fullmatch(record.nonce) is not None
        and 0 < record.beat <= MOST_BEAT
        and record.state in (WORKING, DONE, FAILED)
        and math.isfinite(record.held_s)
        and record.held_s >= 0
        and all(
            len(text) <= most and (text.isprintable() or not text)
            for text, most in ((record.owner, MOST_OWNER), (record.text, MOST_TEXT))
        )
    )
    if not is_right:
        raise IntegrityError(f"{where}: is no lease: a field is out of its bounds")


class Watch:
    """Counts the beats that a holder has missed, by the clock of whoever looks.

    At most one for each look: neither a look that comes late, as this process was stopped, nor a time in which the
    store could not be read says anything about the holder.
    """

    def __init__(self, beat_s: float, *, misses: int = MISSES) -> None:
        self._beat_s, self._misses = beat_s, misses
        self._token = ""
        self._counted_s = 0.0
        self.missed = 0

    def see(self, token: str, now_s: float) -> bool:
        """Whether the holder is dead. `token`: what the lease holds now; it differs from beat to beat."""
        if token != self._token:
            self._token, self._counted_s, self.missed = token, now_s, 0
        elif now_s - self._counted_s >= self._beat_s:
            self._counted_s = now_s
            self.missed += 1
        return self.missed >= self._misses

    def lose_sight(self) -> None:
        """The lease could not be read: counting begins again."""
        self._token, self.missed = "", 0
