"""bootrun's side of the preloaded process: when it is started, what it imports, whether ranks are forked from it.

In: the launch specification, what the guard tells of the process, the first steps of ranks. Out: requests to the
guard, one line when ranks are exec'd although they were to be forked, the record of hot imports, events.
The rules are in fork_policy.py; which of the imports of a start may come before the script is found in a helper of
the guard (import_observe.py). Nothing here can fail a start: whatever goes wrong, ranks are exec'd.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from bootseer.light_typing import NamedTuple
from launcher.guard_client import GuardClient
from launcher.loop import Cancellable, EventLoop
from launcher.ranks import fork_policy, hot_imports
from launcher.ranks.environ import constant_environ
from launcher.ranks.program import RankProgram, compile_beside, own_program
from launcher.spec import LaunchSpec

DEFAULT_MODULES = ("torch", "torch.distributed")
# A process for restarts alone is started after the first step of all ranks, or so long after their start.
LATER_S = 30.0
AGAIN_S = 3.0  # after one that was ready was killed
# One that fails is started again without what failed, so often.
MOST_STARTS = 5
# After so many failures in a row, over several starts, only what was preloaded last is; after more, nothing.
ONLY_PROVEN_AFTER, GIVEN_UP_AFTER = 2, 5
MOST_SAID = 5  # reasons for what is left to the ranks
OBSERVE = 3  # number of the helper (recorded_start.py has the others)
EVENTS_SUFFIX = ".jsonl"
MOST_SCRIPT_BYTES = 1 << 20
SOCKET_FD = "4"
MORE = "+"  # after what is imported at first: preloaded.py waits for the rest


class State(Enum):
    NONE = "none"
    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"


class PreloadSpan(NamedTuple):
    """One preload, for the events."""

    began_ns: int
    ended_ns: int
    modules: int  # that the process has
    error: str
    is_part_of_start: bool  # the first ranks waited for it
    left_out: tuple[str, ...] = ()  # why some of what is known to be imported is left to each rank


class Preloader:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        guard: GuardClient,
        spec: LaunchSpec,
        unset: tuple[str, ...],
        say_exec: Callable[[str], object],
        note: Callable[[PreloadSpan], object],
        say_anew: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """Args: unset: variables that ranks do not get; say_exec: says why ranks are exec'd, not forked; say_anew:
        says why forked ranks have begun anew."""
        self._loop = loop
        self._guard = guard
        self._spec = spec
        self._unset = unset
        self._say_exec = say_exec
        self._note = note
        self._say_anew = say_anew
        self._program: RankProgram | None = None
        self._has_plan = False
        self._begins_anew = False  # the process ends, as ranks are run by something else
        self._plan = fork_policy.EXEC
        self._state = State.NONE
        self._starts = 0
        self._began_ns = 0
        self._modules: tuple[str, ...] = ()  # what the process imports, or imported
        self._known: tuple[str, ...] = ()  # recorded hot imports
        self._stored: tuple[str, ...] = ()  # the same, by other nodes
        self._caches_folder = ""  # of first-step caches: of the last start, then of this one
        self._has_attempt = False  # ranks were started
        self._is_guessed = False  # the process was started as if caches were where the last start had them
        self._is_all_known = False  # `begin` was called
        self._awaits_rest = False  # the process has been given only what can be imported before that
        self._dropped: dict[str, str] = {}
        self._left_out: dict[str, str] = {}  # of what was imported: what each rank imports itself, and why
        self._changes: tuple[str, ...] = ()  # what the script changes
        self._is_whole = False  # all that the last start has imported is known
        self._proven: tuple[str, ...] = ()  # what was preloaded last, by whatever start
        self._failures = 0  # since then
        self._last_failure = ""
        self._asked = ""  # files of the rank that notes what imports use, without their suffixes
        self._observed = ""  # the same, while a helper looks at them
        self._before: tuple[str, ...] = ()  # what that rank was forked with
        self._then: Callable[[], object] | None = None  # to be called when it has
        self._why = ""  # it has ended
        self._why_timeout = ""  # it was ended for this
        self._is_second = False  # it follows one that has failed
        self._timer: Cancellable | None = None
        self._later: Cancellable | None = None
        self._waiting: Callable[[bool], object] | None = None
        self._key: hot_imports.JobKey | None = None
        self._cache = ""
        self.listing_path = ""  # where the first process tells what its imports have touched, "" for nowhere

    # ---- the start -------------------------------------------------------------------------------------------

    def suggest(self, stored: Sequence[str]) -> None:
        """Before it begins: what ranks of this job have imported elsewhere. A record of our own goes first."""
        self._stored = fork_policy.filter_stored(stored)

    @property
    def hot_imports(self) -> tuple[str, ...]:
        """What is known of this job's."""
        return self._known

    def when_known(self, then: Callable[[], object]) -> None:
        """Calls `then` when they are: at once, or when a helper has looked at this start's."""
        if self._observed:
            self._then = then
        else:
            then()

    def begin_early(self, environ: Mapping[str, str], with_caches: Callable[[str], RankProgram]) -> None:
        """As `begin`, which has to follow: all is known but where first-step caches are.

        They are taken to be where the last start had them, if that is a folder. Else what may read this while it
        is imported waits for `begin`: what an earlier start, or the user, has named.

        Args: with_caches: what ranks are run by if caches are in this folder, "" for nobody knows.
        """
        began_ns = time.monotonic_ns()
        self._make_plan(environ, with_caches(""))
        folder = self._caches_folder if os.path.isdir(self._caches_folder) else ""
        program = with_caches(folder)
        if self._state in (State.LOADING, State.READY) and self._program != program:
            self._start_anew(program)
            return
        self._program = program
        if self._plan.at_once and self._state is State.NONE:
            self._is_guessed = bool(folder)
            self._start(began_ns)

    def begin(
        self, environ: Mapping[str, str], program: RankProgram | None = None, caches_folder: str = ""
    ) -> None:
        """Makes the plan, and starts the process if the first attempt is to be forked: as early as can be.

        Args: program: what ranks are run by; by default this node's interpreter; caches_folder: of first-step
            caches, which the next start will take it for; "" for none.
        """
        began_ns = time.monotonic_ns()
        program = own_program(self._spec.python) if program is None else program
        self._make_plan(environ, program)
        self._caches_folder = caches_folder
        guessed, self._program = self._program, program
        self._is_all_known = True
        if self._plan.at_once and self._state is State.NONE:
            self._start(began_ns)
        elif self._is_guessed and guessed is not None and guessed.environ.items() - program.environ.items():
            self._start_anew(program)
        elif self._awaits_rest and guessed is not None and not self._begins_anew:
            self._send_rest(guessed.environ, program.environ)
        self._is_guessed = False

    def _send_rest(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        self._awaits_rest = False
        if self._state is not State.LOADING:
            return
        changes = [f"{name}={value}" for name, value in now.items() if before.get(name) != value]
        changes += [name for name in before if name not in now]
        self._guard.preload_rest(self._starts, changes, self._signed(self._modules))
        self._cancel_timer()
        self._timer = self._loop.call_later(self._spec.preload_timeout_s, self._on_timeout)

    def _start_anew(self, program: RankProgram) -> None:
        """What was begun is of no use."""
        if self._state in (State.LOADING, State.READY):
            self._begins_anew, self._state = True, State.LOADING
        self.move(program)

    def _make_plan(self, environ: Mapping[str, str], program: RankProgram) -> None:
        """Once."""
        if self._has_plan:
            return
        self._has_plan = True
        spec = self._spec
        mode = fork_policy.ForkMode(spec.fork_ranks)
        if mode is fork_policy.ForkMode.OFF:
            return
        entry = spec.entry
        obstacle = fork_policy.find_obstacle(entry.mode, entry.target, spec.rank_hooks, spec.numa_binding, environ)
        recorded: tuple[str, ...] | None = None
        source, trouble = b"", ""
        if not obstacle:
            python = f"{program.python}@{program.image}" if program.image else program.python
            self._key = hot_imports.make_key(python, entry.mode, entry.target)
            self._cache = hot_imports.cache_dir(environ)
            record = hot_imports.read_record(self._cache, self._key)
            if record is not None:
                # What the user names is tried again: it may have been mended, else a line says what is wrong.
                self._dropped = {name: why for name, why in record.dropped.items() if name not in spec.preload}
                self._known = record.modules
                self._caches_folder = record.caches_folder
                self._left_out, self._changes, self._is_whole = (
                    dict(record.left_out),
                    record.changes,
                    record.is_whole,
                )
                self._proven, self._failures = record.proven, record.failures
                self._last_failure = record.last_failure
                trouble = fork_policy.find_trouble(self._left_out)
                self._is_whole &= not trouble  # it may be mended, where no change of the script shows that
                if self._failures >= GIVEN_UP_AFTER:
                    obstacle = f"preloading has failed {self._failures} times in a row ({self._last_failure})"
                    if mode is fork_policy.ForkMode.AUTO:
                        self._say_exec(obstacle)
            self._known = self._known or self._stored
            recorded = self._known or None
            source = _read_source(entry.mode, entry.target)
        text = source.decode(errors="replace")
        self._plan = fork_policy.plan(
            mode,
            obstacle,
            entry.mode == "module" or fork_policy.mentions_framework(text),
            recorded,
            "" if recorded else _find_doubt(os.path.basename(entry.target), source, text),
            trouble,
        )
        if self._plan.reason:
            self._say_exec(self._plan.reason)

    def _chosen(self) -> tuple[str, ...]:
        known = self._known
        if self._failures >= ONLY_PROVEN_AFTER and self._proven:
            known = self._proven
        given = self._spec.preload  # is tried whatever is known of it, until it fails
        left_out = {name: why for name, why in self._left_out.items() if name not in given}
        return fork_policy.choose_modules(given, DEFAULT_MODULES, known, {**left_out, **self._dropped})

    def move(self, program: RankProgram) -> None:
        """Ranks are run elsewhere from now on: the image had to be opened anew."""
        self._program = program
        if self._state in (State.LOADING, State.READY):
            self._guard.unload()

    def _start(self, began_ns: int = 0) -> None:
        """Args: began_ns: since when it is being decided what to start; 0: it was known."""
        spec, of = self._spec, self._program
        assert of is not None
        chosen = at_first = self._chosen()
        if not self._is_all_known and not self._is_guessed:
            at_first = tuple(name for name in chosen if name in DEFAULT_MODULES)
        self._awaits_rest = at_first != chosen
        self._modules = chosen
        self._starts += 1
        self._state = State.LOADING
        self._began_ns = began_ns or time.monotonic_ns()
        entry = spec.entry
        argv = [of.python, "-u", of.inside, "preload", of.preloaded, SOCKET_FD, entry.mode, entry.target]
        telling = [">" + self.listing_path] if self.listing_path and not self._has_attempt else []
        telling += ["=" + what for what in self._changes]
        compile_beside(of.python)
        self._guard.preload(
            self._starts,
            [*of.prefix, *argv, *entry.args],
            {**of.environ, **constant_environ(spec, of.inherited(os.environ))},
            (*self._unset, *of.unset),
            [*telling, *self._signed(at_first), *([MORE] if self._awaits_rest else [])],
        )
        self._timer = self._loop.call_later(spec.preload_timeout_s, self._on_timeout)

    def _signed(self, names: Iterable[str]) -> list[str]:
        """As preloaded.py takes them."""
        given = self._spec.preload
        return [("!" if name in given else "?" if name in DEFAULT_MODULES else "~") + name for name in names]

    def settle(self, is_first: bool, then: Callable[[bool], object]) -> None:
        """Calls `then` with whether ranks are to be forked: now, or when the process is ready or has failed."""
        self._waiting = None
        wanted = self._plan.first if is_first else self._plan.restarts
        if wanted and self._state is State.LOADING:
            self._waiting = then
            return
        if wanted and self._state is State.ENDED:
            self._say_exec(self._why)
            self._cancel_later()  # ranks that are exec'd have enough to import: after their first step
        then(wanted and self._state is State.READY)

    def expect_fork(self) -> None:
        """An attempt ends by a failure: the next one may follow soon."""
        if self._state is State.READY and self._plan.restarts and self._spec.can_restart:
            self._guard.prepare(self._spec.nproc)

    # ---- after the start -------------------------------------------------------------------------------------

    def attempt_started(self) -> None:
        """All ranks run."""
        self._has_attempt = True
        if self._later is None and self._plan.restarts and self._spec.can_restart:
            self._later = self._loop.call_later(LATER_S, self._load_for_restarts)

    def prepare(self, events_file: str) -> None:
        """The ranks of an attempt are about to be started; local rank 0 is asked to note what imports use, unless
        that is known."""
        self._asked = ""
        if self._has_attempt and self._state is State.READY:
            return  # a restart is not to wait for it: the next start notes it
        wanted = self._plan.restarts and not self._is_whole and (self._cache or self._spec.can_restart)
        if self._key is None or not wanted or not events_file.endswith(EVENTS_SUFFIX) or self._program is None:
            return
        place = events_file.removesuffix(EVENTS_SUFFIX)
        try:
            os.close(os.open(place + ".uses", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        except OSError:
            return
        self._asked = place
        compile_beside(self._program.python)

    def first_step_seen(self, events_file: str, is_forked: bool, pid: int) -> None:
        """All ranks of this node have made their first step; `events_file` and `pid` of local rank 0."""
        if self._key is None or not events_file.endswith(EVENTS_SUFFIX):
            return
        place = events_file.removesuffix(EVENTS_SUFFIX)
        anew = self._find_begun_anew(place)
        # A forked rank lists only what it has imported itself.
        is_forked = is_forked and place not in anew
        self._before = tuple(name for name in self._modules if name not in self._spec.preload) if is_forked else ()
        if anew:
            self._say_anew(next(iter(anew.values())))
            self._is_whole = False
        if place in (self._asked, *anew):
            self._asked, self._observed = "", place
            self._guard.help(OBSERVE, "imports", [place, str(pid) if self._is_elsewhere else ""])
            return
        listing = hot_imports.read_listing(place + ".imports")
        known = {*self._known, *self._left_out, *self._modules}
        if self._is_whole and any(name not in known for name in fork_policy.filter_hot(listing)):
            self._is_whole = False  # the next start is asked
            self._remember()
        self._get_ready()

    def _find_begun_anew(self, place: str) -> dict[str, str]:
        """Which ranks have begun anew, as something was not as it was when modules were preloaded, and why."""
        folder = os.path.dirname(place)
        found = {}
        try:
            for name in sorted(os.listdir(folder)):
                if name.endswith(".anew"):
                    path = os.path.join(folder, name)
                    found[path.removesuffix(".anew")] = hot_imports.read_line(path)
                    os.unlink(path)
        except OSError:
            pass
        return found

    def on_helper_ended(self) -> None:
        """It has found what of a start's imports may come before the script; or not."""
        place, self._observed = self._observed, ""
        if place and self._take_plan(place):
            self._remember()
        then, self._then = self._then, None
        if then is not None:
            then()
        self._get_ready()

    def close(self) -> None:
        """The job is over; what a helper has not found by now is found here."""
        place, self._observed = self._observed, ""
        if place and not self._is_elsewhere:
            from launcher.ranks import import_observe

            try:
                import_observe.observe(place)
            except (OSError, ValueError):
                return
            if self._take_plan(place):
                self._remember()

    @property
    def _is_elsewhere(self) -> bool:
        """Whether ranks see other files than bootrun; what these say is to be had while they live."""
        return self._program is not None and bool(self._program.prefix)

    def _take_plan(self, place: str) -> bool:
        from launcher.ranks import import_observe

        plan = import_observe.read_plan(place + import_observe.PLAN)
        if plan is None:
            return False
        self._known = tuple(dict.fromkeys((*self._before, *plan.modules)))
        kept = {} if not self._before else self._left_out
        self._left_out = {name: why for name, why in {**kept, **plan.left_out}.items() if name not in self._known}
        changes = plan.changes if not self._before else (*self._changes, *plan.changes)
        self._changes = tuple(dict.fromkeys(changes))
        self._is_whole = True
        return True

    def _get_ready(self) -> None:
        if self._plan.restarts and self._spec.can_restart:
            self._load_for_restarts()

    def _load_for_restarts(self) -> None:
        """Starts the process for restarts, or again with what the first step has shown to be needed."""
        self._cancel_later()
        spec = self._spec
        if self._state is State.LOADING or self._starts >= MOST_STARTS:
            return
        wanted = self._chosen()
        if self._state is State.READY:
            if set(wanted) <= set(self._modules) and not self._left_out.keys() & set(self._modules):
                return
        elif spec.fork_ranks == "auto" and not self._plan.first and not fork_policy.uses_framework(self._known):
            return
        self._start()

    def _remember(self) -> None:
        if self._key is not None:
            # A cache that cannot be written only costs the next start its head start.
            record = hot_imports.Record(
                self._known,
                self._dropped,
                self._caches_folder,
                self._left_out,
                self._changes,
                self._is_whole,
                self._proven,
                self._failures,
                self._last_failure,
            )
            hot_imports.write_record(self._cache, self._key, record)

    # ---- what the guard tells --------------------------------------------------------------------------------

    def on_ready(self, number: int, count: int, _absent: list[str]) -> None:
        if number != self._starts or self._state is not State.LOADING or self._begins_anew:
            return
        self._cancel_timer()
        self._why_timeout = ""
        self._is_second = False
        self._state = State.READY
        self._note_span(count, "")
        self._go(True)
        proven = tuple(name for name in self._modules if name not in self._spec.preload)
        if self._failures or (proven != self._proven and self._known):
            self._proven, self._failures = proven, 0
            self._remember()

    def on_ended(self, number: int, module: str, why: str, is_its_fault: bool) -> None:
        """The process has failed or is gone."""
        was_loading = self._state is State.LOADING
        if number != self._starts or self._state in (State.NONE, State.ENDED):
            return
        self._cancel_timer()
        self._state = State.ENDED
        if self._begins_anew:
            self._begins_anew = False
            self._start()
            return
        is_slow = was_loading and self._why_timeout != ""
        if is_slow:
            why, self._why_timeout = self._why_timeout, ""
            module = module or "what is to be preloaded"
        module, *also = module.split("\n")  # what imports it fails with it
        text = f"{module} {why}" if module else why
        is_unnamed = not was_loading or text.startswith("it ")
        self._why = f"the preloaded process has ended: {why}" if is_unnamed else text
        if was_loading:
            self._note_span(0, text)
            # A framework that is slow on a cold node is not at fault.
            is_its_fault |= is_slow and module not in DEFAULT_MODULES
            if is_its_fault:
                failed = {name for name in (module, *also) if fork_policy.has_within(name, self._modules)}
                if not any(fork_policy.has_within(name, self._spec.preload) for name in (module, *also)):
                    self._failures, self._last_failure = self._failures + 1, text  # else it is tried again
                for name in (each for each in (module, *also) if each in failed):
                    self._dropped[name] = why if name == module else f"imports {module}, which {why}"
                self._remember()
        if self._waiting is not None:
            self._say_exec(self._why)
            self._go(False)
        elif was_loading and is_its_fault and not is_slow and self._has_attempt and not self._is_second:
            if self._chosen() != self._modules:
                self._is_second = True
                self._get_ready()  # with what is left, once
        elif (
            not (was_loading or is_its_fault)
            and self._has_attempt
            and self._plan.restarts
            and self._spec.can_restart
        ):
            self._cancel_later()
            self._later = self._loop.call_later(AGAIN_S, self._load_for_restarts)

    def on_exec_instead(self, why: str) -> None:
        """Ranks were to be forked, and are exec'd: another process is needed for the next attempt."""
        self._say_exec(why)
        if self._state is State.READY:
            self._state = State.ENDED
            self._why = why
            self._guard.unload()

    def _on_timeout(self) -> None:
        self._timer = None
        if self._awaits_rest:
            return  # for others; its own time begins when they have come
        self._why_timeout = f"was not imported within {self._spec.preload_timeout_s:g} s (--preload-timeout)"
        self._guard.unload()

    def _note_span(self, modules: int, error: str) -> None:
        first = self._plan.at_once and not self._has_attempt
        left_out = tuple(why for why in self._left_out.values() if why)[:MOST_SAID]
        self._note(PreloadSpan(self._began_ns, time.monotonic_ns(), modules, error, first, left_out))

    def _cancel_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go(self, fork: bool) -> None:
        then, self._waiting = self._waiting, None
        if then is not None:
            then(fork)


def _read_source(mode: str, target: str) -> bytes:
    """The text of a script, or of a module in the working folder; empty where there is none to be read."""
    if mode not in ("script", "run-path"):
        base = target.replace(".", "/")
        target = next((path for path in (f"{base}.py", f"{base}/__main__.py") if os.path.isfile(path)), "")
    try:
        if not os.path.isfile(target):
            return b""
        with open(target, "rb") as file:
            return file.read(MOST_SCRIPT_BYTES)
    except OSError:
        return b""


def _find_doubt(name: str, source: bytes, text: str) -> str:
    """Why it is not known what imports of a script would see, as a clause; "" for no reason."""
    if not fork_policy.mentions_framework(text):
        return ""
    conflict = fork_policy.find_environ_conflict(name, text)
    if conflict:
        return conflict
    from launcher.ranks import script_text

    doubt = script_text.find_doubt(source, fork_policy.FRAMEWORKS, sys.stdlib_module_names)
    return f"{name} {doubt} before it imports torch, and no start is on record" if doubt else ""
