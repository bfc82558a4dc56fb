"""One version in a node's memory: the arena, the process that fills it and the socket at which ranks find it.

In: what ranks need of a version. Out: an arena that they can attach to, or why there is none. Its memory is new,
that of the last load, or taken over: from savers of this job (arena_offers.py) and from `bootseer warm`
(warm_arenas.py). Which units are read, and what follows from a failure, decides loading.py.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from bootseer.checkpoint.io.arena import (
    EMPTY,
    FAILED,
    READY,
    SHARD_UNIT_BYTES,
    UNIT_BYTES,
    Arena,
    HeldMemory,
    Unit,
)
from bootseer.checkpoint.io.capacity import ARENA, Capacity, allowed, decide
from bootseer.checkpoint.io.source import SourceFile
from bootseer.checkpoint.service import warm_arenas
from bootseer.checkpoint.service.arena_offers import OfferedVersions
from bootseer.checkpoint.service.arena_room import ArenaRoom
from bootseer.checkpoint.service.arena_server import ArenaServer
from bootseer.checkpoint.service.filler import Filler, run_filler
from bootseer.checkpoint.service.filler_process import FillerNews, FillerProcess
from bootseer.checkpoint.service.needs import Needs
from bootseer.checkpoint.service.prefetch import Range
from bootseer.checkpoint.service.process import Fork
from bootseer.checkpoint.service.start_options import StartOptions
from bootseer.checkpoint.versions.pinned import Pinned
from bootseer.errors import BootseerError
from bootseer.linux.cgroups import read_memory
from bootseer.logs import get_logger
from bootseer.storage.engine.extents import Extents

_log = get_logger(__name__)


class MemoryEvents(NamedTuple):
    """Calls for what happens to the memory."""

    noted: Callable[[list[Unit], str, str], object]  # units are ready, or have failed: why, kind (filler.py)
    moved: Callable[[], object]  # bytes have arrived
    filler_ended: Callable[[], object]  # the filler has died: `replace_filler`
    rank_done: Callable[[], object]  # a rank has its part, or its connection has ended
    taken: Callable[[], object]  # another service has taken it over
    dropped: Callable[[], object]  # before the arena's descriptors are closed


class NodeMemory:
    """At most one arena at a time; runs on the service's loop."""

    def __init__(self, directory: str, selector: selectors.BaseSelector, fork: Fork, events: MemoryEvents) -> None:
        """Args: directory: of the service, for its sockets."""
        self._directory = directory
        self._selector = selector
        self._events = events
        self._options = StartOptions()
        self.pinned: Pinned | None = None  # the version that was prepared last
        self.arena: Arena | None = None
        self._server: ArenaServer | None = None
        news = FillerNews(self._note, events.moved, events.filler_ended)
        self._filler = FillerProcess(selector, fork, news)
        self._offers: OfferedVersions | None = None
        self._room: ArenaRoom | None = None  # of the arena
        self.taken_bytes = 0  # of the arena: taken over from another service

    def start(self, options: StartOptions) -> str:
        """Set the options; return the address at which savers leave units, "" if they may not."""
        self._options = options
        if options.arena_bytes and self._offers is None:
            self._offers = OfferedVersions(self._directory, self._selector, options.arena_bytes)
        return "" if self._offers is None else self._offers.address

    def end(self) -> None:
        self.drop()
        if self._offers is not None:
            self._offers.close()

    def tick(self) -> None:
        if self._server is not None:
            self._server.tick()

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def is_served(self) -> bool:
        """Whether ranks can attach to the arena."""
        return self.arena is not None and self._server is not None

    @property
    def is_filling(self) -> bool:
        """Whether ranks can attach, and a filler is running."""
        return self.is_served and self._filler.is_running

    @property
    def is_used(self) -> bool:
        """Whether ranks have its memory, or can get it at any time."""
        return self._server is not None and self._server.is_used

    @property
    def fillers(self) -> int:
        """Number of fillers that were started in this load."""
        return self._filler.starts

    @property
    def from_disk_bytes(self) -> int:
        """Bytes that came from this node's disk in this load."""
        return self._filler.from_disk_bytes

    @property
    def damaged(self) -> frozenset[Unit]:
        """Units whose copy on this node's disk is damaged."""
        return frozenset(self._filler.damaged)

    @property
    def files(self) -> dict[str, SourceFile]:
        """The arena's files, by path."""
        return {} if self.arena is None else {file.path: file for file in self.arena.files}

    @property
    def size(self) -> int:
        """Bytes of the arena's files."""
        return 0 if self.arena is None else self.arena.size

    @property
    def capacity(self) -> Capacity:
        """The maximum size of an arena, by the limits and the free memory."""
        held = self.arena.own_taken_bytes if self.arena is not None else 0
        if self._offers is not None and self.pinned is not None:
            held += self._offers.bytes_of(self.pinned.striped_version)  # other versions stay
        limit = self._options.memory_bytes
        return allowed(read_memory(), "" if limit is None else str(limit), held)

    def has(self, digest: str) -> bool:
        """Return whether the arena has a version."""
        return self.arena is not None and self.pinned is not None and self.pinned.digest == digest

    def is_ready(self, unit: Unit) -> bool:
        return self.arena is not None and self.arena.state(*unit) == READY

    def bytes_of(self, units: Iterable[Unit]) -> int:
        assert self.arena is not None
        return sum(end - start for start, end in (self.arena.extent(*each) for each in units))

    def units_of(self, ranges: Iterable[Range]) -> list[Unit]:
        """Return the units of the arena that contain these ranges, in their order, each once."""
        arena = self.arena
        assert arena is not None
        numbers = {file.path: number for number, file in enumerate(arena.files)}
        units: dict[Unit, None] = {}
        for piece in ranges:
            number = numbers[piece.path]
            length = arena.unit_bytes[number]
            for unit in range(piece.start // length, -(-piece.end // length)):
                units[number, unit] = None
        return list(units)

    def statistics(self) -> dict[str, int]:
        """Return the counts of an answer `statistics`."""
        arena = self.arena
        states = bytes(arena.states) if arena is not None else b""
        return {
            "arena_bytes": arena.size if arena is not None else 0,
            "units": arena.units if arena is not None else 0,
            "ready_units": states.count(READY),
            "taken_bytes": arena.taken_bytes if arena is not None else 0,
            "saved_bytes": self._offers.bytes if self._offers is not None else 0,
            "readers": self.fillers,
            "ranks": self._server.attached if self._server is not None else 0,
        }

    # ---- arena -----------------------------------------------------------------------------------------------

    def prepare(self, needs: Needs) -> str | None:
        """Make an arena for a version and start to fill it; return why there is none, None if ranks can attach."""
        self.pinned = pinned = needs.pinned
        self._filler.damaged.clear()
        plain_bytes = UNIT_BYTES if needs.is_whole else SHARD_UNIT_BYTES
        files = [SourceFile(file.path, file.layout.size) for file in pinned.files]
        units = [file.layout.unit_bytes if file.sums else plain_bytes for file in pinned.files]
        if self._take_warm(pinned, files, units):
            return None
        capacity = self.capacity
        mode = decide(needs.bytes, needs.is_whole, capacity)
        if mode.name != ARENA:
            return mode.reason
        saved = self._find_saved(pinned)
        if self.arena is not None and self._server is not None and self.arena.fits(files, units) and not saved:
            self.stop_filler()
            if self._server.is_used or self.arena.is_held:
                self.drop()  # ranks of the last attempt may still have it mapped
            else:
                self.arena.rename(files)
        else:
            self.drop()
        try:
            if self.arena is None:
                self.arena = Arena(files, units, {path: held for path, (held, _) in saved.items()})
            self._serve(self.arena, pinned, capacity.bytes)
            self._check_saved(saved)
        except (OSError, BootseerError) as error:
            return str(error)
        return None

    def drop(self) -> None:
        """Release the arena; ranks keep what they have mapped."""
        self._events.dropped()
        self.taken_bytes = 0
        self.stop_filler()
        if self._options.holds and self._server is not None and self.pinned is not None:
            warm_arenas.withdraw(self.pinned.digest, self._server.address, os.environ)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.arena is not None:
            self.arena.close()
            self.arena = self._room = None

    def _serve(self, arena: Arena, pinned: Pinned, room_bytes: int) -> None:
        """Let ranks attach to an arena, and start to fill it. Raises: OSError."""
        if self._server is None:
            self._server = ArenaServer(
                self._directory, self._selector, self._want, self._events.rank_done, self._events.taken
            )
        self._server.serve(arena, pinned)
        self._room = ArenaRoom(arena, room_bytes)
        self.start_filler()

    def _take_warm(self, pinned: Pinned, files: list[SourceFile], units: list[int]) -> bool:
        """Take over the arena of `bootseer warm` if it has this version; return whether it did.

        A service that holds for a later job takes it over as well, instead of reading it again.
        """
        if not (self._options.holds or self._options.is_eager):
            return False
        held = warm_arenas.take(pinned.digest, files, os.environ)
        if not held:
            return False
        self.drop()
        try:
            self.arena = Arena(files, units, held)
            self.arena.set_all_ready()
            self._serve(self.arena, pinned, 0)
        except (OSError, BootseerError):
            self.drop()
            return False
        finally:
            for each in held.values():
                os.close(each.fd)  # the arena has duplicates
        self.taken_bytes = pinned.size
        _log.info("the checkpoint was in this node's memory already (bootseer warm)")
        return True

    def _find_saved(self, pinned: Pinned) -> dict[str, tuple[HeldMemory, list[int]]]:
        """Return the files of which a saver has left units, and these units."""
        found = {}
        for file in pinned.files if self._offers is not None and pinned.striped_version else ():
            assert self._offers is not None
            left = self._offers.find(pinned.striped_version, file.path, file.layout) if file.sums else None
            if left is not None:
                found[file.path] = left
        return found

    def _check_saved(self, saved: dict[str, tuple[HeldMemory, list[int]]]) -> None:
        """Request verification of left units; they need no read, and their memory exists already."""
        arena, room = self.arena, self._room
        if not saved or arena is None or room is None or not self._filler.is_running:
            return
        units = [
            (number, each) for number, file in enumerate(arena.files) for each in saved.get(file.path, ((), ()))[1]
        ]
        for unit in units:
            room.count(unit)
        self._filler.send(check=units)

    # ---- ranks -----------------------------------------------------------------------------------------------

    def begin_load(self) -> None:
        """Reset the counts of a load."""
        self._filler.begin_load()

    def begin_attempt(self) -> None:
        """Reset the records of reads for new ranks."""
        assert self._server is not None
        self._server.begin_attempt()

    def hand_out(self) -> tuple[Arena, str]:
        """Let ranks map the arena, also ranks that know only the names of its files; return it and its address.

        Offer the complete checkpoint to later jobs if it is held for them.
        """
        assert self.arena is not None and self._server is not None
        arena, server = self.arena, self._server
        if self._options.holds and all(arena.is_complete(number) for number in range(len(arena.files))):
            assert self.pinned is not None
            try:
                warm_arenas.offer(self.pinned.digest, server.address, os.environ)
            except (BootseerError, OSError) as error:
                _log.info("the checkpoint in memory is not offered to later jobs: %s", error)
        server.is_used = True
        return arena, server.address

    def all_have_their_part(self, count: int) -> bool:
        """Return whether `count` ranks have their parts, and none is connected."""
        return self._server is not None and not self._server.attached and 0 < count <= len(self._server.done)

    def take_reads(self) -> dict[str, Extents]:
        """Return the spans that ranks have read in this attempt, by file."""
        assert self._server is not None
        self._server.drain()
        return self._server.asked

    def _want(self, units: list[Unit]) -> dict[Unit, str]:
        """Request units that ranks wait for; return those without room."""
        assert self.arena is not None
        refused = {unit: "the arena is full" for unit in units if not self._admit(unit)}
        wanted = [unit for unit in units if unit not in refused]
        self._empty_failed(wanted)
        if wanted:
            self._filler.send(want=wanted)
        return refused

    def _admit(self, unit: Unit) -> bool:
        """Return whether there is room for a unit of the arena; count it."""
        assert self._room is not None
        return self._room.admit(unit)

    def _empty_failed(self, units: Iterable[Unit]) -> None:
        """Mark failed units empty: a new request retries them."""
        assert self.arena is not None
        for unit in units:
            if self.arena.state(*unit) == FAILED:
                self.arena.set_state(*unit, EMPTY)

    # ---- filler ----------------------------------------------------------------------------------------------

    def start_filler(self) -> None:
        """Start a filler for the arena, unless one is running. Raises: OSError."""
        if self.arena is None or self.pinned is None:
            return
        arena, pinned, options = self.arena, self.pinned, self._options
        self._filler.start(
            lambda connection: run_filler(
                Filler(
                    connection,
                    options.url,
                    pinned,
                    arena,
                    options.max_bytes_per_s,
                    options.peers,
                    bool(options.disk_bytes),
                )
            )
        )

    def stop_filler(self) -> None:
        """End the filler; ready units stay."""
        if self._filler.stop() and self.arena is not None:
            self.arena.reset_unfinished()

    def prefetch(self, units: Iterable[Unit]) -> list[Unit]:
        """Request units that are not ready, as far as there is room for them; return these."""
        requested = [each for each in units if not self.is_ready(each) and self._admit(each)]
        if requested:
            self._filler.send(prefetch=requested)
        return requested

    def retry(self, units: list[Unit]) -> None:
        """Request units again that have failed."""
        self._empty_failed(units)
        self._filler.send(prefetch=units)

    def populate(self, files: list[int]) -> None:
        """Allocate the pages of files before they are needed."""
        self._filler.send(populate=files)

    def note_finished(self, planned: Collection[Unit]) -> None:
        """Note requested units that are ready: the filler may have died before it reported them."""
        if self.arena is not None and self._server is not None:
            asked = {*self._server.wanted(), *planned}
            self._note([each for each in asked if self.is_ready(each)], "", "")

    def request_again(self, planned: Collection[Unit]) -> None:
        """Send a new filler the requests of the one that has died."""
        if self._server is not None and self.arena is not None:
            self._filler.send(want=self._server.wanted())
            self._filler.send(prefetch=sorted(planned))

    def forget_damaged(self) -> None:
        """Forget which units are damaged on the disk: they were copied there again."""
        self._filler.damaged.clear()

    def _note(self, units: list[Unit], why: str, kind: str) -> None:
        if self._server is not None:
            self._server.resolve_units(units, why)
        self._events.noted(units, why, kind)
