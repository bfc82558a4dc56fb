"""Settings of a tree's daemon, sent at its start."""

from __future__ import annotations

from typing import Any

import msgspec

from bootseer.mounts.tree_daemon.defaults import (
    ANY_WORKLOAD,
    DEADLINE_S,
    READ_AHEAD_SHARE,
    STREAM_AFTER_S,
)
from bootseer.tuning import DEFAULTS


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sent as JSON, by a socket. The digest is in the directory's name."""

    url: str  # of the store; may hold a password
    options: dict[str, Any] = {}  # of the store
    store_timeout_s: float = DEFAULTS.storage.timeout_s
    cache_folder: str = ""  # "": from the environment
    cache_bytes: int | None = None
    cache_share: float = 0.5
    keys: list[str] = []  # public keys whose traces are trusted, as lines
    workload: str = ANY_WORKLOAD  # whose trace is prefetched, and which is recorded
    idle_s: float = (
        DEFAULTS.mounts.idle_s
    )  # without a lease, a read or a mount above it ends after so long; 0: never
    deadline_s: float = DEADLINE_S  # a read that waits longer fails
    records: bool = True
    prefetches: bool = True
    read_ahead_share: float = READ_AHEAD_SHARE  # of the starts
    whole_bytes: int = 0  # a tree of at most this size is fetched whole if it has no known trace
    streams: bool = True  # some time after the first step, all blocks that are not cached yet
    stream_after_s: float = STREAM_AFTER_S  # that time
    cold_bytes_per_s: float | None = None  # of that
    shares: bool = False  # write the trace to the store, if it has none of this workload
    peers: str = ""  # path of the file of the job's peers, which are read before the store
    status_folder: bool = False  # its place is added to the root
