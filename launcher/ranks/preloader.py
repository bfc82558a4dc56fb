"""bootrun's side of the fork server: when it starts, which modules it imports, whether ranks are forked from it.

In: the launch specification, the supervisor's reports about the process, the first steps of ranks. Out: requests
to the supervisor, one line if ranks are exec'd instead of forked, the record of hot imports, events. The rules are
in fork/policy.py. A helper of the supervisor (import_observe.py) finds the imports that may come before the
script. Nothing here can fail a start: after any error, ranks are exec'd.
"""

from __future__ import annotations

import os
import sys
import time

from bootseer.light_stdlib import Enum
from bootseer.light_typing import TYPE_CHECKING, Callable, Iterable, Mapping, NamedTuple, Sequence
from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.environ import constant_environ
from launcher.ranks.fork import hot_imports
from launcher.ranks.fork import policy as fork_policy
from launcher.ranks.program import RankProgram, compile_beside, own_program
from launcher.supervisor.client import SupervisorClient

if TYPE_CHECKING:
    from launcher.ranks.environ import RankOptions

DEFAULT_MODULES = ("torch", "torch.distributed")
# A fork server only for restarts starts after the first step of all ranks, or this long after their start.
LATER_S = 30.0
AGAIN_S = 3.0  # after a ready one was killed
# How often a failed fork server is started again, without the modules that failed.
MAX_STARTS = 5
GIVEN_UP_AFTER = 5  # consecutive failures, after which nothing is preloaded
MAX_REASONS = 5  # reasons for modules that are left to the ranks
OBSERVE = 3  # number of the helper (start_recorder.py has the others)
EVENTS_SUFFIX = ".jsonl"
MAX_SCRIPT_BYTES = 1 << 20
SOCKET_FD = "4"
MORE = "+"  # after the first imports: fork_server.py waits for the rest


class State(Enum):
    NONE = "none"
    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"


class PreloadSpan(NamedTuple):
    began_ns: int
    ended_ns: int
    modules: int  # number of modules in the process
    error: str
    is_part_of_start: bool  # the first ranks waited for it
    left_out: tuple[str, ...] = ()  # why each rank imports some of the known modules itself


