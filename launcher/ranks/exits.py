"""The end of a rank: its status in words, and whether it is a cause or the consequence of another rank's end.

In: a Failure. Out: words and a Kind; pure. A rank whose partner died ends with an error of gloo, NCCL or the
store, whose messages are known (`SIGNS`, taken from torch 2.13 and NCCL, older wordings included). Words that
users' own code may also print ("Connection reset by peer") count only together with those of the libraries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from launcher.rendezvous.messages import Failure


class FailureOrigin(IntEnum):
    """Why a rank ended, as far as is known; the smaller, the nearer to the first failure."""

    CAUSE = 0  # no evidence that another rank is at fault
    CONSEQUENCE = 1
    STOPPED = 2  # ended after bootrun stopped it


class Sign(NamedTuple):
    """A pattern that shows a consequence."""

    pattern: str
    what: str
    weak: bool = False  # a timeout: a peer did not respond; it may have failed or only been slow
    beside: str = ""  # counts only where this text is present, too


_GLOO = r"gloo/\S{1,80}\] "
_LOST = r"(?:Connection reset by peer|Broken pipe|Connection closed)"

# Each pattern begins with fixed text, so that a search costs microseconds: there may be thousands of failures.
SIGNS: tuple[Sign, ...] = (
    Sign(_GLOO + r"(?:Connection closed by peer|Socket (?:unexpectedly )?closed)", "gloo: peer closed"),
    Sign(_GLOO + r"(?:Read|Write|readv?|writev?|recv|send)(?: error)? \[", "gloo: peer lost"),
    Sign(_GLOO + r"[^\n]{0,200}(?:Connection reset by peer|Broken pipe)", "gloo: peer lost"),
    Sign(r"\] Timed out waiting \d+ ?ms for (?:recv|send) operation", "gloo: timeout", weak=True),
    Sign(r"Application timeout caused pair closure", "gloo: timeout", weak=True),
    Sign(_GLOO + r"(?:Connect timeout|timed out connecting)", "gloo: timeout", weak=True),
    Sign(r"Gloo connectFullMesh failed with", "gloo: no connection", weak=True),
    Sign(r"reached monitoredBarrier, but received errors while waiting", "monitored barrier: peer lost"),
    Sign(r"failed to pass monitoredBarrier in \d+ ms", "monitored barrier: timeout", weak=True),
    Sign(r"Ranks? [\d, ]+ timed out in monitoredBarrier", "monitored barrier: timeout", weak=True),
    Sign(r"ncclRemoteError", "NCCL: remote error"),
    Sign(r"remote process exited or there was a network error", "NCCL: remote error", beside="NCCL"),
    Sign(r"NCCL communicator was aborted on rank", "NCCL: aborted"),
    Sign(r"onnection closed by remote peer", "NCCL: peer closed"),
    Sign(r"> failed : (?:Connection reset by peer|Broken pipe)", "NCCL: peer lost"),
    Sign(r"NET/IB ?: Got completion from peer", "NCCL: peer lost"),
    Sign(r"dump signal[^\n]{0,80} from (?:another )?rank", "NCCL: dump signal from another rank"),
    Sign(r"Watchdog caught collective operation timeout", "NCCL: timeout", weak=True),
    Sign(r"Some NCCL operations have failed or timed out", "NCCL: timeout", weak=True),
    Sign(r" failed on SocketImpl", "store: peer lost"),
    Sign(r"Failed to (?:recv, got|send, sent) 0 bytes\. Connection was likely closed", "store: peer closed"),
    Sign(r"DistNetworkError: " + _LOST, "store: peer lost"),
    Sign(r"Error: " + _LOST, "store: peer lost", beside="torch/distributed/"),
    Sign(r"client socket has (?:timed out after|failed to connect to)", "store: no connection", weak=True),
    Sign(r"DistStoreError: (?:[Ww]ait timeout after \d+ ?ms|Socket Timeout)", "store: timeout", weak=True),
    Sign(r"Error: (?:[Ww]ait timeout|Socket Timeout)", "store: timeout", weak=True, beside="torch/distributed/"),
    Sign(r"Timed out after \d+ seconds waiting for clients", "store: timeout", weak=True),
)

MAX_SEARCHED_CHARACTERS = 32 << 10  # the message of an exception is at its end
_WARNING = re.compile(r"^(?:\[rank\d+\]:)?\s*\[[WI]\d*\s[^\n]*$", re.MULTILINE)
_RANK_LABEL = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_compiled: list[re.Pattern[str]] = []


def compile_patterns() -> None:
    """Compile the patterns now, so that the first call need not."""
    if not _compiled:
        _compiled.extend(re.compile(sign.pattern) for sign in SIGNS)


def classify(failure: Failure) -> FailureOrigin:
    """Return the kind: cause, consequence or stopped by bootrun."""
    if failure.stopped_by_us:
        return FailureOrigin.STOPPED
    return FailureOrigin.CAUSE if find_sign(failure) is None else FailureOrigin.CONSEQUENCE


def find_sign(failure: Failure) -> Sign | None:
    """Return the sign that the failure is a consequence of another; strong signs before weak ones."""
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    if not text:
        return None
    compile_patterns()
    found = [
        sign
        for sign, pattern in zip(SIGNS, _compiled, strict=True)
        if sign.beside in text and pattern.search(text)
    ]
    return min(found, key=lambda sign: sign.weak) if found else None


def first_exception(message: str, traceback: str, stderr_tail: Sequence[str]) -> str:
    """Return the part of a rank's error text that explains its end: the first of chained exceptions.

    A barrier in a `finally` also fails after the exception that led to it; the second exception is no evidence.
    """
    if traceback:
        return _first_of_chain(traceback)[-MAX_SEARCHED_CHARACTERS:]
    text = _RANK_LABEL.sub("", _WARNING.sub("", "\n".join(stderr_tail)))
    return f"{message}\n{_first_of_chain(_last_chain(text))}".strip()[-MAX_SEARCHED_CHARACTERS:]


def _first_of_chain(text: str) -> str:
    ends = [at for mark in _CHAINED if (at := text.find(mark)) >= 0]
    return text[: min(ends)] if ends else text


def _last_chain(text: str) -> str:
    """Return the text from the last traceback's heading, or from the first one that it is chained to."""
    start = text.rfind(_TRACEBACK)
    while start > 0 and text[:start].rstrip().endswith(_CHAINED):
        start = max(0, text.rfind(_TRACEBACK, 0, start))
    return text[max(0, start) :]


