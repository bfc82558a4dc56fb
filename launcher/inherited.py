"""What the starter of bootrun has left to its process: noted, put in order for ourselves, given back to ranks.

A shell, a scheduler or a container's first process may block or ignore signals, have low limits, an umask that
keeps owners out, or files open that are nobody's business here. Ours must not depend on that; ranks get what
torchrun's would. Used where bootrun begins (guard.py, __main__.py) and where ranks are exec'd; stdlib only,
and light_typing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from bootseer.light_typing import NamedTuple

# That sentinel and guard ignore.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# That torchrun handles by default: ranks have the default for them.
HANDLED = DEAF_TO[:4]
# The default for ranks, too. Python ignores the first two in itself, and subprocess restores them in its children;
# torchrun has handlers for the rest, by faulthandler.
_RESTORED = (
    *(signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL),
)
_RAISED = ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU")
_OWNER = 0o700


Limits = list[tuple[int, tuple[int, int]]]


class Inherited(NamedTuple):
    """What ranks get back; as it stands here, what our own processes have."""

    umask: int
    mask: frozenset[int] = frozenset()  # blocked signals
    ignored: frozenset[int] = frozenset()  # of those that we treat otherwise


def put_in_order() -> Inherited:
    """To be called first of all, before a thread or a child is there. Signals stay blocked: see `unblock`."""
    ignored = frozenset(n for n in (*DEAF_TO, signal.SIGCHLD) if signal.getsignal(n) == signal.SIG_IGN)
    if signal.SIGCHLD in ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel tells nobody how a child has ended
    umask = os.umask(0o077)
    os.umask(umask & ~_OWNER)
    for fd in list_open():
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                pass  # the one that listed the folder
    return Inherited(umask, frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())), ignored)


def unblock() -> None:
    """To be called when this process knows what to do with signals."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def raise_limits() -> Limits:
    """Raises what this process may reach in a long job; returns what it was, for `give_back`."""
    import resource

    before = []
    for name in _RAISED:
        which = getattr(resource, name)
        soft, hard = resource.getrlimit(which)
        if soft != hard:
            try:
                resource.setrlimit(which, (hard, hard))
            except (OSError, ValueError):
                continue
            before.append((which, (soft, hard)))
    return before


def give_back(inherited: Inherited, handled: Collection[int], limits: Limits) -> None:
    """In a new process of the guard, before it execs a program.

    Args: handled: signals that end the job; limits: as `raise_limits` has returned them.
    """
    for signum in {*_RESTORED, *DEAF_TO, *handled, signal.SIGCHLD}:
        # A hang-up that nohup ignores stays ignored.
        is_kept = signum in inherited.ignored and (signum == signal.SIGHUP or signum not in handled)
        signal.signal(signum, signal.SIG_IGN if is_kept else signal.SIG_DFL)
    if limits:
        import resource

        for which, limit in limits:
            resource.setrlimit(which, limit)
    os.umask(inherited.umask)
    signal.pthread_sigmask(signal.SIG_SETMASK, inherited.mask)


def list_open() -> list[int]:
    """Descriptors of this process; the one that lists them is among them, and closed."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_others(keep: Collection[int]) -> None:
    """Closes all descriptors but `keep`, as subprocess does for what it starts."""
    for fd in list_open():
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # the one that listed the folder
