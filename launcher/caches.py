"""bootrun's side of first-step caches: has them restored before ranks start, and what is new kept afterwards.

A process of its own (bootseer/env/setup_keeper_caches.py) does the work, where ranks run. In: --keep-caches, its
like or their default, by what ranks are run. Out: the same with variables that say where they are; lines; events.
What fails costs a cold first step and nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.own_module import command_of
from launcher.loop import Alarm, EventLoop
from launcher.ranks.program import RankProgram, inside_of
from launcher.service import ServiceProcess
from launcher.setup_options import CachesOptions
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.peers import NodePeers

# Ranks wait so long for caches: more than what restoring may take (bootseer.env.caches.SEED_S) and the probe.
OPEN_PATIENCE_S = 100.0
SEED_PATIENCE_S = 60.0  # a capture of the last attempt may be under way
SAY_AFTER_S = 10.0  # that ranks wait for them, and then each SAY_EVERY_S
SAY_EVERY_S = 30.0


class CachesSpan(NamedTuple):
    """Something that was done, for the events."""

    name: str  # caches, caches_seeded, caches_kept
    began_ns: int
    ended_ns: int
    facts: Mapping[str, object]
    error: str
    is_part_of_start: bool


class CachesEvents(NamedTuple):
    """What the node is told; each a callback."""

    said: Callable[[str], object]
    fell_back: Callable[[str], object]  # why the first step is a cold one
    noted: Callable[[CachesSpan], object]
    misplaced: Callable[[str], object]  # the store is a typo: the job ends


class NodeCaches:
    """See the module's docstring; made only where caches are kept."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        events: CachesEvents,
        peers: NodePeers | None = None,
    ) -> None:
        """Args: unset: variables that the process does not get; peers: None: only the store is read."""
        assert spec.caches is not None
        self._loop = loop
        self._spec = spec
        self._options: CachesOptions = spec.caches
        self._unset = unset
        self._events = events
        self._peers = peers
        self._keeper: ServiceProcess | None = None
        self._program: RankProgram | None = None
        self._opened: Callable[[RankProgram], object] | None = None
        self._seeded: Callable[[], object] | None = None
        self._timer = Alarm(loop)
        self._saying = Alarm(loop)
        self._began_ns = 0
        self._is_fresh = False  # seeded, and no rank has run since
        self._seeds = 0  # that were asked for and are not done
        self.folder = ""  # where they are on this node, once they are opened
        self._captures = 0  # that were asked for and are not done

    # ---- before ranks start ----------------------------------------------------------------------------------

    def open(
        self, program: RankProgram, then: Callable[[RankProgram], object], *, is_silent: bool = False
    ) -> None:
        """Restores caches for what ranks are run by; calls `then` with that and the variables, in any case.

        `is_silent`: the store did not answer this node a moment ago.
        """
        self._drop()
        self._program, self._opened = program, then
        self._began_ns = time.monotonic_ns()
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        # In an image our own files are not seen: only what tells the versions of its frameworks is run there.
        prefix, inside = (program.prefix, None) if not program.image else ((), inside_of(program))
        argv = [*prefix, *command_of("bootseer.env.setup_keeper_caches")]
        environ = environ if program.image else program.inherited(environ)
        try:
            self._keeper = ServiceProcess(self._loop, argv, environ, self._take, self._on_end)
        except OSError as error:
            self._loop.call_soon(self._go_without, f"their process cannot be started: {error.strerror}")
            return
        options = self._options
        self._keeper.ask(
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
        """Before an attempt, when no rank runs: puts in order what the last one left; then calls `then`."""
        if self._keeper is None or self._is_fresh:
            self._is_fresh = False
            then()
            return
        self._seeded = then
        self._began_ns = time.monotonic_ns()
        self._seeds += 1
        self._keeper.ask("seed")
        self._patience(SEED_PATIENCE_S)

    # ---- while they run, and after ---------------------------------------------------------------------------

    def first_step_seen(self) -> None:
        """All ranks of this node have made theirs."""
        self._capture()

    def attempt_over(self) -> None:
        """No rank runs any more: what they had made is kept, also after a crash."""
        self._is_fresh = False
        self._capture()

    def _capture(self) -> None:
        # One that waits has not begun, and takes in all that is there by then.
        if self._keeper is not None and self._captures < 2:
            self._captures += 1
            self._keeper.ask("capture")

    def close(self) -> None:
        """The last capture is finished by the process itself."""
        self._stop_waiting()
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self._captures:
            keeper.leave()
        else:
            keeper.close()

    # ---- what it says ----------------------------------------------------------------------------------------

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
                if not self._seeds:  # else it was for an attempt that is over: the folders are still worked on
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
                self._go_without(answer["why"])

    def _note(self, name: str, answer: Mapping[str, Any], *, is_part_of_start: bool) -> None:
        is_news = name == "caches" or (
            name == "caches_kept" and is_worth_saying(answer["line"], answer["generation"])
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

    def _go_without(self, why: str) -> None:
        """Once; ranks start with a cold first step."""
        self._drop()
        if self._opened is not None or self._seeded is not None:  # a start has waited for it
            name = "caches" if self._opened is not None else "caches_seeded"
            self._events.noted(CachesSpan(name, self._began_ns, time.monotonic_ns(), {}, why, True))
        self._events.fell_back(f"first-step caches are not used: {why}")
        self._go({})
        self._go_on()

    # ---- trouble ---------------------------------------------------------------------------------------------

    def _on_end(self, why: str) -> None:
        self._keeper = None
        self._captures = 0
        self._go_without(f"their process has failed: {why}")

    def _patience(self, seconds: float) -> None:
        self._timer.set(seconds, self._on_silence, seconds)
        self._saying.set(SAY_AFTER_S, self._say_waiting)

    def _say_waiting(self) -> None:
        waited_s = (time.monotonic_ns() - self._began_ns) / 1e9
        self._events.said(f"still waiting for first-step caches, for {waited_s:.0f} s")
        self._saying.set(SAY_EVERY_S, self._say_waiting)

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self._saying.cancel()

    def _on_silence(self, seconds: float) -> None:
        self._stop_waiting()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.kill()
        self._go_without(f"their process has said nothing for {seconds:g} s")

    def _drop(self) -> None:
        self._seeds = 0
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()


def is_worth_saying(line: str, generation: int) -> bool:
    """PURE: whether a capture was of use, or failed; that there was nothing new is no news."""
    return generation > 0 or "not kept" in line
