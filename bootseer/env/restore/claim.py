"""Exclusive access to a target, with markers updated for what a killed run has left there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bootseer.blocks.presence import read_boot_id
from bootseer.env.capture.walk import walk
from bootseer.env.restore.apply_journal import Journal
from bootseer.env.restore.markers import open_markers
from bootseer.env.restore.staging import Claim, claim


@contextmanager
def claimed_at(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[Claim]:
    """Hold the claim of a target. If a killed run is completed, write the marker that it would have written."""

    def mark(journal: Journal, is_complete: bool) -> None:
        markers = open_markers(environ, journal.target)
        markers.remove(journal.target)
        if is_complete:
            markers.write(journal.marker, walk(journal.target), journal.paths)

    with claim(target, environ=environ, boot=read_boot_id(), wait_s=wait_s, on_recovered=mark) as claimed:
        if claimed.is_doubtful:
            open_markers(environ, claimed.target).doubt(claimed.target, walk(claimed.target))
        yield claimed
