"""Pieces that several subjects use."""

from __future__ import annotations

from tests.parity.model import AtMost, Better

STANDALONE = ("--standalone",)
TWO = ("--standalone", "--nproc-per-node", "2")

OWN_STORE = Better(
    "told.*.TORCHELASTIC_USE_AGENT_STORE",
    "False",
    "rank 0 itself hosts the store of torch.distributed, fresh for each attempt, with a fresh "
    "port. Restarts work with the defaults, and a second init_method=tcp:// group does not hang",
    "W18",
    flags=(),
)
USAGE = "a usage error is one line that names the culprit, not a Python traceback"
ONE_LINE = (
    Better("traceback.*", False, USAGE, "W7", flags=()),
    Better("lines.*", AtMost(1), USAGE, "W7", flags=()),
)
STOPPED = (
    Better("report.*.others", [], "one line names the ranks that bootrun stopped"),
    Better("report.*.no others", True, "ranks that bootrun stopped are not failures"),
)
