"""Starts the daemon of a tree, and waits until the tree can be used."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import ConfigError, StorageError, StorageTimeout
from bootseer.mounts.tree_control import (
    ANY_WORKLOAD,
    DEADLINE_S,
    IDLE_S,
    READ_AHEAD_SHARE,
    STORE_TIMEOUT_S,
    STREAM_AFTER_S,
    to_error,
)
from bootseer.mounts.tree_orders import Order
from bootseer.mounts.tree_places import Place
from bootseer.mounts.tree_vetting import Vetting, to_memory
from bootseer.mounts.tree_waiting import WaitingDaemon, take_spare
from bootseer.storage.os_errors import map_os_errors

if TYPE_CHECKING:
    from bootseer.blocks import Cache
    from bootseer.trust import Trust

READY_S = 120.0  # a store may be slow to answer
MOST_LOG_BYTES = 1 << 20
DEADLINE_VARIABLE = "BOOTSEER_MOUNT_DEADLINE"
MOST_DEADLINE_S = 3600.0


class TreeOptions(NamedTuple):
    """How a tree is served. What was started already goes on as it is, but for `peers`; and `idle_s` grows."""

    idle_s: float = IDLE_S  # it ends so long after the last use; 0: never
    deadline_s: float | None = None  # a read that waits longer fails; None: as the environment says
    store: Mapping[str, object] = {}  # options of the store
    store_timeout_s: float = STORE_TIMEOUT_S
    records: bool = True  # what the start touches, for the next one
    prefetches: bool = True
    read_ahead_share: float = READ_AHEAD_SHARE  # of the starts; the others tell what a start really reads
    whole_bytes: int = 0  # a tree that is stored in no more is brought whole when no trace of it is known
    streams: bool = True  # some time after the first step, all that is not cached yet
    stream_after_s: float = STREAM_AFTER_S  # that time
    cold_bytes_per_s: float | None = None  # of that
    publishes: bool = False  # puts the trace into the store
    shares: bool = False  # the same, if nobody has done so for this workload
    peers: str = ""  # path of the file of the job's peers, who are asked before the store; the last job's count
    ready_s: float = READY_S


def deadline_of(environ: Mapping[str, str]) -> float:
    """How long a read of a mounted tree waits before it fails, as this environment says. Raises: ConfigError."""
    text = environ.get(DEADLINE_VARIABLE, "")
    try:
        deadline_s = float(text or DEADLINE_S)
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s <= MOST_DEADLINE_S:
        raise ConfigError(f"{DEADLINE_VARIABLE}={text[:80]}: seconds, more than 0 and at most {MOST_DEADLINE_S:g}")
    return deadline_s


def settings_of(
    url: str,
    trust: Trust | None,
    cache: Cache | None,
    workload: str,
    options: TreeOptions,
    environ: Mapping[str, str],
) -> dict[str, object]:
    """What tree_settings.Settings has. Raises: ConfigError."""
    from bootseer.trust import Trust

    settings: dict[str, object] = {
        "url": url,
        "options": dict(options.store),
        "keys": [each.key.line for each in (Trust.load() if trust is None else trust).trusted],
        "workload": workload or ANY_WORKLOAD,
        **{
            each: getattr(options, each)
            for each in (
                *("store_timeout_s", "idle_s", "records", "prefetches", "streams"),
                *("read_ahead_share", "whole_bytes", "stream_after_s", "cold_bytes_per_s"),
                *("publishes", "shares", "peers"),
            )
        },
        "deadline_s": deadline_of(environ) if options.deadline_s is None else options.deadline_s,
    }
    if cache is not None:
        from bootseer.storage.page_cache import is_remote

        # On a network file system a cache's folder is in the one that was named, and named after the node.
        folder = os.path.dirname(cache.folder) if is_remote(cache.folder) else cache.folder
        settings.update(cache_folder=folder, cache_bytes=cache.limit.most_bytes, cache_share=cache.limit.share)
    return settings


def start(
    place: Place, lock: int, settings: Mapping[str, object], end_s: float, vetting: Vetting | None = None
) -> dict[str, Any]:
    """Has the spare daemon of this process, or a new one, serve a place that is claimed; what it says when it can.

    Args: lock: of the place, held; the daemon has it, too; end_s: by `time.monotonic`; vetting: who looks at the
        tree's index instead of the daemon.
    Raises: what the daemon says instead; StorageError when it says nothing.
    """
    log = _open_log(place)
    try:
        said = None
        spare = take_spare()
        if spare is not None:
            said = _order(spare, place, lock, log, settings, end_s, vetting)
        if said is None:
            daemon = WaitingDaemon(log=log, url=str(settings["url"]))
            said = _order(daemon, place, lock, log, settings, end_s, vetting)
    except OSError as error:
        raise StorageError(
            f"{place.folder}: its daemon could not be started: {error.strerror or error}"
        ) from error
    finally:
        os.close(log)
    if not said:
        raise StorageError(f"{place.folder}: its daemon has died; its log is {place.log_path}")
    answer = json.loads(said)
    if "ok" not in answer:
        raise to_error(answer, place.folder)
    return dict(answer["ok"])


def _order(
    daemon: WaitingDaemon,
    place: Place,
    lock: int,
    log: int,
    settings: Mapping[str, object],
    end_s: float,
    vetting: Vetting | None,
) -> bytes | None:
    """What a daemon says when it has done what it is told; None of one that has died before it was told.

    Raises: StorageTimeout; OSError.
    """
    index, verdict = _open_vetted(vetting)
    ready, theirs = os.pipe()
    try:
        try:
            told = json.dumps(settings).encode()
            is_given = daemon.give(Order(place.folder, told, theirs, lock, log, index, verdict))
        finally:
            for fd in (theirs, index, verdict):
                if fd >= 0:
                    os.close(fd)
        said = _read_line(ready, end_s) if is_given else b""
        if said is None:
            raise StorageTimeout(f"{place.folder}: its daemon is not ready in time; its log is {place.log_path}")
        return said if said or daemon.has_accepted() else None
    finally:
        os.close(ready)
        daemon.close()


def _open_vetted(vetting: Vetting | None) -> tuple[int, int]:
    """What a daemon is given of an index that is looked at here: memory and a pipe's end; -1 each without."""
    data = vetting.index_bytes() if vetting is not None else None
    if vetting is None or data is None:
        return -1, -1
    index = to_memory(data)
    try:
        verdict, ours = os.pipe()
    except OSError:
        os.close(index)
        raise
    vetting.report(ours)
    return index, verdict


def _read_line(fd: int, end_s: float) -> bytes | None:
    """None when it does not come in time, empty when it never will."""
    said = b""
    while not said.endswith(b"\n"):
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return None
        data = os.read(fd, 65536)
        if not data:
            return b""
        said += data
    return said


def _open_log(place: Place) -> int:
    with map_os_errors(place.log_path):
        os.makedirs(os.path.dirname(place.log_path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(place.log_path, flags, 0o600)
        if os.fstat(log).st_size > MOST_LOG_BYTES:
            os.ftruncate(log, 0)
        return log
