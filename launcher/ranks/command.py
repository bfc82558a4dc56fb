"""The command line of one rank. Pure.

In: what to run and how (script, module, run-path or program), and what the rank-side file needs to know. Out: the
words to exec. With hooks the interpreter runs launcher/inside.py by path, which becomes the script; without them
the interpreter (or the program) is run bare, as torchrun does.
"""

from __future__ import annotations

from bootseer.light_typing import Protocol

INSIDE = __file__.rpartition("/ranks/")[0] + "/inside.py"
RUN_PATH = "import runpy,sys;sys.argv=sys.argv[1:];runpy.run_path(sys.argv[0],run_name='__main__')"


class Entry(Protocol):
    """What the ranks run."""

    @property
    def mode(self) -> str: ...  # script, module, run-path, program
    @property
    def target(self) -> str: ...
    @property
    def args(self) -> tuple[str, ...]: ...


def rank_command(
    entry: Entry,
    *,
    python: str,
    inside: str,
    local_rank: int,
    events_file: str,
    run_id: str,
    node: str,
    rank: int,
    attempt: int,
    page_file: str = "",
) -> list[str]:
    """The words of a rank's command; `${local_rank}` in them is replaced as torchrun does.

    Args: inside: path of the rank-side file (program.py), "" for no hooks; events_file, page_file: "" for none;
        local_rank: the true one also where the rank sees 0 (--virtual-local-rank).
    """
    args = [substitute(arg, local_rank) for arg in entry.args]
    if entry.mode == "program":
        return [entry.target, *args]
    # torchrun counts the script itself to the arguments, a program it does not
    words = [substitute(entry.target, local_rank), *args]
    if inside:
        identity = [entry.mode, events_file, run_id, node, str(rank), str(attempt), page_file]
        return [python, "-u", inside, *identity, *words]
    how = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH]}[entry.mode]
    return [python, "-u", *how, *words]


def substitute(text: str, local_rank: int) -> str:
    """string.Template's safe_substitute of `local_rank`."""
    if "$" not in text:
        return text
    from string import Template  # 1 ms that most jobs need not pay

    return Template(text).safe_substitute(local_rank=str(local_rank))
