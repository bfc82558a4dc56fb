"""What a probe is: one small job as data, started in the same way by torchrun and by bootrun.

A probe says how agents are started and what is done to them (steps), which program the ranks run, and which facts
of the run are compared. Each fact must be the same with both launchers, or be covered by a `Better`: a
difference that is meant, with its reason and with what bootrun must show instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

# ---- what is done ------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Starts an agent."""

    agent: int = 0


class Until(NamedTuple):
    """Waits for a mark that a rank makes, for what it tells (`r0.0`), or `listens` for the first port."""

    mark: str
    deadline_s: float = 30.0


class Send(NamedTuple):
    """Sends a signal to an agent only."""

    signal: str
    agent: int = 0


class Lose(NamedTuple):
    """Kills an agent and everything below it, as if its machine were gone."""

    agent: int


class Make(NamedTuple):
    """Makes a mark that ranks wait for."""

    mark: str


class Settle(NamedTuple):
    """Lets this time pass, where nothing shows from outside that a launcher has come to where it waits."""

    seconds: float


class End(NamedTuple):
    """Waits for the end of an agent."""

    agent: int = 0


Step = Start | Until | Send | Lose | Make | Settle | End

# ---- what bootrun is expected to show where it differs -----------------------------------------------------


class Has(NamedTuple):
    """A text, or a list of lines, in which all these texts occur."""

    texts: tuple[str, ...]


class Lacks(NamedTuple):
    """A text, or a list of lines, in which none of these texts occurs."""

    texts: tuple[str, ...]


class AtMost(NamedTuple):
    """A number not above this one."""

    most: float


class Absent(NamedTuple):
    """The fact is not there at all."""


class Better(NamedTuple):
    """A difference that is meant: facts whose path matches the pattern (`*` any text) are `expected` instead."""

    fact: str
    expected: Any  # a value, or one of the classes above
    because: str
    wart: str = ""  # "W8": the number in the notes on torchrun
    flags: tuple[str, ...] | None = None  # flags it is about; default: those of the probe
    hooks: str = ""  # only with these rank hooks, "auto" or "off"


# ---- the probe ---------------------------------------------------------------------------------------------


class Agent(NamedTuple):
    """How one launcher is started; texts may hold {port} {logs} {script} {dir} {out}."""

    args: tuple[str, ...]
    environ: Mapping[str, str] = {}
    stdin: str = ""


class Probe(NamedTuple):
    """One small job and what is compared."""

    name: str
    shows: str  # one line for docs/reference/torchrun.md
    args: tuple[str, ...] = ()  # of every agent, before its own
    agents: tuple[Agent, ...] = (Agent(()),)
    script: str = ""  # the program of the ranks; "" is none
    rank_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    steps: tuple[Step, ...] = ()  # default: all agents started, then waited for
    facts: tuple[str, ...] = ("status", "told")
    better: tuple[Better, ...] = ()
    flags: tuple[str, ...] = ()  # flags of the launcher that it is about, for the docs
    files: Mapping[str, str] = {}  # more files beside the script
    culprit: str = ""  # what a message about wrong use must name
    quick_s: float = 15.0  # the fact "quick": all was over within this time
    deadline_s: float = 60.0  # what still runs then is killed
    live: bool = False  # runs against torchrun itself in each CI run
    starter: str = ""  # Python that sets a state of the process in which the launcher begins; "" is none
    python_bound: bool = False  # depends on the version of argparse: only replayed with the recorded Python
    needs_torch: bool = False
    since: str = ""  # torch version that has it first

    def digest(self) -> str:
        """Changes when the probe does something else, so that an old recording is noticed."""
        agents = [[list(a.args), dict(a.environ), a.stdin] for a in self.agents]
        steps = [[type(step).__name__, *step] for step in self.steps]
        parts = [
            self.args, agents, self.script, self.rank_args, dict(self.environ), steps, self.facts,
            dict(self.files), self.culprit, self.quick_s, *([self.starter] if self.starter else []),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


Observation = dict[str, Any]
