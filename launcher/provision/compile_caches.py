"""bootrun's side of compile caches: has them restored before ranks start, and new entries stored afterwards.

A separate process, the compile-cache service (bootseer/env/compile_cache/service.py), does the work where ranks
run.
In: --keep-caches and related flags or their default, the program of the ranks. Out: the program with variables for
the cache directories; log lines; events. A failure only costs a cold first step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Alarm, EventLoop
from launcher.cli.setup_options import CachesOptions
from launcher.provision.answers import check_caches
from launcher.provision.waiting import WaitingLines
from launcher.ranks.program import RankProgram, inside_of
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.provision.peers import NodePeers

# How long ranks wait for caches, on top of the limit of restoring (`env.cache_seed_s` of `tuning`).
OPEN_PATIENCE_S = 70.0  # for the probe
SEED_PATIENCE_S = 30.0  # a capture of the last attempt may still run


class CachesSpan(NamedTuple):
    """One finished operation, for the events."""

    name: str  # caches, caches_seeded, caches_kept
    began_ns: int
    ended_ns: int
    facts: Mapping[str, object]
    error: str
    is_part_of_start: bool


class CachesEvents(NamedTuple):
    """Callbacks to the node."""

    said: Callable[[str], object]
    fell_back: Callable[[str], object]  # why the first step is a cold one
    noted: Callable[[CachesSpan], object]
    misplaced: Callable[[str], object]  # the store's URL is a typo: the job ends


class NodeCaches:
    """See the module's docstring; exists only if caches are kept."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: CachesEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables to remove for the service; peers: None: only the store is read."""
        assert spec.caches is not None
        self._loop = loop
        self._spec = spec
        self._options: CachesOptions = spec.caches
        self._unset = unset
        self._events = events
        self._peers = peers
        self._service: ServiceProcess | None = None
        self._program: RankProgram | None = None
        self._opened: Callable[[RankProgram], object] | None = None
        self._seeded: Callable[[], object] | None = None
        self._timer = Alarm(loop)
        self._waiting = WaitingLines(
            loop, events.said, lambda: self._began_ns, lambda time: f"waiting for compile caches: {time}"
        )
        self._began_ns = 0
        self._is_fresh = False  # restored, and no rank has run since
        self._seeds = 0  # requests that are not done
        self.folder = ""  # the directory of the caches on this node, once they are opened
        self._captures = 0  # requests that are not done

    # ---- before ranks start ----------------------------------------------------------------------------------

    def open(
        self, program: RankProgram, then: Callable[[RankProgram], object], *, is_silent: bool = False
    ) -> None:
        """Restore caches for the ranks' program; call `then` with the program and its variables in any case.

        Args: is_silent: the store has not answered this node a moment ago.
        """
        self._drop()
        self._program, self._opened = program, then
        self._began_ns = time.monotonic_ns()
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        # Bootseer's files are not visible in an image: only the probe of framework versions runs there.
        prefix, inside = (program.prefix, None) if not program.image else ((), inside_of(program))
        argv = [*prefix, *command_of("bootseer.env.compile_cache.service")]
        environ = environ if program.image else program.inherited(environ)
        try:
            self._service = ServiceProcess(self._loop, argv, environ, self._take, self._on_end, check_caches)
        except OSError as error:
            self._loop.call_soon(self._disable, f"their service cannot be started: {error.strerror}")
            return
        options = self._options
        self._service.ask(
            "open",
            python=program.python,
            store=options.store,
            dirs=dict(options.dirs),
            salt=options.salt,
            inside=inside,
            peers="" if self._peers is None else self._peers.path,
            is_silent=is_silent,
        )
        self._patience(OPEN_PATIENCE_S)

    def seed(self, then: Callable[[], object]) -> None:
        """Restore the caches before an attempt, when no rank runs; then call `then`."""
        if self._service is None or self._is_fresh:
            self._is_fresh = False
            then()
            return
        self._seeded = then
        self._began_ns = time.monotonic_ns()
        self._seeds += 1
        self._service.ask("seed")
        self._patience(SEED_PATIENCE_S)

    # ---- while they run, and after ---------------------------------------------------------------------------

    def first_step_seen(self) -> None:
        """Store new entries: all ranks of this node have made their first step."""
        self._capture()

    def attempt_over(self) -> None:
        """Store new entries after the last rank has ended, also after a crash."""
        self._is_fresh = False
        self._capture()

    def _capture(self) -> None:
        # A waiting capture has not begun, and will include all entries that exist by then.
        if self._service is not None and self._captures < 2:
            self._captures += 1
            self._service.ask("capture")

    def close(self) -> None:
        """End the service; it finishes the last capture by itself."""
        self._stop_waiting()
        service, self._service = self._service, None
        if service is None:
            return
        if self._captures:
            service.leave()
        else:
            service.close()

    # ---- answers ---------------------------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        for note in answer.get("notes", ()):
            self._events.said(note)
        match answer["did"]:
            case "origin":
                if self._peers is not None:
                    self._peers.add_origin(answer["url"], answer["folders"])
            case "opened":
                self._note("caches", answer, is_part_of_start=True)
                self._is_fresh, self.folder = True, answer["folder"]
                self._go(answer["variables"])
            case "seeded":
                self._note("caches_seeded", answer, is_part_of_start=True)
                self._seeds = max(0, self._seeds - 1)
                if not self._seeds:  # else it was for an attempt that is over: the directories are still in use
                    self._go_on()
            case "captured":
                self._captures = max(0, self._captures - 1)
                self._note("caches_kept", answer, is_part_of_start=False)
            case "failed" if answer.get("ends_job"):
                self._opened = None
                self._drop()
                self._stop_waiting()
                self._events.misplaced(answer["why"])
            case "failed":
                self._disable(answer["why"])

    def _note(self, name: str, answer: Mapping[str, Any], *, is_part_of_start: bool) -> None:
        is_news = (name == "caches" and not answer["is_cold"]) or (
            name == "caches_kept" and (answer["generation"] > 0 or answer["has_failed"])
        )
        if is_part_of_start and answer["is_lost"]:
            self._events.fell_back(answer["line"])
        elif is_news:
            self._events.said(answer["line"])
        facts: dict[str, object] = {"files": answer["files"], "bytes": answer["bytes"]}
        if is_part_of_start:
            facts["hit"] = not answer["is_cold"]
        else:
            facts |= {"generation": answer["generation"], "took_s": answer["took_s"]}
        ended_ns = time.monotonic_ns()
        self._events.noted(CachesSpan(name, self._began_ns, ended_ns, facts, "", is_part_of_start))

    def _go(self, variables: Mapping[str, str]) -> None:
        self._stop_waiting()
        then, self._opened = self._opened, None
        program = self._program
        if then is not None and program is not None:
            then(program._replace(environ={**variables, **program.environ}))

    def _go_on(self) -> None:
        self._stop_waiting()
        then, self._seeded = self._seeded, None
        if then is not None:
            then()

    def _disable(self, why: str) -> None:
        """Start ranks with a cold first step, and log the reason once."""
        self._drop()
        if self._opened is not None or self._seeded is not None:  # a start has waited for it
            name = "caches" if self._opened is not None else "caches_seeded"
            self._events.noted(CachesSpan(name, self._began_ns, time.monotonic_ns(), {}, why, True))
        self._events.fell_back(f"compile caches are not used: {why}")
        self._go({})
        self._go_on()

    # ---- trouble ---------------------------------------------------------------------------------------------

    def _on_end(self, why: str) -> None:
        self._service = None
        self._captures = 0
        self._disable(f"their service failed: {why}")

    def _patience(self, seconds: float) -> None:
        from bootseer.tuning import current

        seconds += current().env.cache_seed_s
        self._timer.set(seconds, self._on_silence, seconds)
        self._waiting.begin()

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self._waiting.stop()

    def _on_silence(self, seconds: float) -> None:
        self._stop_waiting()
        service, self._service = self._service, None
        if service is not None:
            service.kill()
        self._disable(f"their service has sent no message for {seconds:g} s")

    def _drop(self) -> None:
        self._seeds = 0
        service, self._service = self._service, None
        if service is not None:
            service.close()
