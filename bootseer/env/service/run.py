"""Running of set-up by the environment service: with a capture of its changes, or the commands alone.

Out: an environment in place, the report to bootrun, and the changes. A failed command is an error of the job.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import NamedTuple

from bootseer.env.capture import pip_bytecode
from bootseer.env.capture.capture import Capture, Changes
from bootseer.env.parse.redaction import redact_text, secret_values
from bootseer.env.restore.sync import sync_later
from bootseer.env.service.commands import SetupResult, run_setup
from bootseer.env.service.image_target import commands_of
from bootseer.env.service.job import Job
from bootseer.env.service.look import mark
from bootseer.env.service.mount import end_spares
from bootseer.env.service.observing import WatchPlan, decide, plan
from bootseer.env.service.plain import error_line, plain_targets
from bootseer.env.service.unclean import begin_setup, end_setup, why_changed
from bootseer.errors import BootseerError, StorageTimeout
from bootseer.linux.cgroups import usable_cores
from bootseer.logs import get_logger
from bootseer.mounts.sandbox.shared import of_node

_log = get_logger(__name__)

MAX_NAMED = 5


class SetupRun(NamedTuple):
    """A successful set-up."""

    capture: Capture | str  # or why the changes are unknown
    setup_s: float  # the commands, and the compilation of what pip has installed


class Runner:
    """A runner of the commands of one job. `run` requires exclusive access; `run_plainly` acquires it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._secrets = secret_values(job.environ)

    def run(self, *, publishes: bool) -> SetupRun:
        """Run the commands and report the environment as ready. Raises: SetupFailed."""
        end_spares()  # otherwise they would wait during set-up
        job = self._job
        looked, spec = job.known(), job.spec
        keyed = looked.keyed
        environ = job.setup_environ(keyed.targets)
        began_s = time.monotonic()
        capture = self._begin(environ)
        planned = plan(keyed, spec, environ, [job.log_path, *job.order["own"]])
        for note in planned.notes:
            _log.line(note)
        look_s = time.monotonic() - began_s
        of_pip = pip_bytecode.variables(spec.commands, environ, job.inside, only_installs=keyed.only_installs)
        done = self._run_commands(environ | of_pip, planned)
        setup_s = done.took_s
        if of_pip:  # part of set-up, as pip would have done it
            began_s = time.monotonic()
            if why := self._compile(planned, environ):
                _log.warning("compiling after set-up disabled: %s; each rank compiles what it imports", why)
            setup_s += time.monotonic() - began_s
        if done.left_running:
            _log.info(
                "set-up left processes running, which were ended: %s", ", ".join(done.left_running[:MAX_NAMED])
            )
        changes: Changes | None = None
        decided = decide(keyed, spec, job.environ, planned, done.watched)
        changed = why_changed(keyed, spec, job.environ, is_watched=decided.is_watched) or decided.why_not
        for note in decided.notes:
            _log.line(note)
        if not changed:
            keyed = decided.keyed
            job.looked = looked._replace(keyed=keyed)
        try:
            if isinstance(capture, Capture):
                changes = capture.end()
                if not changed:
                    expires_s = None if keyed.max_age_s is None else time.time() + keyed.max_age_s
                    base = keyed.document.base
                    mark(capture.left(), keyed.key, "", base, job.environ, keyed.reads, expires_s)
                    sync_later(keyed.targets, job.environ)
            end_setup(keyed.targets, job.environ, is_clean=not (changed or looked.unclean or changes is None))
        except BootseerError as error:
            _log.warning("storing of the environment disabled: %s", error)
            capture = str(error)
        if changed and isinstance(capture, Capture):
            _log.warning("%s; the result of set-up is not stored", changed)
            capture = changed
        if changes is not None:
            look_s += changes.took_s
            if changes.outside and publishes:
                self._warn_of(changes.outside)
        job.is_publishing = isinstance(capture, Capture) and publishes
        job.ready("installed", "", setup_s=setup_s, capture_s=look_s)
        return SetupRun(capture, setup_s)

    def run_plainly(self, why: str) -> None:
        """Run the commands only. Raises: SetupFailed, and other errors that end the job."""
        job = self._job
        targets = plain_targets(job.spec, job.environ)
        if why:
            _log.warning("%s; set-up is run, and its result is not stored", why)
        job.is_publishing = False
        with ExitStack() as stack:
            try:
                job.acquire_exclusive(stack, targets)
            except (BootseerError, OSError) as error:
                if isinstance(error, StorageTimeout):
                    raise
                if error_line(error) not in job.why_no_key:
                    _log.warning("check for other processes at the targets disabled: %s", error_line(error))
            self._note_plain(targets, is_over=False)
            done = self._run_commands(job.setup_environ(targets))
            self._note_plain(targets, is_over=True)
        job.ready("installed", "", setup_s=done.took_s)

    def _begin(self, environ: dict[str, str]) -> Capture | str:
        """Begin the capture of changes, or return why it is not possible."""
        job = self._job
        keyed, spec = job.known().keyed, job.spec
        try:
            begin_setup(keyed.targets, job.environ)
            capture = Capture(
                keyed.targets,
                of_node(environ),
                inputs=[*spec.inputs, *keyed.editables],
                python=spec.python,
                cwd=spec.cwd,
                without=[job.log_path, *job.order["own"]],
                inside=job.inside,
            )
            capture.begin()
        except BootseerError as error:
            _log.warning("storing of the environment disabled: %s", error)
            return str(error)
        return capture

    def _run_commands(self, environ: dict[str, str], planned: WatchPlan | None = None) -> SetupResult:
        job, spec = self._job, self._job.spec
        job.tell("setup-began")
        return run_setup(
            commands_of(spec),
            prefix=job.inside.prefix,
            environ=environ,
            cwd=spec.cwd,
            log_path=job.log_path,
            timeout_s=spec.timeout_s,
            on_line=self._on_line,
            makes_venv=bool(spec.venv_of),
            watch=None if planned is None else planned.watch,
        )

    def _compile(self, planned: WatchPlan, environ: dict[str, str]) -> str:
        """Compile what pip has left uncompiled. Return why that failed; "" for success."""
        job = self._job
        return pip_bytecode.compile_installed(
            job.known().keyed.targets,
            planned.began_ns,
            job.spec.python,
            usable_cores(),
            of_node(environ),
            job.inside,
        )

    def _on_line(self, line: str) -> None:
        self._job.tell("line", text=redact_text(line, self._secrets))

    def _warn_of(self, outside: list[str]) -> None:
        named = ", ".join(outside[:MAX_NAMED])
        more = len(outside) - MAX_NAMED
        _log.warning(
            "set-up wrote files outside its targets, which are not stored: %s%s",
            named,
            f" and {more} more" if more > 0 else "",
        )

    def _note_plain(self, targets: list[str], *, is_over: bool) -> None:
        """Mark targets as modified by a plain set-up, as no key covers that state."""
        try:
            if is_over:
                end_setup(targets, self._job.environ, is_clean=False)
            else:
                begin_setup(targets, self._job.environ)
        except (BootseerError, OSError) as error:
            _log.warning("the run of set-up is not recorded: %s", error_line(error))
