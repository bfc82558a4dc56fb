"""State events of ranks and agent, one JSON text a line, as torchrun prints with `--event-log-handler console`.

Pure. The schema is torchelastic's, for log collectors that expect it; bootrun's own events are in bootseer.events.
Imported only when requested.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from launcher.ranks.group import Rank, RankState
from launcher.rendezvous.messages import World

if TYPE_CHECKING:
    from launcher.ranks.environ import RankOptions


def state_of(rank: Rank, stopped_by_us: bool) -> str:
    """Return the state in torchelastic's terms."""
    if rank.state in (RankState.SUCCEEDED, RankState.LINGERING):
        return "SUCCEEDED"
    return "TERMINATED" if stopped_by_us else "FAILED"


def rank_event(spec: RankOptions, host: str, world: World, rank: Rank, state: str, status: int | None) -> str:
    """Return the event of a rank's change of state."""
    local_rank = rank.local_rank
    details = {
        "group_world_size": world.group_world_size,
        "entry_point": _entry_point(spec),
        "local_rank": [local_rank],
        "role_rank": [world.first_role_rank + local_rank],
        "role_world_size": [world.role_world_size],
        "exit_code": [status],
        "worker_pid": [rank.pid],
    }
    return _event(spec, host, world, state, "WORKER", details, rank.rank, str(rank.pid), None)


def agent_event(spec: RankOptions, host: str, world: World, state: str, duration_ms: float | None = None) -> str:
    """Return the event of a change of state of the whole node."""
    details = {"group_world_size": world.group_world_size, "entry_point": _entry_point(spec)}
    return _event(spec, host, world, state, "AGENT", details, None, None, duration_ms)


def _entry_point(spec: RankOptions) -> str:
    command = spec.entry.target if spec.entry.mode == "program" else spec.python
    return command.rpartition("/")[2]


def _event(
    spec: RankOptions,
    host: str,
    world: World,
    state: str,
    source: str,
    details: dict[str, Any],
    rank: int | None,
    worker_id: str | None,
    duration_ms: float | None,
) -> str:
    metadata = {
        "run_id": spec.run_id,
        "global_rank": rank,
        "group_rank": world.group_rank,
        "worker_id": worker_id,
        "role": spec.role,
        "hostname": host,
        "state": state,
        "total_run_time": 0,
        "rdzv_backend": spec.backend,
        "raw_error": None,
        "metadata": json.dumps(details),
        "agent_restarts": world.restart_count,
        "duration_ms": duration_ms,
    }
    event = {
        "name": f"torchelastic.worker.status.{state}",
        "source": source,
        "timestamp": 0,
        "metadata": metadata,
    }
    return json.dumps(event)