# ---- statuses ------------------------------------------------------------------------------------------------


def signal_name(status: int) -> str:
    """Return the name of the signal, SIGKILL for -9; "" for a status that is no signal."""
    if status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:
        if signal.SIGRTMIN < -status < signal.SIGRTMAX:
            return f"SIGRTMIN+{-status - signal.SIGRTMIN}"
        return f"signal {-status}"


_HINTS = {
    "SIGKILL": "perhaps out of memory: see the kernel log",
    "SIGSEGV": "an invalid memory access in native code",
    "SIGBUS": "often a full /dev/shm or a file that was truncated while it was mapped",
    "SIGABRT": "native code aborted; its message is on stderr",
    "SIGILL": "the processor does not support an instruction of the program",
    "SIGXCPU": "over its CPU time limit",
    "SIGXFSZ": "over its file size limit",
    "SIGPIPE": "wrote to a pipe or socket that has no reader",
}


def describe_end(failure: Failure) -> str:
    """Return how a rank ended, in words."""
    if failure.mounts and signal_name(failure.status) == "SIGBUS":
        return "ended by SIGBUS (a mapped file could not be read)"
    return describe_status(failure.status)


def describe_status(status: int) -> str:
    """Return how a process ended, in words; mark as likely what is not certain."""
    if status >= 0:
        name = signal_name(128 - status) if 128 < status <= 128 + signal.SIGRTMAX else ""
        return f"exit status {status}" + (f" (shells give this for {name})" if name else "")
    name = signal_name(status)
    hint = _HINTS.get(name, "")
    return f"ended by {name}" + (f" ({hint})" if hint else "")
