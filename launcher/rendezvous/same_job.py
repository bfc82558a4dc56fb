"""Whether two nodes belong to the same job: a comparable and printable description of what their ranks run.

In: the entry of the command line. Out: Runs for the Join, and at the coordinator one line if two differ. Nodes of
one job may use different directories and write their own names. A second job that was given the endpoint of the
first may have a script of the same name. So a script is the same by its path or by its content, and arguments that
identify the node do not count.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Sequence

from launcher.rendezvous.messages import EntryDigest

MAX_SCRIPT_BYTES = 4 * 1024 * 1024  # of a larger one, and of a program, only the path counts
MAX_SHOWN_CHARS = 400
# Options whose value is specific to the node: --node-rank 1, --machine_rank=1, --hostname=a.
_OWN = re.compile(
    r"--?(?:(?:node|machine|worker|host)[-_]?(?:rank|id|idx|index|name|ip|addr|address)|node|host)(=.*)?",
    re.DOTALL,
)


def describe(mode: str, target: str, args: Sequence[str], host: str) -> EntryDigest:
    """Describe what ranks of this node run; this reads the script."""
    from bootseer.env.parse.redaction import redact_text, secret_values

    words = [*(("-m",) if mode == "module" else ()), target, *args]
    shown = redact_text(shlex.join(words), secret_values(os.environ))
    return EntryDigest(
        shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "...",
        _digest((mode, target if mode == "module" else os.path.abspath(target))),
        _content(mode, target),
        _digest(plain_args(args, host)),
    )


def plain_args(args: Iterable[str], host: str) -> list[str]:
    """PURE: return arguments without the values that identify this node."""
    names = sorted({host, host.partition(".")[0]} - {"", "localhost"}, key=len, reverse=True)
    own_names = [re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])") for name in names]
    found: list[str] = []
    is_value = False  # of an option before it
    for word in args:
        own = _OWN.fullmatch(word)
        plain = "" if is_value and not word.startswith("-") else word
        if own is not None and own[1]:
            plain = word.partition("=")[0]
        for name in own_names:
            plain = name.sub("{host}", plain)
        found.append(plain)
        is_value = own is not None and not own[1]
    return found


def is_same(one: EntryDigest, other: EntryDigest) -> bool:
    """PURE: return whether these are nodes of one job; a node without a description is trusted."""
    if not one.args or not other.args:
        return True
    is_same_script = one.place == other.place or ("" != one.content == other.content)
    return is_same_script and one.args == other.args


def describe_difference(run_id: str, runs: EntryDigest, others: EntryDigest) -> str:
    """PURE: return why the job `run_id`, which runs `others`, refuses the node that runs `runs`."""
    return (
        f"this endpoint serves another job {run_id!r}: it runs `{others.shown}`, this node `{runs.shown}`; give "
        "each job its own --rdzv-endpoint and --rdzv-id (--rdzv-conf mixed_arguments=1 on all nodes if it is one)"
    )


def _content(mode: str, target: str) -> str:
    if mode == "module" or "$" in target:
        return ""
    try:
        with open(target, "rb") as file:
            data = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError:
        return ""  # in an image, or found by PATH
    name = os.path.basename(target)
    return "" if len(data) > MAX_SCRIPT_BYTES else _digest((mode, name, hashlib.sha256(data).hexdigest()))


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()
