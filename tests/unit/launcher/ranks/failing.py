"""Failures for tests."""

from launcher.rendezvous.messages import Failure


def make_failure(rank=0, **changes):
    values = {
        "node": "host0",
        "group_rank": 0,
        "rank": rank,
        "local_rank": rank % 8,
        "pid": 1000 + rank,
        "status": 1,
        "time_ns": 10**9,
        "error_ns": 0,
        "wall_s": 1_700_000_000.25,
        "stopped_by_us": False,
        "error_file": "",
        "message": "",
        "traceback": "",
        "stderr_tail": (),
    }
    return Failure(**{**values, **changes})
