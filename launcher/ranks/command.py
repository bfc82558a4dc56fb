"""The command line of one rank. Pure.

In: the entry to run (script, module, run-path or program), and the values that the rank bootstrap needs. Out: the
argument list to exec. With hooks the interpreter runs the rank bootstrap launcher/in_rank/bootstrap.py by path,
which becomes the script; without them the interpreter (or the program) runs bare, as with torchrun.
"""

from __future__ import annotations

from bootseer.light_typing import Protocol

INSIDE = __file__.rpartition("/ranks/")[0] + "/in_rank/bootstrap.py"
RUN_PATH = "import runpy,sys;sys.argv=sys.argv[1:];runpy.run_path(sys.argv[0],run_name='__main__')"


class Entry(Protocol):
    """The program, script or module that ranks run."""

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
    """Return the argument list of a rank; `${local_rank}` in it is replaced as torchrun does.

    Args: inside: path of the rank bootstrap (program.py), "" for no hooks; events_file, page_file: "" for none;
        local_rank: the real one, also where the rank sees 0 (--virtual-local-rank).
    """
    args = [substitute(arg, local_rank) for arg in entry.args]
    if entry.mode == "program":
        return [entry.target, *args]
    # torchrun counts the script itself as an argument, but not a program
    words = [substitute(entry.target, local_rank), *args]
    if inside:
        identity = [entry.mode, events_file, run_id, node, str(rank), str(attempt), page_file]
        return [python, "-u", inside, *identity, *words]
    how = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH]}[entry.mode]
    return [python, "-u", *how, *words]


def substitute(text: str, local_rank: int) -> str:
    """Replace `local_rank` by string.Template's safe_substitute."""
    if "$" not in text:
        return text
    from string import Template  # costs 1 ms, which most jobs do not need

    return Template(text).safe_substitute(local_rank=str(local_rank))
