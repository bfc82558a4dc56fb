"""Alone at a target, whose markers say then what a killed run has left there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bootseer.blocks.present import read_boot_id
from bootseer.env.apply_journal import Journal
from bootseer.env.markers import open_markers
from bootseer.env.staging import Claim, claim
from bootseer.env.walk import walk


@contextmanager
def claimed_at(target: str, environ: Mapping[str, str], wait_s: float) -> Iterator[Claim]:
    """The claim of a target. The marker of a run that is completed now is written as that run would have."""

    def mark(journal: Journal, is_complete: bool) -> None:
        markers = open_markers(environ, journal.target)
        markers.remove(journal.target)
        if is_complete:
            markers.write(journal.marker, walk(journal.target), journal.paths)

    with claim(target, environ=environ, boot=read_boot_id(), wait_s=wait_s, on_recovered=mark) as claimed:
        if claimed.is_doubtful:
            open_markers(environ, claimed.target).doubt(claimed.target, walk(claimed.target))
        yield claimed
