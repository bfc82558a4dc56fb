"""The Python environment of this node's ranks, determined in parallel to everything else.

In: the ranks' interpreter. Out, by callback: an Identity (digest, or the reason why there is none). The list
itself is kept for the coordinator, which requests it only if digests differ. The interpreter itself is run in a
child process, as its path may differ from bootrun's. Not used for jobs on one node.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from bootseer.secret import SECRET_VARIABLES
from launcher.base import children
from launcher.base.loop import Cancellable, EventLoop
from launcher.rendezvous.list_distributions import MARK
from launcher.rendezvous.messages import Distributions, Identity

PATIENCE_S = 10.0
IMAGE = "(image)"  # not a valid name of a distribution
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "list_distributions.py")
_MAX_BYTES = 4 * 1024 * 1024


class IdentityProbe:
    """One query; `found` is set if the callback gets a digest."""

    def __init__(
        self,
        loop: EventLoop,
        python: str,
        on_identity: Callable[[Identity], object],
        environ: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
        *,
        prefix: Sequence[str] = (),
        listing: str = "",
        image: str = "",
    ) -> None:
        """Args:
        python: "" for ranks that do not run Python: then only the image counts.
        prefix, listing: arguments before the command, and its path of the listing script, if ranks run elsewhere.
        image: identifies the image, "" for this node itself.
        """
        self.found: Distributions | None = None
        self._loop = loop
        self._on_identity = on_identity
        self._output = bytearray()
        self._pid = self._stdin_fd = self._stdout_fd = -1
        self._timer: Cancellable | None = None
        self._image = image
        if not python:
            loop.call_soon(self._tell, Distributions("", ()))
            return
        own = os.environ if environ is None else environ
        words = [*prefix, python, listing or _SCRIPT]
        try:
            self._start(words, {name: text for name, text in own.items() if name not in SECRET_VARIABLES})
        except OSError as error:
            loop.call_soon(on_identity, Identity("", f"cannot run {python}: {error.strerror}"))
            return
        self._timer = loop.call_later(patience_s, self._give_up, f"no answer within {patience_s:g} s")
        loop.add_reader(self._stdout_fd, self._on_readable)

    def _start(self, words: list[str], environ: dict[str, str]) -> None:
        child_in, self._stdin_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self._stdout_fd, child_out = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(child_in)
            os.close(self._stdin_fd)
            raise
        os.set_blocking(self._stdout_fd, False)
        actions = [(os.POSIX_SPAWN_DUP2, child_in, 0), *((os.POSIX_SPAWN_DUP2, child_out, fd) for fd in (1, 2))]
        try:
            self._pid = os.posix_spawnp(words[0], words, environ, file_actions=actions)
            children.add(self._pid)
        except OSError:
            self._close()
            raise
        finally:
            os.close(child_in)
            os.close(child_out)

    def close(self) -> None:
        """End the query; the callback is not called any more."""
        if self._pid < 0:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._stdout_fd)
        self._close()
        os.kill(self._pid, signal.SIGKILL)  # not reaped, so the pid is its own
        children.reap_killed(self._pid)  # it may hang on the file system of its environment
        self._pid = -1

    def _close(self) -> None:
        os.close(self._stdin_fd)
        os.close(self._stdout_fd)

    def _reap(self) -> int:
        pid, self._pid = self._pid, -1
        return os.waitstatus_to_exitcode(children.reap(pid, waits=True) or 0)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._stdout_fd, 65536)
        except BlockingIOError:
            return
        self._output += data
        if len(self._output) > _MAX_BYTES:
            self._give_up("too much output")
        elif not data:
            self._finish()

    def _give_up(self, why: str) -> None:
        self.close()
        self._on_identity(Identity("", f"listing its distributions: {why}"))

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._stdout_fd)
        self._close()
        status = self._reap()
        lines = self._output.decode("utf-8", "replace").strip("\n").split("\n")
        mark, *fields = lines[-1].split("\0")
        if mark != MARK or not fields or status:
            last = lines[-1][:300] or "it wrote nothing"
            self._on_identity(Identity("", f"listing its distributions: exit status {status}: {last}"))
            return
        self._tell(Distributions(fields[0], tuple(fields[1:])))

    def _tell(self, found: Distributions) -> None:
        """Report the distributions and the image, so that a table of differences shows both."""
        names = (*found.names, f"{IMAGE}=={self._image}") if self._image else found.names
        self.found = Distributions(found.interpreter, names)
        self._on_identity(Identity(digest(self.found), ""))


def digest(distributions: Distributions) -> str:
    """Return the SHA-256 of the list, in hexadecimal."""
    return hashlib.sha256("\n".join((distributions.interpreter, *distributions.names)).encode()).hexdigest()
