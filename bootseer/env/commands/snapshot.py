"""`bootseer env snapshot`: runs set-up commands on this node, and publishes their changes for later starts.

Each key has one builder; others wait for it. Reasons that prevent a publication are reported before any command
runs. The targets of this node are marked, so that a start here finds them set up.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bootseer import aio
from bootseer.env.capture import pip_bytecode
from bootseer.env.capture.capture import Built, Capture
from bootseer.env.commands.common import local_key, opened, owner
from bootseer.env.exec_place import HERE
from bootseer.env.key.document import encode
from bootseer.env.key.keying import Keyed
from bootseer.env.restore.restore import exclusive_at
from bootseer.env.restore.sync import sync_later
from bootseer.env.service.commands import run_setup, setup_environ
from bootseer.env.service.look import mark
from bootseer.env.service.observing import decide, plan
from bootseer.env.service.publish import describe
from bootseer.env.service.resolving import Resolved, resolve, with_reads_of
from bootseer.env.service.unclean import begin_setup, end_setup, why_changed, why_unclean
from bootseer.env.spec import SetupSpec
from bootseer.env.store.lease import BuilderLease, Lease, WaitResult, renewing
from bootseer.env.store.store import EnvStore, FoundSnapshot, PublishedSnapshot
from bootseer.env.store.unwritable import why_unwritable
from bootseer.errors import BootseerError, ConfigError, EnvError, SetupFailed
from bootseer.linux.cgroups import usable_cores
from bootseer.logs import get_logger
from bootseer.trust import SigningKey, Trust
from bootseer.trust.trust import Signing

_log = get_logger(__name__)

Count = Callable[[int, int], None]  # more bytes and files


class SnapshotOptions(NamedTuple):
    signing: Signing = Signing()
    rebuilds: bool = False  # even if the store has one
    log_path: str = ""  # of the commands' output; "": a new file, which is removed on success
    threads: int | None = None  # that compress


class SnapshotResult(NamedTuple):
    """The snapshot in the store, and how it was made."""

    keyed: Keyed
    found: FoundSnapshot
    is_ours: bool  # False: it existed, or another process made it meanwhile
    setup_s: float  # duration of the commands, 0 if they were not run
    capture_s: float  # from their end to the published snapshot
    stored_bytes: int  # compressed size of its tree; 0 if it existed
    is_in_place: bool = False  # the targets have it already, so no other snapshot can be made of them


def snapshot(
    spec: SetupSpec,
    options: SnapshotOptions,
    environ: Mapping[str, str],
    *,
    on_line: Callable[[str], object],
    count: Count,
) -> SnapshotResult:
    """Return the snapshot of a spec; make it if the store has none. Args: on_line: gets the commands' output.

    Raises: SetupFailed; CaptureRefused; EnvError if nothing can be published; ConfigError; StorageError.
    """
    trust = Trust.load(environ)
    signing = options.signing.key(trust)
    with opened(spec.store, trust=trust, may_be_new=True) as envs:
        here = local_key(spec, environ, envs, recovers=True)
        keyed, there, known = here.keyed, here.there, here.found
        if known is not None and not options.rebuilds:
            return SnapshotResult(keyed, known, False, 0.0, 0.0, 0, is_in_place=there is not None)
        if there is not None:
            raise EnvError(
                f"{', '.join(keyed.targets)}: has this environment already, so the changes of set-up are not"
                " known; recreate the directory, and run this again"
            )
        if why := why_unwritable(spec.store):
            raise ConfigError(why)
        replaces = 0 if known is None else known.generation
        cannot = aio.run_sync(envs.prepare_reads(keyed.guess_key, encode(keyed.guess), signing))
        if cannot is not None:
            raise EnvError(cannot.why)

        now = keyed.look(environ)

        async def until() -> Resolved | None:
            resolved = await resolve(envs, keyed, now, time.time())
            found = resolved.found
            if found is None or (found.snapshot.key == keyed.key and found.generation <= replaces):
                return None
            return resolved

        leases = BuilderLease(envs.store, owner=owner())
        seen = aio.run_sync(leases.look(keyed.key))
        if seen is not None and seen.is_working:
            _log.info(
                "waiting at most %g s for %s, which is building the snapshot", spec.wait_s, seen.holder.owner
            )
        taken = aio.run_sync(leases.acquire(keyed.key, until, spec.wait_s))
        if isinstance(taken, WaitResult):
            resolved = taken.found
            assert resolved.found is not None, "the wait has ended"
            return SnapshotResult(resolved.keyed, resolved.found, False, 0.0, 0.0, 0)
        if not isinstance(taken, Lease):
            raise EnvError(taken.why)
        with renewing(taken) as lease, exclusive_at(keyed.targets, environ=environ, wait_s=spec.wait_s):
            again = local_key(spec, environ, is_logged=False)
            key = with_reads_of(keyed, again.keyed, again.keyed.look(environ)).key
            if key != keyed.key or again.there is not None:
                raise EnvError(f"{', '.join(keyed.targets)}: another job has changed it meanwhile; run this again")
            if unclean := why_unclean(keyed.targets, environ):
                raise EnvError(unclean)
            making = _SnapshotBuilder(spec, keyed, environ, envs, lease)
            return making.run(options, signing, replaces, on_line, count)


class _SnapshotBuilder:
    """One set-up and its capture, by the holder of the lease."""

    def __init__(
        self,
        spec: SetupSpec,
        keyed: Keyed,
        environ: Mapping[str, str],
        envs: EnvStore,
        lease: Lease,
    ) -> None:
        self._spec, self._keyed, self._environ = spec, keyed, environ
        self._envs, self._lease = envs, lease

    def run(
        self,
        options: SnapshotOptions,
        signing: SigningKey | None,
        replaces: int,
        on_line: Callable[[str], object],
        count: Count,
    ) -> SnapshotResult:
        spec, keyed = self._spec, self._keyed
        log_path = options.log_path or _new_log()
        capture = Capture(
            keyed.targets,
            self._environ,
            inputs=[*spec.inputs, *keyed.editables],
            python=spec.python,
            cwd=spec.cwd,
            without=[log_path],
        )
        self._lease.tell("inspecting the targets")
        begin_setup(keyed.targets, self._environ)
        capture.begin()
        environ = setup_environ(self._environ, keyed.targets)
        planned = plan(keyed, spec, environ, [log_path])
        for note in planned.notes:
            _log.line(note)
        of_pip = pip_bytecode.variables(spec.commands, environ, HERE, only_installs=keyed.only_installs)
        self._lease.tell("running set-up commands")
        try:
            ran = run_setup(
                spec.commands,
                environ=environ | of_pip,
                cwd=spec.cwd,
                log_path=log_path,
                timeout_s=spec.timeout_s,
                on_line=on_line,
                watch=planned.watch,
            )
        except SetupFailed:
            raise  # its message names the log, which stays
        except BaseException:
            _throw_away(log_path, options)
            raise
        _throw_away(log_path, options)
        ended_s = time.monotonic()
        if ran.left_running:
            _log.info("set-up left processes running, which Bootseer ended: %s", ", ".join(ran.left_running[:5]))
        if of_pip:
            installed = (keyed.targets, planned.began_ns, spec.python, usable_cores(), self._environ, HERE)
            if why := pip_bytecode.compile_installed(*installed):
                _log.warning("not all packages of pip could be compiled: %s", why)
        changes = capture.end()
        decided = decide(keyed, spec, self._environ, planned, ran.watched)
        changed = why_changed(keyed, spec, self._environ, is_watched=decided.is_watched) or decided.why_not
        end_setup(keyed.targets, self._environ, is_clean=not changed)
        if changed:
            raise EnvError(
                f"{changed}, so its result is not published; recreate the directory, and run this again"
            )
        for note in decided.notes:
            _log.line(note)
        if decided.keyed.key != keyed.key:
            replaces = 0
        keyed = self._keyed = decided.keyed
        if changes.is_empty:
            _log.warning(
                "set-up changed nothing in %s; if it installs elsewhere, name that directory with --setup-target",
                ", ".join(keyed.targets),
            )
        self._lease.tell("compressing and uploading")
        built = capture.build(
            self._envs.packs(keyed.key).put, codec=self._envs.codec, threads=options.threads, on_progress=count
        )
        document = encode(keyed.document)
        base = keyed.document.base
        python = base.get("version") or base.get("target:version", "")
        made = describe(keyed, built, ran.took_s, time.time(), python)
        assert keyed.reads is not None, "set-up has run"
        aio.run_sync(self._envs.reads.publish(encode(keyed.guess), keyed.reads, signing))
        done = aio.run_sync(self._envs.publish(made, document, built.tree.index_bytes, signing, replaces=replaces))
        if not isinstance(done, PublishedSnapshot):
            raise EnvError(done.why)
        self._tell(built)
        if done.is_ours:
            self._mark(done.found, capture)
        took_s = time.monotonic() - ended_s
        return SnapshotResult(
            keyed, done.found, done.is_ours, ran.took_s, took_s, built.tree.statistics.stored_bytes
        )

    def _tell(self, built: Built) -> None:
        facts = built.facts
        for line in facts.notes:
            _log.line(line)
        if facts.left_out:
            _log.warning("left out, as all users of the store could read it: %s", _few(facts.left_out))
        if facts.outside:
            _log.warning("written outside the targets, so not in the snapshot: %s", _few(facts.outside))
        if facts.required:
            _log.info("other nodes need this at the same path: %s", _few(facts.required))

    def _mark(self, found: FoundSnapshot, capture: Capture) -> None:
        """Mark the targets as set up for the next start here. This is only an optimization."""
        keyed = self._keyed
        try:
            mark(
                capture.left(),
                keyed.key,
                found.snapshot.tree,
                keyed.document.base,
                self._environ,
                keyed.reads,
                found.snapshot.expires_s,
            )
        except BootseerError as error:
            _log.warning("this node is not marked as set up: %s", error)
            return
        sync_later(keyed.targets, self._environ)


def _few(paths: list[str]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _new_log() -> str:
    fd, path = tempfile.mkstemp(prefix="bootseer-setup-", suffix=".log")
    os.close(fd)
    return path


def _throw_away(log_path: str, options: SnapshotOptions) -> None:
    if not options.log_path:
        try:
            os.unlink(log_path)
        except FileNotFoundError:
            pass
