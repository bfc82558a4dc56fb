"""The keeper: `python -m bootseer.checkpoint.keeper`. Holds a node's arena for the ranks of one job.

bootrun gives orders on its standard input and hears answers on its standard output, JSON lines; URLs come that
way, never in argv. Ranks connect to a Unix socket in a folder of the keeper's own (arena_client.py). It ends when
its input does, and leaves nothing behind.

    start    url memory_bytes arena_bytes keep local_world_size nodes
                                  looks for the version and makes memory ready
             whole                          all of it is wanted, whatever an earlier load has read
             holds                          for a job that comes later: offered, and when it is taken -> taken
             most_bytes_per_s               of what is read; None: no limit
             disk_bytes                     of all versions that are kept on this node's disk; 0 for none
             is_eager                       by default; else no memory is made, nor taken over from
                                            `bootseer warm`, before a load is ordered
             shows_url                      ranks read with our loaders alone: where no path comes for nothing,
                                            they get the URL
                                  -> listening saves shown: where savers leave units ("" without arena_bytes),
                                     and the URL without secrets
    resolve  without falls_back   -> resolved version digest passed | absent why kind | unresolved why older
                                     passed: a line for each newer save, why it is not taken
                                     kind: resolving.py; without: digests of versions that cannot be loaded;
                                     falls_back: one with a damaged manifest neither; older: a version that could
                                     be loaded instead, "" for none
    load     version digest world_size nnodes group_rank attempt
                                  -> progress bytes of_bytes ... then ready path address | direct why path |
                                     failed, all with the order's attempt; ready disk_bytes: what of it was on
                                     the disk. A path names files that open.
                                  -> failed why kind digest: also later, when bytes that a rank has asked
                                     for turn out to be wrong; kind: filler.py
    release                       ranks have what they need: what was read is recorded and copied to the disk,
                                  the memory is given up
    copy                          -> copied why: to the disk, "" if that went well
    statistics                    -> statistics: bytes in the arena and left by savers, units, readers, ranks
    end                           as the end of input
                                  -> at any time said text: a line for people; alive: what takes long goes on;
                                     origin url folders: of a store, what the job's nodes may give each other
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import msgspec

from bootseer.checkpoint import prefetch, warm_arenas
from bootseer.checkpoint.arena import EMPTY, FAILED, READY, SHARD_UNIT_BYTES, UNIT_BYTES, Arena, Held
from bootseer.checkpoint.arena_offers import Offers
from bootseer.checkpoint.arena_server import ArenaServer, Unit
from bootseer.checkpoint.capacity import ARENA, Capacity, allowed, decide
from bootseer.checkpoint.copier import run_copier
from bootseer.checkpoint.disk_copy import can_keep
from bootseer.checkpoint.doubles import doubles
from bootseer.checkpoint.filler import AWAY, DAMAGED, REFUSED, Filler, disk_folder, run_filler
from bootseer.checkpoint.keeper_process import (
    Child,
    allow_descriptors,
    end_child,
    fork_child,
    make_folder,
    take_streams,
)
from bootseer.checkpoint.lines import LineSocket
from bootseer.checkpoint.opening import store_url_of
from bootseer.checkpoint.rank_paths import Found, RankPaths, Shown, own_path
from bootseer.checkpoint.recordings import Recordings, cache_folder
from bootseer.checkpoint.resolving import Resolver
from bootseer.checkpoint.source import SourceFile
from bootseer.checkpoint.versions import Pinned
from bootseer.errors import BootseerError, CheckpointError
from bootseer.storage.memory_limits import read_memory
from bootseer.storage.paths import redact

MOST_FILLERS = 3  # that may die before ranks get their files another way
AWAY_S = 60.0  # so long a store may give nothing while ranks wait
AWAY_WAIT_S = 2.0
PROGRESS_S = 0.5
# After all ranks have said that they have their part, and none has come back. Where first steps are seen, they
# come first; elsewhere a program may build its optimizer before it loads that one's state.
QUIET_S = 60.0
DCP_METADATA = ".metadata"
NOT_KEPT = "the checkpoint is not kept on this node's disk"


class State(Enum):
    IDLE = "idle"
    PINNING = "pinning"  # a load has been ordered, its files are being looked up
    LOADING = "loading"  # it will be told when the files are there
    SERVING = "serving"


class Keeper:
    """See the module's docstring. One thread, one loop."""

    def __init__(self, launcher: LineSocket) -> None:
        self._launcher = launcher
        self._selector = selectors.DefaultSelector()
        self._state = State.IDLE
        self._url = ""
        self._start: dict[str, Any] = {}
        self._load: dict[str, Any] = {}
        self._pinned: Pinned | None = None
        self._arena: Arena | None = None
        self._server: ArenaServer | None = None
        self._filler: Child | None = None
        self._fillers = 0
        self._offers: Offers | None = None
        self._planned: set[Unit] = set()
        self._is_waiting = False  # ranks start when all that is planned is there
        self._must_be_whole = False  # links into memory are what is left
        self._away: dict[Unit, None] = {}  # that the store could not give; they are asked for again
        self._away_why, self._away_again_s = "", 0.0
        self._moved_s = 0.0  # when bytes came last
        self._has_failed = False  # the load; it was told
        self._room_bytes = 0  # what the arena may still take
        self._admitted = bytearray()  # of each unit, whether that counts it
        self._quiet_since_s: float | None = None
        self._told_s = 0.0
        self._from_disk_bytes = 0  # of this load
        self._taken_bytes = 0  # of the arena: another keeper had them in memory
        self._bad: set[Unit] = set()  # units that are wrong on the disk
        self._copier: Child | None = None
        self._position = prefetch.Position(1, 1, 0)
        self._recordings = Recordings(cache_folder(os.environ))
        self._folder, self._lock_fd = make_folder()
        # One for what bootrun asks, one for a load, or ahead of it: neither may take the other's answer away.
        self._resolver, self._pinner = (
            Resolver(self._selector, self._fork, self._say, self._say_alive) for _ in range(2)
        )
        self._paths = RankPaths(
            self._folder, self._selector, self._fork, self._say, self._say_alive, self._note_damage
        )
        self._is_over = False

    # ---- loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._selector.register(self._launcher.fd, selectors.EVENT_READ, self._hear_launcher)
            while not self._is_over:
                for key, _ in self._selector.select(1.0):
                    # An earlier one may have ended it, and another have its number.
                    if self._selector.get_map().get(key.fileobj) == key:
                        key.data()
                self._tick()
        finally:
            self._end()

    def _end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the guard's, at the end of the job
        self._resolver.drop()
        self._pinner.drop()
        self._paths.drop()
        self._stop_copier()
        if self._server is not None and self._server.is_used:
            self._release(complete=False)
        self._drop_arena()
        if self._offers is not None:
            self._offers.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_fd)

    def _tick(self) -> None:
        """About every second."""
        if self._server is not None:
            self._server.tick()
        self._resolver.tick()
        self._pinner.tick()
        self._paths.tick()
        self._ask_again()
        limit_s = float(self._start.get("quiet_s", QUIET_S))
        if self._quiet_since_s is not None and time.monotonic() - self._quiet_since_s > limit_s:
            self._quiet_since_s = None
            self._release(complete=True)

    # ---- orders ----------------------------------------------------------------------------------------------

    def _hear_launcher(self) -> None:
        lines = self._launcher.receive()
        if lines is None:
            self._is_over = True
            return
        for order in lines:
            match order.get("do"):
                case "start":
                    self._url, self._start = str(order["url"]), order
                    self._paths.peers = str(order.get("peers") or "")
                    limit = int(order.get("arena_bytes") or 0)
                    if limit and self._offers is None:
                        self._offers = Offers(self._folder, self._selector, limit)
                    saves = "" if self._offers is None else self._offers.address
                    self._answer("listening", saves=saves, shown=redact(self._url))
                    self._look_ahead()
                case "resolve":
                    self._resolve(list(order.get("without") or ()), bool(order.get("falls_back")))
                case "load":
                    self._begin_load(order)
                case "release":
                    self._release(complete=True)
                case "copy":
                    self._start_copier()
                    if self._copier is None:
                        self._answer("copied", why="it is not in this node's memory, or has no sums to check")
                case "statistics":
                    self._answer("statistics", **self._statistics())
                case "end":
                    self._is_over = True

    def _answer(self, did: str, **fields: object) -> None:
        self._launcher.send({"did": did, **fields})

    def _answer_load(self, did: str, **fields: object) -> None:
        self._answer(did, attempt=int(self._load["attempt"]), **fields)

    def _say(self, text: str) -> None:
        self._answer("said", text=text)

    def _say_alive(self) -> None:
        self._answer("alive")

    # ---- which version ---------------------------------------------------------------------------------------

    @property
    def _is_eager(self) -> bool:
        return bool(self._start.get("is_eager", True))

    def _look_ahead(self) -> None:
        """Before anybody has asked: the version that will probably be loaded, to make memory ready for it."""
        if not self._is_eager:
            return

        def found(news: dict[str, Any]) -> None:
            if "pinned" in news and self._state is State.IDLE:
                self._get_ready(_to_pinned(news["pinned"]))

        self._pinner.ask(self._url, "", "", found)

    def _get_ready(self, pinned: Pinned) -> None:
        """Memory that will surely be filled is made before it is."""
        self._use(pinned)
        if self._filler is not None and self._is_whole:
            spare = self._spare
            files = [number for number, file in enumerate(pinned.files) if file.path not in spare]
            self._filler.lines.send({"populate": files})

    def _resolve(self, without: list[str], falls_back: bool) -> None:
        def found(news: dict[str, Any]) -> None:
            if "pinned" in news:
                pinned = _to_pinned(news["pinned"])
                for why in news.get("damaged") or ():
                    self._say(
                        f"warning: an older version is loaded, {pinned.version}, as the newest is damaged: {why}"
                    )
                passed = list(news.get("passed") or ())
                self._answer(
                    "resolved", version=pinned.version, digest=pinned.digest, bytes=pinned.size, passed=passed
                )
                if self._state is State.IDLE and self._is_eager:
                    self._get_ready(pinned)
            elif "absent" in news:
                self._answer("absent", why=news["absent"], kind=news["kind"])
            else:
                self._answer("unresolved", why=news["failed"], older=news.get("older"))

        if self._state is State.IDLE:
            self._pinner.drop()  # it looks ahead for the same
        self._resolver.ask(self._url, "", "", found, without, falls_back=falls_back)

    # ---- loading ---------------------------------------------------------------------------------------------

    def _begin_load(self, order: dict[str, Any]) -> None:
        # Of a mount the kernel would answer from what the last attempt has read, and none be recorded.
        self._paths.drop()
        self._stop_copier()  # what it holds takes memory
        self._load, self._from_disk_bytes = order, 0
        self._position = prefetch.Position(
            int(order["world_size"]), int(order["nnodes"]), int(order["group_rank"])
        )
        self._fillers = 0
        self._planned, self._is_waiting, self._must_be_whole = set(), False, False
        self._away, self._away_why, self._has_failed = {}, "", False
        digest = str(order["digest"])
        self._state = State.PINNING
        if self._pinned is not None and self._pinned.digest == digest:
            self._serve(self._pinned)
            return

        def found(news: dict[str, Any]) -> None:
            if "pinned" in news:
                self._serve(_to_pinned(news["pinned"]))
            else:
                # This node may see only another version; one that is there under its name is what was ordered.
                self._go_own(str(news.get("failed") or news.get("absent")), REFUSED)

        self._pinner.ask(self._url, str(order["version"]), digest, found)

    def _serve(self, pinned: Pinned) -> None:
        """Prefetches what the plan says; ranks are told where the arena is."""
        self._use(pinned)
        arena, server = self._arena, self._server
        if arena is None or server is None or self._filler is None:
            return  # `_use` has said why
        files = {file.path: file for file in arena.files}
        server.begin_attempt()
        self._quiet_since_s = None
        plan = prefetch.plan(
            files,
            self._recordings.load(files, self._position),
            self._capacity().bytes,
            self._position,
            self._is_whole,
            self._spare,
        )
        numbers = {file.path: number for number, file in enumerate(arena.files)}
        units: dict[tuple[int, int], None] = {}
        for piece in plan.ranges:
            number = numbers[piece.path]
            length = arena.unit_bytes[number]
            for unit in range(piece.start // length, -(-piece.end // length)):
                units[number, unit] = None
        self._planned = {each for each in units if arena.state(*each) != READY and self._admit(each)}
        self._state = State.LOADING
        self._moved()
        if self._planned:
            self._filler.lines.send({"prefetch": [each for each in units if each in self._planned]})
        # Of several nodes those that read it whole the last time get it as links as well.
        has_own = own_path(self._url, pinned.version) != ""
        self._is_waiting = self._is_whole or (plan.kind == prefetch.WHOLE and not has_own)
        self._advance()

    @property
    def _spare(self) -> frozenset[str]:
        """Files that hold the same weights as others: they are read by who opens them."""
        assert self._pinned is not None
        if self._start.get("whole") or self._must_be_whole:
            return frozenset()
        return doubles([file.path for file in self._pinned.files])

    @property
    def _needed_bytes(self) -> int:
        assert self._pinned is not None
        spare = self._spare
        return sum(file.layout.size for file in self._pinned.files if file.path not in spare)

    @property
    def _is_whole(self) -> bool:
        """Whether all of it is wanted before anything is known of who reads what.

        Not where parts of it are other nodes': of DCP folders, and with several nodes of more than one file.
        """
        assert self._pinned is not None
        if self._start.get("whole") or self._must_be_whole:
            return True
        if int(self._start.get("nodes") or 1) > 1 and len(self._pinned.files) > 1:
            return False
        return not any(file.path.rpartition("/")[2] == DCP_METADATA for file in self._pinned.files)

    def _advance(self) -> None:
        """After a unit has come: tells how far it is, or that all is there."""
        arena, server = self._arena, self._server
        if self._state is not State.LOADING or arena is None or server is None:
            return
        if self._planned and self._is_waiting:
            left = sum(end - start for start, end in (arena.extent(*each) for each in self._planned))
            self._tell_progress(arena.size - left, arena.size)
            return
        self._state = State.SERVING
        self._offer()
        server.is_used = True  # from now on ranks may map it, also those that only know its files' names
        address = server.address

        def shown(found: Found) -> None:
            if not found.path and not self._start.get("shows_url"):
                self._go_whole(found.why)
                return
            self._answer_load(
                "ready",
                path=found.path,
                address=address,
                disk_bytes=self._from_disk_bytes,
                taken_bytes=self._taken_bytes,
            )

        self._paths.show(self._shown, arena, address, shown)

    def _tell_progress(self, done_bytes: int, of_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s > PROGRESS_S:
            self._told_s = now_s
            self._answer_load("progress", bytes=done_bytes, of_bytes=of_bytes)

    def _go_whole(self, why: str) -> None:
        """Nothing can be mounted: all of it comes into memory, or to the disk."""
        assert self._pinned is not None
        self._state = State.LOADING
        if self._pinned.size <= self._capacity().bytes and not self._must_be_whole:
            self._say(f"warning: all of the checkpoint is read into memory, as nothing can be mounted: {why}")
            self._must_be_whole = True
            self._serve(self._pinned)
        else:
            self._go_direct(f"it does not fit in memory, and nothing can be mounted: {why}", can_mount=False)

    def _offer(self) -> None:
        """To a job that comes later, what it would have to load."""
        arena, pinned = self._arena, self._pinned
        if not self._start.get("holds") or arena is None or pinned is None:
            return
        if self._server is None or not all(arena.is_complete(number) for number in range(len(arena.files))):
            return
        try:
            warm_arenas.offer(pinned.digest, self._server.address, os.environ)
        except (BootseerError, OSError) as error:
            self._say(f"no job will find the checkpoint in memory: {error}")

    @property
    def _shown(self) -> Shown:
        pinned = self._pinned
        assert pinned is not None
        names = tuple(file.path for file in pinned.files)
        return Shown(self._url, pinned.version, pinned.digest, names, pinned.size)

    def _go_direct(self, why: str, *, can_mount: bool = True) -> None:
        """Without memory; the store is as it should be."""
        if not self._leave_memory():
            return
        shown = self._shown
        if path := own_path(self._url, shown.version):
            self._answer_load("direct", why=why, path=path)
            return

        def mounted(found: Found) -> None:
            if found.path or self._start.get("shows_url"):
                self._answer_load("direct", why=why, path=found.path)
            else:
                copy(found.why)

        def copy(why_not: str) -> None:
            self._say(f"warning: the checkpoint's files come to this node's disk first, as {why_not}")
            self._paths.show_copy(shown, copied, self._tell_progress)

        def copied(found: Found) -> None:
            if found.path:
                self._answer_load("direct", why=why, path=found.path)
            else:
                self._fail(
                    f"{why}; and {found.why}" if found.kind == REFUSED else found.why, found.kind or REFUSED
                )

        if can_mount:
            self._paths.show_mount(shown, "", mounted)
        else:
            copy(why)

    def _go_own(self, why: str, kind: str) -> None:
        """The store does not give it. Files of a single node's own disk are opened by ranks all the same."""
        self._leave_memory()
        path = own_path(self._url, str(self._load["version"]))
        if path and self._position.nnodes == 1 and os.path.exists(path):
            self._answer_load("direct", why=why, path=path)
        else:
            self._fail(why, kind)

    def _leave_memory(self) -> bool:
        """Gives up the arena; whether ranks wait for what is in it."""
        was_loading = self._state in (State.PINNING, State.LOADING)
        self._state = State.SERVING
        if was_loading:
            self._pinner.drop()
            self._drop_arena()
        else:
            self._paths.give_back(self._drop_arena)
        return was_loading

    def _fail(self, why: str, kind: str) -> None:
        """Ranks cannot have the version that was ordered."""
        if self._has_failed or not self._load:
            return
        self._has_failed, self._state, digest = True, State.SERVING, str(self._load["digest"])
        self._answer_load("failed", why=why, kind=kind, digest=digest)

    def _note_damage(self, why: str) -> None:
        """What a rank has asked for by a mount is not what it should be."""
        self._fail(why, DAMAGED)

    def _note_done(self) -> None:
        """A rank's connection has ended. When all ranks of this node have their part, memory is given up soon.

        Not while code that opens files by name may come: only its first step says that it has all.
        """
        server = self._server
        count = int(self._start.get("local_world_size") or 0)
        all_done = server is not None and not server.attached and 0 < count <= len(server.done)
        is_quiet = all_done and self._state is State.SERVING and not self._is_whole
        self._quiet_since_s = time.monotonic() if is_quiet else None

    def _release(self, complete: bool) -> None:
        """What ranks asked for is what the next load reads ahead."""
        server, arena = self._server, self._arena
        if server is not None and arena is not None and self._load:
            server.drain()
            files = {file.path: file for file in arena.files}
            made = prefetch.record(files, server.asked, self._position)
            if made is not None:
                why = self._recordings.save(files, self._position, made, complete)
                if why:
                    self._say(why)
        if complete:
            self._start_copier()
        if not self._start.get("keep"):
            self._paths.give_back(self._drop_arena)

    def _statistics(self) -> dict[str, object]:
        arena = self._arena
        states = bytes(arena.states) if arena is not None else b""
        return {
            "arena_bytes": arena.size if arena is not None else 0,
            "units": arena.units if arena is not None else 0,
            "ready_units": states.count(READY),
            "taken_bytes": arena.taken_bytes if arena is not None else 0,
            "saved_bytes": self._offers.bytes if self._offers is not None else 0,
            "readers": self._fillers,
            "ranks": self._server.attached if self._server is not None else 0,
        }

    # ---- arena -----------------------------------------------------------------------------------------------

    def _capacity(self) -> Capacity:
        asked = self._start.get("memory_bytes")
        held = self._arena.own_taken_bytes if self._arena is not None else 0
        if self._offers is not None and self._pinned is not None:
            held += self._offers.bytes_of(self._pinned.striped_version)  # other versions stay
        return allowed(read_memory(), "" if asked is None else str(int(asked)), held)

    def _use(self, pinned: Pinned) -> None:
        """Has an arena for these files and somebody to fill it."""
        if self._arena is not None and self._pinned is not None and self._pinned.digest == pinned.digest:
            return
        self._pinned = pinned
        self._bad.clear()
        if self._start.get("peers") and pinned.striped_version:
            self._answer("origin", url=store_url_of(self._url), folders=[pinned.folder])
        plain_bytes = UNIT_BYTES if self._is_whole else SHARD_UNIT_BYTES
        files = [SourceFile(file.path, file.layout.size) for file in pinned.files]
        units = [file.layout.unit_bytes if file.sums else plain_bytes for file in pinned.files]
        if self._take_warm(pinned, files, units):
            return
        capacity = self._capacity()
        mode = decide(self._needed_bytes, self._is_whole, capacity)
        if mode.name != ARENA:
            self._go_direct(mode.reason)
            return
        saved = self._find_saved(pinned)
        if self._arena is not None and self._server is not None and self._arena.fits(files, units) and not saved:
            self._stop_filler()
            if self._server.is_used or self._arena.is_held:
                self._drop_arena()  # ranks of the last attempt may still have it mapped
            else:
                self._arena.rename(files)
        else:
            self._drop_arena()
        try:
            if self._arena is None:
                self._arena = Arena(files, units, {path: held for path, (held, _) in saved.items()})
            self._serve_arena(self._arena, pinned, capacity.bytes)
            self._check_saved(saved)
        except (OSError, BootseerError) as error:
            self._go_direct(str(error))

    def _serve_arena(self, arena: Arena, pinned: Pinned, room_bytes: int) -> None:
        """Raises: OSError."""
        if self._server is None:
            self._server = ArenaServer(
                self._folder, self._selector, self._want, self._note_done, lambda: self._answer("taken")
            )
        self._server.serve(arena, pinned)
        self._room_bytes = room_bytes
        self._admitted = bytearray(arena.units)
        self._start_filler()

    def _take_warm(self, pinned: Pinned, files: list[SourceFile], units: list[int]) -> bool:
        """Whether this node's memory has it already, from `bootseer warm`: then that is the arena.

        Who holds for a later job takes it over as well: it is not read anew.
        """
        if not (self._start.get("holds") or self._is_eager):
            return False
        held = warm_arenas.take(pinned.digest, files, os.environ)
        if not held:
            return False
        self._drop_arena()
        try:
            self._arena = Arena(files, units, held)
            self._arena.set_all_ready()
            self._serve_arena(self._arena, pinned, 0)
        except (OSError, BootseerError):
            self._drop_arena()
            return False
        finally:
            for each in held.values():
                os.close(each.fd)  # the arena has its own
        self._taken_bytes = pinned.size
        self._say("the checkpoint was in this node's memory already (bootseer warm)")
        return True

    def _find_saved(self, pinned: Pinned) -> dict[str, tuple[Held, list[int]]]:
        """Files of which a saver has left something, and which units."""
        found = {}
        for file in pinned.files if self._offers is not None and pinned.striped_version else ():
            assert self._offers is not None
            left = self._offers.find(pinned.striped_version, file.path, file.layout) if file.sums else None
            if left is not None:
                found[file.path] = left
        return found

    def _check_saved(self, saved: dict[str, tuple[Held, list[int]]]) -> None:
        """Units whose sums are the manifest's need not be read; their memory is there, so it always has room."""
        arena, filler = self._arena, self._filler
        if not saved or arena is None or filler is None:
            return
        units = [
            (number, unit) for number, file in enumerate(arena.files) for unit in saved.get(file.path, ((), ()))[1]
        ]
        for file, unit in units:
            self._admitted[arena.first_unit[file] + unit] = 1
            start, end = arena.extent(file, unit)
            self._room_bytes -= end - start
        filler.lines.send({"check": units})

    def _admit(self, unit: Unit) -> bool:
        """Whether there is room for it."""
        assert self._arena is not None
        place = self._arena.first_unit[unit[0]] + unit[1]
        if not self._admitted[place]:
            start, end = self._arena.extent(*unit)
            if end - start > self._room_bytes:
                return False
            self._room_bytes -= end - start
            self._admitted[place] = 1
        return True

    def _drop_arena(self) -> None:
        self._paths.drop_links()
        self._taken_bytes = 0
        self._stop_filler()
        if self._start.get("holds") and self._server is not None and self._pinned is not None:
            warm_arenas.withdraw(self._pinned.digest, self._server.address, os.environ)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._planned = set()
        self._quiet_since_s = None

    # ---- filler ----------------------------------------------------------------------------------------------

    def _start_filler(self) -> None:
        if self._filler is not None or self._arena is None or self._pinned is None:
            return
        arena, pinned = self._arena, self._pinned
        rate = self._start.get("most_bytes_per_s")
        peers, has_disk = self._start.get("peers", ""), bool(self._start.get("disk_bytes"))
        self._filler = self._fork(
            lambda connection: run_filler(Filler(connection, self._url, pinned, arena, rate, peers, has_disk))
        )
        self._fillers += 1
        self._selector.register(self._filler.lines.fd, selectors.EVENT_READ, self._hear_filler)

    def _stop_filler(self) -> None:
        child, self._filler = self._filler, None
        if child is not None:
            end_child(child, self._selector)
            if self._arena is not None:
                self._arena.forget_taken()

    def _hear_filler(self) -> None:
        assert self._filler is not None
        lines = self._filler.lines.receive()
        for news in lines or ():
            if "ready" in news:
                self._note_units(news["ready"], "")
            elif "failed_units" in news:
                self._note_units(news["failed_units"], str(news["why"]), str(news["kind"]))
            elif "moved" in news:
                self._moved()
            elif "from_disk" in news:
                self._from_disk_bytes += int(news["from_disk"])
                self._bad.update((file, unit) for file, unit in news["bad"])
            elif "failed" in news:
                self._say(f"warning: the reader of the checkpoint has failed: {news['failed']}")
        if lines is None:
            self._replace_filler()

    def _note_units(self, found: list[list[int]], why: str, kind: str = "") -> None:
        units = [(file, unit) for file, unit in found]
        if self._server is not None:
            self._server.note_units(units, why)
        if why and self._is_waiting and not self._planned.isdisjoint(units):
            self._lack(units, why, kind)
            return
        if kind == DAMAGED:
            # A rank has asked for it, or has the last time; of an earlier version nobody wants to know.
            if self._state is not State.PINNING and self._is_of_load:
                self._fail(why, kind)
            return
        if self._away:
            for unit in units:
                self._away.pop(unit, None)
        self._moved()
        self._planned.difference_update(units)
        self._advance()

    @property
    def _is_of_load(self) -> bool:
        """Whether the arena has the version that was ordered last."""
        return self._pinned is not None and self._pinned.digest == str(self._load.get("digest"))

    def _lack(self, units: list[Unit], why: str, kind: str) -> None:
        """Ranks wait for units that cannot be had, or not now."""
        if kind != AWAY:
            self._go_own(why, kind)
            return
        if not self._away:
            self._say(f"trying again: {why}")
        self._away.update(dict.fromkeys(units))
        self._away_why, self._away_again_s = why, time.monotonic() + AWAY_WAIT_S

    def _moved(self) -> None:
        """Bytes come."""
        self._moved_s = time.monotonic()

    def _ask_again(self) -> None:
        """For what the store could not give, until nothing has come for too long."""
        if self._state is not State.LOADING or not self._is_waiting or self._filler is None:
            return
        now_s = time.monotonic()
        if now_s - self._moved_s > AWAY_S:
            why = f"nothing of it has come for {AWAY_S:g} s"
            self._go_own(f"{why}: {self._away_why}" if self._away_why else why, AWAY)
            return
        self._say_alive()
        if not self._away or now_s < self._away_again_s or self._arena is None:
            return
        self._away_again_s = float("inf")
        for unit in self._away:
            if self._arena.state(*unit) == FAILED:
                self._arena.set_state(*unit, EMPTY)
        self._filler.lines.send({"prefetch": list(self._away)})

    def _replace_filler(self) -> None:
        """It has died: what is ready stays, the rest is asked for again."""
        self._stop_filler()
        if self._arena is not None and self._server is not None:
            # It may have died before it could tell what it had made ready.
            arena, asked = self._arena, {*self._server.wanted(), *self._planned}
            self._note_units([list(each) for each in asked if arena.state(*each) == READY], "")
        if self._fillers >= MOST_FILLERS:
            self._go_direct(f"the process that reads it has died {self._fillers} times")
            return
        try:
            self._start_filler()
        except OSError as error:
            self._go_direct(f"no process could be started to read it: {error.strerror}")
            return
        if self._filler is not None and self._server is not None and self._arena is not None:
            self._filler.lines.send({"want": self._server.wanted()})
            self._filler.lines.send({"prefetch": sorted(self._planned)})

    def _want(self, units: list[Unit]) -> dict[Unit, str]:
        """Ranks wait for these. Tells which have no room."""
        assert self._arena is not None
        refused = {unit: "the arena has no room for more" for unit in units if not self._admit(unit)}
        wanted = [unit for unit in units if unit not in refused]
        for unit in wanted:
            if self._arena.state(*unit) == FAILED:
                self._arena.set_state(*unit, EMPTY)  # another try for another question
        if self._filler is not None and wanted:
            self._filler.lines.send({"want": wanted})
        return refused

    # ---- the node's disk -------------------------------------------------------------------------------------

    def _start_copier(self) -> None:
        """Of what lies on this node's disk anyway there is no copy."""
        arena, pinned, most_bytes = self._arena, self._pinned, int(self._start.get("disk_bytes") or 0)
        if not most_bytes or arena is None or pinned is None or self._copier is not None:
            return
        if not can_keep(pinned.files) or disk_folder(self._url) is not None:
            return
        bad = frozenset(self._bad)
        try:
            self._copier = self._fork(lambda connection: run_copier(connection, pinned, arena, most_bytes, bad))
        except OSError as error:
            self._say(f"{NOT_KEPT}: no process could be started to write it: {error.strerror}")
            return
        self._selector.register(self._copier.lines.fd, selectors.EVENT_READ, self._hear_copier)

    def _hear_copier(self) -> None:
        assert self._copier is not None
        lines = self._copier.lines.receive()
        for news in lines or ():
            if "copied" in news:
                if news["copied"]:
                    self._say(f"{NOT_KEPT}: {news['copied']}")
                else:
                    self._bad.clear()
                self._answer("copied", why=str(news["copied"]))
            else:
                self._answer("copying", bytes=news["bytes"], of_bytes=news["of_bytes"])
        if lines is None:
            self._stop_copier()

    def _stop_copier(self) -> None:
        child, self._copier = self._copier, None
        if child is not None:
            end_child(child, self._selector)

    # ---- processes -------------------------------------------------------------------------------------------

    def _fork(self, work: Callable[[socket.socket], None]) -> Child:
        return fork_child(work, self._be_child)

    def _be_child(self) -> None:
        """What is the keeper's must not stay open here: its ranks and bootrun would not see it end."""
        self._launcher.close()
        if self._server is not None:
            self._server.close_inherited()
        if self._offers is not None:
            self._offers.close_inherited()
        self._resolver.close_inherited()
        self._pinner.close_inherited()
        self._paths.close_inherited()
        for child in (self._filler, self._copier):
            if child is not None:
                child.lines.close()


def _to_pinned(record: object) -> Pinned:
    return msgspec.convert(record, type=Pinned)


def main() -> NoReturn:
    """Serves until standard input ends."""
    os.umask(0o077)
    allow_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # bootrun decides

    def leave(_signum: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    status = 0
    try:
        Keeper(take_streams()).run()
    except SystemExit:
        pass
    except CheckpointError as error:
        print(f"bootseer: error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
