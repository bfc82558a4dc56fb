"""The process state that bootrun inherits: recorded, normalised for Bootseer's processes, restored for ranks.

A shell, a scheduler or a container's first process may block or ignore signals, set low limits or an umask that
denies access to owners, or leave files open. Bootseer's processes must not depend on that; ranks get the same
state as under torchrun. Used at the start of bootrun (supervisor/supervisor.py, __main__.py) and before ranks are
exec'd. Stdlib only, and light_typing.
"""

from __future__ import annotations

import os

from bootseer.light_stdlib import signal
from bootseer.light_typing import Collection, NamedTuple

# Signals that watchdog and supervisor ignore.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Signals that torchrun handles by default: ranks get their default action.
HANDLED = IGNORED_SIGNALS[:4]
# Ranks get the default action for these too. Python ignores the first two, and subprocess restores them in its
# children; torchrun has handlers of faulthandler for the rest.
_RESTORED = (
    *(signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL),
)
_RAISED = ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU")
_OWNER = 0o700


Limits = list[tuple[int, tuple[int, int]]]


class Inherited(NamedTuple):
    """The state that ranks get back; the defaults are those of Bootseer's own processes."""

    umask: int
    mask: frozenset[int] = frozenset()  # blocked signals
    ignored: frozenset[int] = frozenset()  # ignored ones, of the signals that Bootseer handles


def normalise_state() -> Inherited:
    """Record and normalise the inherited state, before any thread or child. Signals stay blocked (`unblock`)."""
    ignored = frozenset(n for n in (*IGNORED_SIGNALS, signal.SIGCHLD) if signal.getsignal(n) == signal.SIG_IGN)
    if signal.SIGCHLD in ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel keeps no status of ended children
    umask = os.umask(0o077)
    os.umask(umask & ~_OWNER)
    for fd in list_open():
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                pass  # the descriptor that listed the directory
    return Inherited(umask, frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())), ignored)


def unblock() -> None:
    """Unblock signals, once this process can handle them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def raise_limits() -> Limits:
    """Raise the limits that a long job may reach; return the earlier ones, for `restore`."""
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


def restore(inherited: Inherited, handled: Collection[int], limits: Limits) -> None:
    """Restore the inherited state in a new process of the supervisor, before it execs a program.

    Args: handled: signals that end the job; limits: as `raise_limits` has returned them.
    """
    for signum in {*_RESTORED, *IGNORED_SIGNALS, *handled, signal.SIGCHLD}:
        # SIGHUP stays ignored under nohup.
        is_kept = signum in inherited.ignored and (signum == signal.SIGHUP or signum not in handled)
        signal.signal(signum, signal.SIG_IGN if is_kept else signal.SIG_DFL)
    if limits:
        import resource

        for which, limit in limits:
            resource.setrlimit(which, limit)
    os.umask(inherited.umask)
    signal.pthread_sigmask(signal.SIG_SETMASK, inherited.mask)


def list_open() -> list[int]:
    """Return the descriptors of this process, with the one that listed them, which is closed."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_others(keep: Collection[int]) -> None:
    """Close all descriptors except `keep`, as subprocess does in its children."""
    for fd in list_open():
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # the descriptor that listed the directory
