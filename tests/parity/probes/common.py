"""Pieces that several subjects use."""

from __future__ import annotations

from tests.parity.model import AtMost, Better

STANDALONE = ("--standalone",)
TWO = ("--standalone", "--nproc-per-node", "2")

OWN_STORE = Better(
    "told.*.TORCHELASTIC_USE_AGENT_STORE",
    "False",
    "rank 0 hosts the store of torch.distributed itself: every attempt gets a fresh store and port, so restarts "
    "work with the defaults and a second init_method=tcp:// group does not hang",
    "W18",
    flags=(),
)
ONE_LINE = (
    Better("traceback.*", False, "wrong use gets one line that names it, not a Python traceback", "W7", flags=()),
    Better("lines.*", AtMost(1), "wrong use gets one line that names it, not a Python traceback", "W7", flags=()),
)
STOPPED = (
    Better(
        "report.*.others", [], "ranks that the launcher itself stopped are no failures; they are named in one line"
    ),
    Better("report.*.no others", True, "ranks that the launcher itself stopped are no failures"),
)