class Preloader:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        guard: SupervisorClient,
        spec: RankOptions,
        unset: tuple[str, ...],
        log_exec: Callable[[str], object],
        note: Callable[[PreloadSpan], object],
        log_restart: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """Args: unset: variables that ranks do not get; log_exec: logs why ranks are exec'd, not forked;
        log_restart: logs why forked ranks have restarted from scratch."""
        self._supervisor = guard
        self._spec = spec
        self._unset = unset
        self._say_exec = log_exec
        self._note = note
        self._say_again = log_restart
        self._program: RankProgram | None = None
        self._has_plan = False
        self._begins_again = False  # the process ends, as ranks are now run differently
        self._plan = fork_policy.EXEC
        self._state = State.NONE
        self._starts = 0
        self._began_ns = 0
        self._modules: tuple[str, ...] = ()  # imports of the process, finished or running
        self._imports = hot_imports.JobImports(spec.preload, DEFAULT_MODULES)
        self._has_attempt = False  # ranks were started
        self._is_guessed = False  # the process was started on the assumption that caches have not moved
        self._is_all_known = False  # `begin` was called
        self._awaits_rest = False  # the process got only the modules that it can import before that
        self._asked = ""  # path of the files of the rank that records its imports, without suffixes
        self._observed = ""  # the same, while a helper reads them
        self._before: tuple[str, ...] = ()  # modules that this rank was forked with
        self._then: Callable[[], object] | None = None  # called when the helper has ended
        self._why = ""  # why it has ended
        self._why_timeout = ""  # why it was ended, if it was slow
        self._is_second = False  # it replaces one that has failed
        self._timer = Alarm(loop)
        self._later = Alarm(loop)
        self._waiting: Callable[[bool], object] | None = None
        self.listing_path = ""  # the file for the first process's list of accessed files, "" for none

    # ---- the start -------------------------------------------------------------------------------------------

    def add_stored_imports(self, stored: Sequence[str]) -> None:
        """Add imports of this job's ranks elsewhere, before the start. The local record has priority."""
        self._imports.add_stored(stored)

    @property
    def hot_imports(self) -> tuple[str, ...]:
        """The known hot imports of this job."""
        return self._imports.record.modules

    def when_known(self, then: Callable[[], object]) -> None:
        """Call `then` when they are known: at once, or when a helper has examined this start."""
        if self._observed:
            self._then = then
        else:
            then()

    def begin_early(self, environ: Mapping[str, str], with_caches: Callable[[str], RankProgram]) -> None:
        """Begin early, when only the place of compile caches is unknown; `begin` must follow.

        They are assumed to be where the last start had them, if that directory exists. Otherwise modules that may
        read the place while they are imported wait for `begin`: those named by an earlier start, or by the user.

        Args: with_caches: returns how ranks are run if caches are in this directory; "": the place is unknown.
        """
        began_ns = time.monotonic_ns()
        self._make_plan(environ, with_caches(""))
        directory = self._imports.record.caches_directory
        directory = directory if os.path.isdir(directory) else ""
        program = with_caches(directory)
        if self._state in (State.LOADING, State.READY) and self._program != program:
            self._start_again(program)
            return
        self._program = program
        if self._plan.at_once and self._state is State.NONE:
            self._is_guessed = bool(directory)
            self._start(began_ns)

    def begin(
        self, environ: Mapping[str, str], program: RankProgram | None = None, caches_directory: str = ""
    ) -> None:
        """Make the plan, and start the process as early as possible if the first attempt is to be forked.

        Args: program: how ranks are run; by default with this node's interpreter; caches_directory: of first-step
            caches, which the next start will assume; "" for none.
        """
        began_ns = time.monotonic_ns()
        program = own_program(self._spec.python) if program is None else program
        self._make_plan(environ, program)
        self._imports.set_caches_directory(caches_directory)
        guessed, self._program = self._program, program
        self._is_all_known = True
        if self._plan.at_once and self._state is State.NONE:
            self._start(began_ns)
        elif self._is_guessed and guessed is not None and guessed.environ.items() - program.environ.items():
            self._start_again(program)
        elif self._awaits_rest and guessed is not None and not self._begins_again:
            self._send_rest(guessed.environ, program.environ)
        self._is_guessed = False

    def _send_rest(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        self._awaits_rest = False
        if self._state is not State.LOADING:
            return
        changes = [f"{name}={value}" for name, value in now.items() if before.get(name) != value]
        changes += [name for name in before if name not in now]
        self._supervisor.preload_rest(self._starts, changes, self._signed(self._modules))
        self._timer.set(self._spec.preload_timeout_s, self._on_timeout)

    def _start_again(self, program: RankProgram) -> None:
        """Discard the process that was begun, and start another."""
        if self._state in (State.LOADING, State.READY):
            self._begins_again, self._state = True, State.LOADING
        self.move(program)

    def _make_plan(self, environ: Mapping[str, str], program: RankProgram) -> None:
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
            trouble = self._imports.read(environ, python, entry.mode, entry.target)
            record = self._imports.record
            if record.failures >= GIVEN_UP_AFTER:
                obstacle = f"preloading has failed {record.failures} times in a row ({record.last_failure})"
                if mode is fork_policy.ForkMode.AUTO:
                    self._say_exec(obstacle)
            recorded = record.modules or None
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

    def move(self, program: RankProgram) -> None:
        """Run ranks elsewhere from now on, as the image had to be reopened."""
        self._program = program
        if self._state in (State.LOADING, State.READY):
            self._supervisor.unload()

    def _start(self, began_ns: int = 0) -> None:
        """Args: began_ns: when the decision about the start began; 0: there was none."""
        spec, of = self._spec, self._program
        assert of is not None
        chosen = at_first = self._imports.choose()
        if not self._is_all_known and not self._is_guessed:
            at_first = tuple(name for name in chosen if name in DEFAULT_MODULES)
        self._awaits_rest = at_first != chosen
        self._modules = chosen
        self._starts += 1
        self._state = State.LOADING
        self._began_ns = began_ns or time.monotonic_ns()
        entry = spec.entry
        argv = [of.python, "-u", of.inside, "preload", of.fork_server, SOCKET_FD, entry.mode, entry.target]
        telling = [">" + self.listing_path] if self.listing_path and not self._has_attempt else []
        telling += ["=" + what for what in self._imports.record.changes]
        compile_beside(of.python)
        self._supervisor.preload(
            self._starts,
            [*of.prefix, *argv, *entry.args],
            {**of.environ, **constant_environ(spec, of.inherited(os.environ))},
            (*self._unset, *of.unset),
            [*telling, *self._signed(at_first), *([MORE] if self._awaits_rest else [])],
        )
        self._timer.set(spec.preload_timeout_s, self._on_timeout)

    def _signed(self, names: Iterable[str]) -> list[str]:
        """Mark names as fork_server.py expects them."""
        given = self._spec.preload
        return [("!" if name in given else "?" if name in DEFAULT_MODULES else "~") + name for name in names]

    def settle(self, is_first: bool, then: Callable[[bool], object]) -> None:
        """Call `then` with whether ranks are to be forked: now, or when the process is ready or has failed."""
        self._waiting = None
        wanted = self._plan.first if is_first else self._plan.restarts
        if wanted and self._state is State.LOADING:
            self._waiting = then
            return
        if wanted and self._state is State.ENDED:
            self._say_exec(self._why)
            self._later.cancel()  # exec'd ranks are busy with imports: load after their first step
        then(wanted and self._state is State.READY)

    def expect_fork(self) -> None:
        """Prepare a fork, as an attempt has failed and the next one may follow soon."""
        if self._state is State.READY and self._plan.restarts and self._spec.can_restart:
            self._supervisor.prepare(self._spec.nproc)

    # ---- after the start -------------------------------------------------------------------------------------

    def attempt_started(self) -> None:
        """Note that all ranks run."""
        self._has_attempt = True
        if not self._later.is_set and self._plan.restarts and self._spec.can_restart:
            self._later.set(LATER_S, self._load_for_restarts)

    def prepare(self, events_file: str) -> None:
        """Have local rank 0 record the use of state by imports, unless it is known; ranks are about to start."""
        self._asked = ""
        if self._has_attempt and self._state is State.READY:
            return  # a restart must not wait for it: the next start records it
        imports = self._imports
        can_be_used = imports.can_be_kept or self._spec.can_restart
        wanted = self._plan.restarts and not imports.record.is_whole and can_be_used
        if not imports.is_read or not wanted or not events_file.endswith(EVENTS_SUFFIX) or self._program is None:
            return
        place = events_file.removesuffix(EVENTS_SUFFIX)
        try:
            os.close(os.open(place + ".uses", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        except OSError:
            return
        self._asked = place
        compile_beside(self._program.python)

    def first_step_seen(self, events_file: str, is_forked: bool, pid: int) -> None:
        """Evaluate the first step of all ranks of this node; `events_file` and `pid` are local rank 0's."""
        imports = self._imports
        if not imports.is_read or not events_file.endswith(EVENTS_SUFFIX):
            return
        place = events_file.removesuffix(EVENTS_SUFFIX)
        again = _find_begun_again(place)
        # A forked rank lists only its own imports.
        is_forked = is_forked and place not in again
        self._before = imports.without_given(self._modules) if is_forked else ()
        if again:
            self._say_again(next(iter(again.values())))
            imports.forget_whole()
        if place in (self._asked, *again):
            self._asked, self._observed = "", place
            texts = [place, str(pid) if self._is_elsewhere else ""]
            self._supervisor.help(OBSERVE, "imports", "launcher.ranks.fork.import_observe", texts)
            return
        listing = hot_imports.read_listing(place + ".imports")
        record = imports.record
        known = {*record.modules, *record.left_out, *self._modules}
        if record.is_whole and any(name not in known for name in fork_policy.filter_hot(listing)):
            imports.forget_whole()
            imports.save()
        self._get_ready()

    def on_helper_ended(self) -> None:
        """Take the helper's plan of imports that may come before the script, if it has made one."""
        place, self._observed = self._observed, ""
        if place:
            self._take_plan(place)
        then, self._then = self._then, None
        if then is not None:
            then()
        self._get_ready()

    def close(self) -> None:
        """End, as the job is over; make the plan here if the helper has not finished."""
        place, self._observed = self._observed, ""
        if place and not self._is_elsewhere:
            from launcher.ranks.fork import import_observe

            try:
                import_observe.observe(place)
            except (OSError, ValueError):
                return
            self._take_plan(place)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether ranks see other files than bootrun, which can be read only while they live."""
        return self._program is not None and bool(self._program.prefix)

    def _take_plan(self, place: str) -> None:
        from launcher.ranks.fork import import_observe

        plan = import_observe.read_plan(place + import_observe.PLAN)
        if plan is not None:
            self._imports.add_plan(plan, self._before)

    def _get_ready(self) -> None:
        if self._plan.restarts and self._spec.can_restart:
            self._load_for_restarts()

    def _load_for_restarts(self) -> None:
        """Start the process for restarts, or restart it with the modules that the first step needed."""
        self._later.cancel()
        spec = self._spec
        if self._state is State.LOADING or self._starts >= MAX_STARTS:
            return
        wanted, record = self._imports.choose(), self._imports.record
        if self._state is State.READY:
            if set(wanted) <= set(self._modules) and not record.left_out.keys() & set(self._modules):
                return
        elif spec.fork_ranks == "auto" and not self._plan.first and not fork_policy.uses_framework(record.modules):
            return
        self._start()

    # ---- reports of the supervisor ---------------------------------------------------------------------------

    def on_ready(self, number: int, count: int, _absent: list[str]) -> None:
        if number != self._starts or self._state is not State.LOADING or self._begins_again:
            return
        self._timer.cancel()
        self._why_timeout = ""
        self._is_second = False
        self._state = State.READY
        self._note_span(count, "")
        self._go(True)
        self._imports.add_proven(self._modules)

    def on_ended(self, number: int, module: str, why: str, is_its_fault: bool, is_of_process: bool) -> None:
        """Handle the end of the process, failed or not."""
        was_loading = self._state is State.LOADING
        if number != self._starts or self._state in (State.NONE, State.ENDED):
            return
        self._timer.cancel()
        self._state = State.ENDED
        if self._begins_again:
            self._begins_again = False
            self._start()
            return
        is_slow = was_loading and self._why_timeout != ""
        if is_slow:
            why, self._why_timeout, is_of_process = self._why_timeout, "", False
            module = module or "the set of modules"
        module, *also = module.split("\n")  # modules that import it fail with it
        text = f"{module} {why}" if module else why
        self._why = f"the fork server has ended: {why}" if is_of_process or not was_loading else text
        if was_loading:
            self._note_span(0, text)
            # A framework that is slow on a cold node is not at fault.
            is_its_fault |= is_slow and module not in DEFAULT_MODULES
            if is_its_fault:
                self._imports.add_failure((module, *also), why, text, self._modules)
        if self._waiting is not None:
            self._say_exec(self._why)
            self._go(False)
        elif was_loading and is_its_fault and not is_slow and self._has_attempt and not self._is_second:
            if self._imports.choose() != self._modules:
                self._is_second = True
                self._get_ready()  # with the remaining modules, once
        elif (
            not (was_loading or is_its_fault)
            and self._has_attempt
            and self._plan.restarts
            and self._spec.can_restart
        ):
            self._later.set(AGAIN_S, self._load_for_restarts)

    def on_exec_instead(self, why: str) -> None:
        """Handle ranks that were exec'd instead of forked: the next attempt needs another process."""
        self._say_exec(why)
        if self._state is State.READY:
            self._state = State.ENDED
            self._why = why
            self._supervisor.unload()

    def _on_timeout(self) -> None:
        if self._awaits_rest:
            return  # for other modules; its own time begins when they have arrived
        self._why_timeout = f"was not imported within {self._spec.preload_timeout_s:g} s (--preload-timeout)"
        self._supervisor.unload()

    def _note_span(self, modules: int, error: str) -> None:
        first = self._plan.at_once and not self._has_attempt
        left_out = tuple(why for why in self._imports.record.left_out.values() if why)[:MAX_REASONS]
        self._note(PreloadSpan(self._began_ns, time.monotonic_ns(), modules, error, first, left_out))

    def _go(self, fork: bool) -> None:
        then, self._waiting = self._waiting, None
        if then is not None:
            then(fork)


def _find_begun_again(place: str) -> dict[str, str]:
    """Find ranks that restarted from scratch, as the state differed from that at preloading, and why."""
    directory = os.path.dirname(place)
    found = {}
    try:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".anew"):
                path = os.path.join(directory, name)
                found[path.removesuffix(".anew")] = hot_imports.read_line(path)
                os.unlink(path)
    except OSError:
        pass
    return found


def _read_source(mode: str, target: str) -> bytes:
    """Read the source of a script, or of a module in the working directory; empty if unreadable."""
    if mode not in ("script", "run-path"):
        base = target.replace(".", "/")
        target = next((path for path in (f"{base}.py", f"{base}/__main__.py") if os.path.isfile(path)), "")
    try:
        if not os.path.isfile(target):
            return b""
        with open(target, "rb") as file:
            return file.read(MAX_SCRIPT_BYTES)
    except OSError:
        return b""


def _find_doubt(name: str, source: bytes, text: str) -> str:
    """Return why it is unknown what a script's imports would see, as a clause; "" for no reason."""
    if not fork_policy.mentions_framework(text):
        return ""
    conflict = fork_policy.find_environ_conflict(name, text)
    if conflict:
        return conflict
    from launcher.ranks.fork import script_text

    doubt = script_text.find_doubt(source, fork_policy.FRAMEWORKS, sys.stdlib_module_names)
    return f"{name} {doubt} before it imports torch, and no start is on record" if doubt else ""
