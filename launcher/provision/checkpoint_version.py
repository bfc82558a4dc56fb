"""Which version of the checkpoint a job loads, as the coordinator's node decides it.

In: what the checkpoint service finds (checkpoint.py), versions that could not be loaded. Out: the version to load,
or the reason why the job must end, as training from scratch would lose its progress. Separate from checkpoint.py,
which loads the chosen version on each node.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.rendezvous.messages import CheckpointFailed, Failure, Pinned
from launcher.spec import LaunchSpec

MAX_PASSED = 8  # lines about newer saves that are incomplete
MISPLACED = "misplaced"  # the URL is a typo

_STRIPED = re.compile(r"(.*/)?(v-)?[0-9]{20}-[0-9a-f]{12}")  # of docs/reference/formats.md, no file of users

Resolved = Callable[[Pinned | None, str], object]


def own_path(url: str, version: str) -> str:
    """PURE: return the path of this version on a file system of this machine, for code that opens files.

    Return the URL if there is no such path: for other stores and for striped versions.
    """
    if _STRIPED.fullmatch(version):
        return url
    path = url
    if not url.startswith("/"):
        scheme, _, place = url.partition("://")
        host, _, rest = place.partition("/")
        if scheme.lower() not in ("file", "local") or host not in ("", "localhost") or "::" in place:
            return url
        from urllib.parse import unquote

        path = "/" + unquote(rest)
    return os.path.join(path, version) if version else path


# Errors of loaders for a truncated file or another format; old pickles fail only when they are read.
_LOAD_ERROR = re.compile(
    r"PytorchStreamReader failed|SafetensorError|pickle data was truncated|Ran out of input|invalid load key|"
    r"unexpected EOF|UnpicklingError|BadZipFile"
)


def load_error(failure: Failure) -> str:
    """PURE: return the line in which a rank reports that it could not read a checkpoint, "" if there is none."""
    lines = [*failure.message.splitlines(), *failure.traceback.splitlines(), *failure.stderr_tail]
    return next((line.strip()[:200] for line in reversed(lines) if _LOAD_ERROR.search(line)), "")


class FailedVersion(NamedTuple):
    """A version that could not be loaded, as known to the coordinator."""

    version: str
    why: str
    is_damaged: bool


def damage_line(shown: str, bad: FailedVersion, older: str) -> str:
    """PURE: return the error that ends the job, and its fixes. Args: shown: the URL without secrets."""
    what = f"version {bad.version or 'itself'} cannot be loaded: {bad.why}"
    if not bad.is_damaged:
        return what
    verify = f"run `bootseer ckpt verify {shlex.quote(shown)}` to verify all of it"
    if older:
        return f"{what}; {verify}; {older} is older and complete: --checkpoint-fallback older loads it"
    return f"{what}; {verify}; there is no older complete version"


class VersionChoice:
    """See the module's docstring."""

    def __init__(
        self,
        spec: LaunchSpec,
        say: Callable[[str], object],
        passed: Callable[[str], object],
        over: Callable[[], object],
    ) -> None:
        """Args: passed: gets the reason why a newer save is not used; over: called before each answer is given."""
        self._spec = spec
        self._say = say
        self._passed = passed
        self._over = over
        self._then: Resolved | None = None
        self._reported: set[str] = set()  # logged lines about saves that are not used
        self._bad: dict[str, FailedVersion] = {}  # by digest
        self._replaced: list[FailedVersion] = []  # replaced by another version
        self._unread: dict[str, FailedVersion] = {}  # by digest: ranks could not read it, for an unknown reason
        self._version = Pinned("", "")  # the last one that was found
        self.shown = ""  # the URL without secrets, which the service removes
        self.absent_line = ""  # the line to log if there is nothing to load

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether an answer is awaited."""
        return self._then is not None

    def begin(self, then: Resolved) -> str:
        """Begin to choose, and return why the job must end at once, "" for no reason."""
        self._then = then
        last = next(reversed(self._bad.values()), None)
        return damage_line(self.shown, last, "") if last is not None and not last.is_damaged else ""

    def question(self) -> dict[str, object]:
        """Return the fields of the order to the service."""
        # Also without --checkpoint-fallback: the error names the older version.
        return {"without": [*self._bad, *self._unread], "falls_back": bool(self._bad) or self._falls_back}

    @property
    def _falls_back(self) -> bool:
        return self._spec.checkpoint_fallback == "older"

    # ---- failures --------------------------------------------------------------------------------------------

    def add_failed(self, message: CheckpointFailed) -> None:
        """Record a node that cannot load the version."""
        version = self._version.version if self._version.digest == message.digest else ""
        self._bad[message.digest] = FailedVersion(version, message.text, message.is_damaged)

    def add_unread(self, failure: Failure) -> None:
        """Record a rank that has failed before its first step, if it could not read the version."""
        version, digest = self._version.version, self._version.digest
        why = load_error(failure) if digest else ""
        if why and not _STRIPED.fullmatch(version):  # striped versions are verified completely
            self._unread[digest] = FailedVersion(version, f"rank {failure.rank} could not read it: {why}", True)

    # ---- answers of the service ------------------------------------------------------------------------------

    def on_found(self, pinned: Pinned, passed: Sequence[str]) -> None:
        """Choose the version that was found, unless an older one is not allowed."""
        for line in passed[:MAX_PASSED]:
            if line not in self._reported:
                self._reported.add(line)
                self._passed(
                    f"the checkpoint is {pinned.version or 'the directory itself'}, not a newer one: {line}"
                )
        last = next(reversed(self._bad.values()), None)
        if last is None:
            last = next(reversed(self._unread.values()), None)
        elif not self._falls_back:
            self.refuse(damage_line(self.shown, last, pinned.version or "another version"))
            return
        if last is not None and last not in self._replaced:
            self._replaced.append(last)
            self._say(
                f"warning: an older version of the checkpoint is used, {pinned.version}, as {last.version} cannot"
                f" be loaded: {last.why}"
            )
        self._version = pinned
        self._answer(pinned, "")

    def on_unresolved(self, why: str, older: object) -> None:
        """End the job. Args: older: for a damaged version, an older complete one, "" for none; else None."""
        if isinstance(older, str):
            why = damage_line(self.shown, FailedVersion("", why, True), older).partition(": ")[2]
        self.refuse(why)

    def on_absent(self, why: str, kind: str) -> bool:
        """Train from scratch if that is allowed; return whether to ask the service again instead."""
        last = next(reversed(self._bad.values()), None)
        if last is not None:
            self.refuse(damage_line(self.shown, last, ""))
            return False
        if self._unread:  # the only version: ranks may be able to read it this time
            self._unread = {}
            return True
        if kind == MISPLACED:
            self.refuse(why)
            return False
        if self._spec.require_checkpoint:
            self.refuse(f"{why}; omit --require-checkpoint to train from scratch")
            return False
        if kind == "unusable":
            self.absent_line = f"warning: the job trains from scratch, as no checkpoint can be loaded: {why}"
        else:
            self.absent_line = f"there is no checkpoint yet, so the job trains from scratch: {self.shown}"
        self._answer(Pinned("", ""), "")
        return False

    def on_no_service(self, why: str) -> None:
        """Choose after all services have failed: a plain file needs no version; for the rest it is unknown."""
        if self._spec.max_nodes == 1 and os.path.isfile(own_path(self._spec.load_checkpoint, "")):
            self._answer(None, "")
            return
        self.refuse(
            f"the checkpoint service has failed on {os.uname().nodename}: {why}; "
            "start the job again, or omit --load-checkpoint and let the ranks load the file"
        )

    def refuse(self, why: str) -> None:
        """Answer with the reason why the job must end."""
        self._answer(None, why)

    def _answer(self, pinned: Pinned | None, why: str) -> None:
        then, self._then = self._then, None
        self._over()
        if then is not None:
            name = f"--load-checkpoint {self.shown}".rstrip()
            then(pinned, f"{name}: {why}" if why else "")
