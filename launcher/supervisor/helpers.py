"""Helpers: short-lived forks of the supervisor that run a function of Bootseer and send one answer at their end.

They need no start of an interpreter. In: a helper's name, the module whose `run` does the work, and texts for it.
Out: a small dictionary of plain values. A helper is not a rank: it survives stops, no process waits for it, and it
ends with the job. Its code is loaded only in the fork. (A service of the supervisor is exec'd, and runs as long as
the job.)
"""

from __future__ import annotations

import gc
import marshal
import os
import signal
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from launcher.base.inherited import IGNORED_SIGNALS, close_others

MAX_ANSWER_BYTES = 4096
MAX_TEXT_CHARS = 300


class Helper(NamedTuple):
    number: int
    pid: int
    fd: int  # of its answer


def start(number: int, name: str, module: str, texts: Iterable[str]) -> Helper:
    """Fork a helper. Raises: OSError."""
    parent = os.getpid()
    answer_read, answer_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # A signal between fork and handler waits; the supervisor ignores signals, so it would be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _be_helper(name, module, texts, answer_write, parent, mask)
    except OSError:
        os.close(answer_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(answer_write)
    return Helper(number, pid, answer_read)


def read_answer(helper: Helper) -> dict[str, Any]:
    """Return the answer of an ended helper; {} for none."""
    try:
        data = os.read(helper.fd, MAX_ANSWER_BYTES)
        found = marshal.loads(data) if data else {}  # noqa: S302 (from our own fork)
    except (OSError, ValueError, EOFError, TypeError):
        found = {}
    finally:
        os.close(helper.fd)
    return found if isinstance(found, dict) else {}


def _be_helper(
    name: str, module: str, texts: Iterable[str], answer_fd: int, parent: int, mask: Iterable[int]
) -> NoReturn:
    try:
        from bootseer.linux import processes

        os.setsid()
        processes.die_with_parent(signal.SIGKILL, parent)
        processes.set_name(b"bootrun-" + name.encode())
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        close_others({0, 1, 2, answer_fd})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.disable()  # it keeps all objects until it ends
        answer = __import__(module, fromlist=("run",)).run(*texts)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:MAX_TEXT_CHARS]}
    try:
        os.write(answer_fd, marshal.dumps(answer)[:MAX_ANSWER_BYTES])
    finally:
        os._exit(0)
