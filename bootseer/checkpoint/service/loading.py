"""The loads of a job's ranks on one node: the memory, the path for code that opens files by name, and the answers.

In: orders of bootrun, and what happens to the memory (node_memory.py). Out: for each load, one answer `ready`,
`direct` or `failed` (service.py). If memory, mounts or the store do not work, ranks get the files by the next
method. When all ranks have their parts, their reads are recorded, and the memory is released.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

from bootseer.checkpoint.io.arena import Unit
from bootseer.checkpoint.opening import store_url_of
from bootseer.checkpoint.service import prefetch
from bootseer.checkpoint.service.awaited_units import AwaitedUnits
from bootseer.checkpoint.service.filler import AWAY, DAMAGED, REFUSED
from bootseer.checkpoint.service.needs import Needs
from bootseer.checkpoint.service.node_memory import MemoryEvents, NodeMemory
from bootseer.checkpoint.service.process import Answers, Fork
from bootseer.checkpoint.service.rank_paths import RankPath, RankPathProvider, ShownVersion, own_path
from bootseer.checkpoint.service.release import MemoryRelease
from bootseer.checkpoint.service.resolving import News, Resolver, pinned_of
from bootseer.checkpoint.service.start_options import StartOptions
from bootseer.checkpoint.versions.pinned import Pinned
from bootseer.logs import get_logger
from bootseer.tuning import current

_log = get_logger(__name__)

MAX_FILLERS = 3  # that may die before ranks get their files by another method
PROGRESS_S = 0.5


class State(Enum):
    IDLE = "idle"
    PINNING = "pinning"  # a load was requested, its files are being resolved
    LOADING = "loading"  # the files are being read; the answer is pending
    SERVING = "serving"


class Loader:
    """One load at a time; runs on the service's loop."""

    def __init__(self, directory: str, selector: selectors.BaseSelector, fork: Fork, answers: Answers) -> None:
        """Args: directory: of the service."""
        self._answers = answers
        self._options = StartOptions()
        self._state = State.IDLE
        self._order: Mapping[str, Any] = {}  # the last order `load`
        self._position = prefetch.Position(1, 1, 0)
        self._awaited = AwaitedUnits()
        self._must_be_whole = False  # only links into memory are possible
        self._has_failed = False  # the load; the failure was reported
        self._reported_s = 0.0  # time of the last answer `progress`
        self._pinner = Resolver(selector, fork, answers.say_alive)
        self._paths = RankPathProvider(directory, selector, fork, answers.say_alive, self._report_damage)
        events = MemoryEvents(
            noted=self._note_units,
            moved=self._note_progress,
            filler_ended=self._replace_filler,
            rank_done=self._on_rank_done,
            taken=lambda: answers.send("taken"),
            dropped=self._on_drop,
        )
        self._memory = NodeMemory(directory, selector, fork, events)
        self._release = MemoryRelease(
            self._memory, lambda: self._paths.give_back(self._memory.drop), selector, fork, answers
        )

    def start(self, options: StartOptions) -> str:
        """Set the options; return the address at which savers leave units, "" if they may not."""
        self._options = options
        self._paths.peers = options.peers
        self._release.start(options)
        return self._memory.start(options)

    def end(self) -> None:
        """Release everything."""
        self._pinner.drop()
        self._paths.drop()
        self._release.end()
        if self._memory.is_used:
            self.release(complete=False)
        self._memory.end()

    def tick(self) -> None:
        """Run about every second."""
        self._memory.tick()
        self._pinner.tick()
        self._paths.tick()
        self._retry_units()
        if self._release.is_due():
            self.release(complete=True)

    def statistics(self) -> dict[str, int]:
        """Return the counts of an answer `statistics`."""
        return self._memory.statistics()

    # ---- ahead of a load -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no load was requested, and the memory was not refused."""
        return self._state is State.IDLE

    def look_ahead(self) -> None:
        """Find the version that will probably be loaded, to prepare memory before a request."""

        def found(news: News) -> None:
            if "pinned" in news and self.is_idle:
                self.prepare_ahead(pinned_of(news))

        self._pinner.ask(self._options.url, "", "", found)

    def stop_looking_ahead(self) -> None:
        self._pinner.drop()

    def prepare_ahead(self, pinned: Pinned) -> None:
        """Allocate memory early if it will certainly be filled."""
        self._prepare(pinned)
        needs = self._needs_of(pinned)
        if self._memory.is_filling and needs.is_whole:
            spare = needs.spare
            files = [number for number, file in enumerate(pinned.files) if file.path not in spare]
            self._memory.populate(files)

    # ---- a load ----------------------------------------------------------------------------------------------

    def begin(self, order: Mapping[str, Any]) -> None:
        """Load the version of an order `load`."""
        # With a mount the kernel would answer from the last attempt's reads, and none would be recorded.
        self._paths.drop()
        self._release.end()  # a copy keeps memory in use
        self._order = order
        self._memory.begin_load()
        self._position = prefetch.Position(
            int(order["world_size"]), int(order["nnodes"]), int(order["group_rank"])
        )
        self._awaited.begin()
        self._must_be_whole = self._has_failed = False
        digest = str(order["digest"])
        self._state = State.PINNING
        known = self._memory.pinned
        if known is not None and known.digest == digest:
            self._serve(known)
            return

        def found(news: News) -> None:
            if "pinned" in news:
                self._serve(pinned_of(news))
            else:
                # This node may see only another version; but a path by version name is the requested one.
                self._serve_own_path(str(news.get("failed") or news.get("absent")), REFUSED)

        self._pinner.ask(self._options.url, str(order["version"]), digest, found)

    def _needs_of(self, pinned: Pinned) -> Needs:
        return Needs(pinned, self._options.must_be_whole or self._must_be_whole, self._options.nodes)

    def _prepare(self, pinned: Pinned) -> None:
        """Prepare memory for a version; if there is none, serve it without."""
        if self._memory.has(pinned.digest):
            return
        if self._options.peers and pinned.striped_version:
            self._answers.send("origin", url=store_url_of(self._options.url), folders=[pinned.folder])
        why = self._memory.prepare(self._needs_of(pinned))
        if why is not None:
            self._serve_direct(why)

    def _serve(self, pinned: Pinned) -> None:
        """Prefetch the planned ranges; send ranks the arena's address."""
        self._prepare(pinned)
        memory = self._memory
        if not memory.is_filling:
            return  # `_prepare` has reported the reason
        files = memory.files
        memory.begin_attempt()
        self._release.note_quiet(False)
        needs = self._needs_of(pinned)
        plan = prefetch.plan(
            files,
            self._release.last_reads(files, self._position),
            memory.capacity.bytes,
            self._position,
            needs.is_whole,
            needs.spare,
        )
        self._state = State.LOADING
        self._awaited.plan(memory.prefetch(memory.units_of(plan.ranges)), time.monotonic())
        # On several nodes, a node that read it whole the last time gets it as links as well.
        has_own = own_path(self._options.url, pinned.version) != ""
        self._awaited.is_waiting = needs.is_whole or (plan.kind == prefetch.WHOLE and not has_own)
        self._advance()

    def _advance(self) -> None:
        """Report progress after a unit is ready, or that all are ready."""
        memory = self._memory
        if self._state is not State.LOADING or not memory.is_served:
            return
        if self._awaited.holds_ranks:
            self._send_progress(memory.size - memory.bytes_of(self._awaited.planned), memory.size)
            return
        self._state = State.SERVING
        arena, address = memory.hand_out()

        def shown(found: RankPath) -> None:
            if not found.path and not self._options.shows_url:
                self._load_whole(found.why)
                return
            self._answer(
                "ready",
                path=found.path,
                address=address,
                disk_bytes=memory.from_disk_bytes,
                taken_bytes=memory.taken_bytes,
            )

        self._paths.show(self._shown, arena, address, shown)

    def _answer(self, did: str, **fields: object) -> None:
        """Answer the last order `load`."""
        self._answers.send(did, attempt=int(self._order["attempt"]), **fields)

    def _send_progress(self, done_bytes: int, of_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s > PROGRESS_S:
            self._reported_s = now_s
            self._answer("progress", bytes=done_bytes, of_bytes=of_bytes)

    # ---- other methods ---------------------------------------------------------------------------------------

    def _load_whole(self, why: str) -> None:
        """Load the whole checkpoint into memory or to the disk, because mounts are unavailable."""
        pinned = self._memory.pinned
        assert pinned is not None
        self._state = State.LOADING
        if pinned.size <= self._memory.capacity.bytes and not self._must_be_whole:
            _log.warning("reading all of the checkpoint into memory: mounts are unavailable: %s", why)
            self._must_be_whole = True
            self._serve(pinned)
        else:
            self._serve_direct(f"it does not fit in memory, and mounts are unavailable: {why}", can_mount=False)

    @property
    def _shown(self) -> ShownVersion:
        pinned = self._memory.pinned
        assert pinned is not None
        names = tuple(file.path for file in pinned.files)
        return ShownVersion(self._options.url, pinned.version, pinned.digest, names, pinned.size)

    def _serve_direct(self, why: str, *, can_mount: bool = True) -> None:
        """Serve without memory; the store itself works."""
        if not self._leave_memory():
            return
        shown = self._shown
        if path := own_path(self._options.url, shown.version):
            self._answer("direct", why=why, path=path)
            return

        def mounted(found: RankPath) -> None:
            if found.path or self._options.shows_url:
                self._answer("direct", why=why, path=found.path)
            else:
                copy(found.why)

        def copy(why_not: str) -> None:
            _log.warning("copying the checkpoint's files to this node's disk first: %s", why_not)
            self._paths.show_copy(shown, copied, self._send_progress)

        def copied(found: RankPath) -> None:
            if found.path:
                self._answer("direct", why=why, path=found.path)
            else:
                self._fail(
                    f"{why}; and {found.why}" if found.kind == REFUSED else found.why, found.kind or REFUSED
                )

        if can_mount:
            self._paths.show_mount(shown, "", mounted)
        else:
            copy(why)

    def _serve_own_path(self, why: str, kind: str) -> None:
        """Serve without the store, which fails: ranks of a single node can still open files of its own disk."""
        self._leave_memory()
        path = own_path(self._options.url, str(self._order["version"]))
        if path and self._position.nnodes == 1 and os.path.exists(path):
            self._answer("direct", why=why, path=path)
        else:
            self._fail(why, kind)

    def _leave_memory(self) -> bool:
        """Release the arena; return whether ranks wait for the load."""
        was_loading = self._state in (State.PINNING, State.LOADING)
        self._state = State.SERVING
        if was_loading:
            self._pinner.drop()
            self._memory.drop()
        else:
            self._paths.give_back(self._memory.drop)
        return was_loading

    def _fail(self, why: str, kind: str) -> None:
        """Report that ranks cannot get the requested version."""
        if self._has_failed or not self._order:
            return
        self._has_failed, self._state, digest = True, State.SERVING, str(self._order["digest"])
        self._answer("failed", why=why, kind=kind, digest=digest)

    def _report_damage(self, why: str) -> None:
        """Report damage in bytes that a rank has requested through a mount."""
        self._fail(why, DAMAGED)

    # ---- what happens to the memory --------------------------------------------------------------------------

    def _note_units(self, units: list[Unit], why: str, kind: str) -> None:
        if why and self._awaited.holds_for(units):
            self._handle_missing(units, why, kind)
            return
        if kind == DAMAGED:
            # A rank has requested it, now or the last time; damage of an earlier version does not matter.
            if self._state is not State.PINNING and self._is_of_load:
                self._fail(why, kind)
            return
        self._awaited.settle(units, time.monotonic())
        self._advance()

    @property
    def _is_of_load(self) -> bool:
        """Whether the arena has the version that was requested last."""
        pinned = self._memory.pinned
        return pinned is not None and pinned.digest == str(self._order.get("digest"))

    def _handle_missing(self, units: list[Unit], why: str, kind: str) -> None:
        """Handle units that ranks wait for and that cannot be read, or not now."""
        if kind != AWAY:
            self._serve_own_path(why, kind)
        elif self._awaited.add_away(units, why, time.monotonic()):
            _log.info("trying again: %s", why)

    def _note_progress(self) -> None:
        self._awaited.move(time.monotonic())

    def _retry_units(self) -> None:
        """Retry units that the store could not deliver, until no bytes arrive for too long."""
        if self._state is not State.LOADING or not self._awaited.is_waiting or not self._memory.is_filling:
            return
        now_s = time.monotonic()
        if why := self._awaited.why_given_up(now_s, current().checkpoint.store_silence_s):
            self._serve_own_path(why, AWAY)
            return
        self._answers.say_alive()
        if units := self._awaited.take_retries(now_s):
            self._memory.retry(units)

    def _replace_filler(self) -> None:
        """Replace a dead filler: ready units stay, the rest is requested again."""
        self._memory.stop_filler()
        self._memory.note_finished(self._awaited.planned)
        if self._memory.fillers >= MAX_FILLERS:
            self._serve_direct(f"the process that reads it has died {self._memory.fillers} times")
            return
        try:
            self._memory.start_filler()
        except OSError as error:
            self._serve_direct(f"cannot start a process to read it: {error.strerror}")
            return
        self._memory.request_again(self._awaited.planned)

    def _on_drop(self) -> None:
        self._paths.drop_links()
        self._awaited.forget_planned()
        self._release.note_quiet(False)

    # ---- after a load ----------------------------------------------------------------------------------------

    def _on_rank_done(self) -> None:
        """Handle the end of a rank's connection. Memory is released soon after all local ranks have their part.

        Not while code may still open files by name: only its first step shows that it has all.
        """
        pinned = self._memory.pinned
        self._release.note_quiet(
            self._memory.all_have_their_part(self._options.local_world_size)
            and self._state is State.SERVING
            and pinned is not None
            and not self._needs_of(pinned).is_whole
        )

    def release(self, *, complete: bool) -> None:
        """Record the reads of ranks and release the memory; with `complete`, also copy to the disk."""
        self._release.release(self._position if self._order else None, complete=complete)

    def copy(self) -> None:
        """Copy the checkpoint to this node's disk."""
        self._release.copy()
