"""How the keeper of an environment runs set-up: watched, so that what it does can be kept; or the commands alone.

Out: the environment is there, which bootrun is told, and what set-up did. A command that fails is the job's error.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import NamedTuple

from bootseer.env import pip_bytecode
from bootseer.env.capture import Capture, Changes
from bootseer.env.image_target import commands_of
from bootseer.env.observing import Plan, decide, plan
from bootseer.env.redaction import redact_text, secret_values
from bootseer.env.settling import settle_later
from bootseer.env.setup_keeper_job import Job
from bootseer.env.setup_keeper_look import mark
from bootseer.env.setup_keeper_mount import end_spares
from bootseer.env.setup_keeper_plain import described, plain_targets
from bootseer.env.setup_run import SetupResult, run_setup
from bootseer.env.unclean import begin_setup, end_setup, why_changed
from bootseer.errors import BootseerError, StorageTimeout
from bootseer.mounts.image_shared import of_node
from bootseer.storage.cpu_limits import usable_cores

MOST_NAMED = 5


class Ran(NamedTuple):
    """Set-up that succeeded."""

    capture: Capture | str  # or why it cannot be told what the commands did
    setup_s: float


class Runner:
    """Of the commands of one job. `run` is for who is alone at the targets, `run_plainly` sees to that itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._secrets = secret_values(job.environ)

    def run(self, *, publishes: bool) -> Ran:
        """Runs the commands; the environment is there. Raises: SetupFailed."""
        end_spares()  # they would wait for as long as that takes
        job = self._job
        looked, spec = job.known(), job.spec
        keyed = looked.keyed
        environ = job.setup_environ(keyed.targets)
        began_s = time.monotonic()
        capture = self._begin(environ)
        planned = plan(keyed, spec, environ, [job.log_path, *job.order["own"]])
        for note in planned.notes:
            job.say(note)
        look_s = time.monotonic() - began_s
        of_pip = pip_bytecode.variables(spec.commands, environ, job.inside, only_installs=keyed.only_installs)
        done = self._run_commands(environ | of_pip, planned)
        if of_pip and (why := self._compile(planned, environ)):
            job.say(f"warning: each rank compiles what it imports, as that could not be done before: {why}")
        if done.left_running:
            job.say(
                f"set-up left processes running, which were ended: {', '.join(done.left_running[:MOST_NAMED])}"
            )
        changes: Changes | None = None
        decided = decide(keyed, spec, job.environ, planned, done.watched)
        changed = why_changed(keyed, spec, job.environ, is_watched=decided.is_watched) or decided.why_not
        for note in decided.notes:
            job.say(note)
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
                    settle_later(keyed.targets, job.environ)
            end_setup(keyed.targets, job.environ, is_clean=not (changed or looked.unclean or changes is None))
        except BootseerError as error:
            job.say(f"warning: what set-up did cannot be kept: {error}")
            capture = str(error)
        if changed and isinstance(capture, Capture):
            job.say(f"warning: {changed}, so what it made is not kept")
            capture = changed
        if changes is not None:
            look_s += changes.took_s
            if changes.outside and publishes:
                self._warn_of(changes.outside)
        job.is_publishing = isinstance(capture, Capture) and publishes
        job.ready("installed", "", setup_s=done.took_s, capture_s=look_s)
        return Ran(capture, done.took_s)

    def run_plainly(self, why: str) -> None:
        """Runs the commands and nothing else. Raises: SetupFailed, and what else ends the job."""
        job = self._job
        targets = plain_targets(job.spec, job.environ)
        if why:
            job.say(f"warning: {why}; set-up is run, and what it does is not kept")
        job.is_publishing = False
        with ExitStack() as stack:
            try:
                job.come_alone(stack, targets)
            except (BootseerError, OSError) as error:
                if isinstance(error, StorageTimeout):
                    raise
                if described(error) not in job.why_no_key:
                    job.say(
                        f"warning: whether another process is at its folder cannot be told: {described(error)}"
                    )
            self._note_plain(targets, is_over=False)
            done = self._run_commands(job.setup_environ(targets))
            self._note_plain(targets, is_over=True)
        job.ready("installed", "", setup_s=done.took_s)

    def _begin(self, environ: dict[str, str]) -> Capture | str:
        """Begins to watch what set-up does, or says why that cannot be told."""
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
            job.say(f"warning: what set-up does cannot be kept: {error}")
            return str(error)
        return capture

    def _run_commands(self, environ: dict[str, str], planned: Plan | None = None) -> SetupResult:
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

    def _compile(self, planned: Plan, environ: dict[str, str]) -> str:
        """What pip has left to us. Returns: why that could not be done; "" if it was."""
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
        named = ", ".join(outside[:MOST_NAMED])
        more = len(outside) - MOST_NAMED
        self._job.say(
            f"warning: set-up wrote outside its targets, which is not kept: {named}"
            f"{f' and {more} more' if more > 0 else ''}"
        )

    def _note_plain(self, targets: list[str], *, is_over: bool) -> None:
        """What plain set-up leaves is in no key either: nothing may be kept that is made on top of it."""
        try:
            if is_over:
                end_setup(targets, self._job.environ, is_clean=False)
            else:
                begin_setup(targets, self._job.environ)
        except (BootseerError, OSError) as error:
            self._job.say(f"warning: that set-up was run is not noted: {described(error)}")
