"""Answers of a tree's daemon at its socket; ipc/replies.py describes the protocol.

ping        shows that the daemon lives
hello       waits until the tree can be used; returns where it is. {"idle_s": 60, "workload": "...",
            "peers": "/path"}
hold        as hello; while the connection is open the daemon does not end by itself
config      how to run the image
status      figures
status-folder  mounts the status folder, if it is not mounted yet; returns where it is
first-step  the start is over: ends and stores the access trace; streams the missing blocks
prefetch    fetches the access trace of a workload, or with {"whole": true} all
trace       where the recordings of this node are
stop        unmounts, unless a process holds it; with {"force": true} also then. Answers when it is done
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bootseer import aio
from bootseer.errors import ConfigError, StorageError
from bootseer.mounts.tree_daemon.daemon import Daemon
from bootseer.mounts.tree_daemon.hot import HotBlocks
from bootseer.mounts.tree_daemon.parts import DaemonParts
from bootseer.storage import redact

if TYPE_CHECKING:
    from bootseer.mounts.tree_daemon.status_folder import StatusFolder

_WORKLOAD = re.compile(r"[0-9a-f]{16}")
_MAX_S = 1e9


class RequestHandlers:
    """Answers of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._folder: StatusFolder | None = None
        self._known: dict[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
            "ping": self._ping,
            "hello": self._hello,
            "hold": self._hold,
            "config": self._config,
            "status": self._status,
            "status-folder": self._status_folder,
            "first-step": self._first_step,
            "prefetch": self._prefetch,
            "trace": self._trace,
            "stop": self._stop,
        }

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request. Raises: ConfigError if it is invalid; StorageError when the tree is not mounted."""
        answer = self._known.get(request["do"])
        if answer is None:
            raise ConfigError(f"{str(request['do'])[:80]!r}: {', '.join(self._known)} are known")
        return await answer(request)

    async def _ping(self, request: Mapping[str, Any]) -> dict[str, Any]:
        del request
        return {"state": self._daemon.state.value}

    async def _hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer hello; a state other than ready: it is about to end. Unreadable blocks are requested again."""
        daemon = self._daemon
        said = await self._greet(request)
        if said["unreadable"] and daemon.faults is not None and daemon.parts is not None:
            await daemon.faults.recheck(daemon.parts.fetcher)
            return daemon.shown()
        return said

    async def _greet(self, request: Mapping[str, Any]) -> dict[str, Any]:
        daemon = self._daemon
        workload = _workload(request, daemon.settings.workload)
        _idle_s(request, daemon.idle_s)  # reports an invalid value at once
        peers = _peers(request)
        await daemon.is_decided.wait()
        async with daemon.mounting:
            if daemon.failure is not None:
                raise daemon.failure
            if daemon.state.value == "ready" and daemon.wants_end.is_set():
                return {**daemon.shown(), "state": "ending"}
            if daemon.hot is not None and daemon.state.value == "ready":
                daemon.record_use()
                daemon.idle_s = _idle_s(request, daemon.idle_s)
                if peers:
                    daemon.follow_peers(peers)
                if workload != daemon.settings.workload:
                    daemon.hot.prefetch(workload)
            return daemon.shown()

    async def _hold(self, request: Mapping[str, Any]) -> dict[str, Any]:
        said = await self._greet(request)
        self._hot()
        return said

    async def _config(self, request: Mapping[str, Any]) -> dict[str, Any]:
        del request
        self._hot()
        assert self._daemon.parts is not None
        return dict(msgspec.to_builtins(self._daemon.parts.index.config))

    async def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        del request
        daemon = self._daemon
        now_s = time.monotonic()
        said: dict[str, Any] = {
            **daemon.shown(),
            "url": redact(daemon.settings.url),
            "workload": daemon.settings.workload,
            "uptime_s": now_s - daemon.started_s,
            "ready_s": daemon.ready_s,
            "idle_s": daemon.idle_s,
            "leases": [
                {"pid": lease.peer.pid, "uid": lease.peer.uid, "held_s": now_s - lease.since_s}
                for lease in daemon.listener.leases
            ],
        }
        if daemon.parts is not None:
            fetched = daemon.parts.block_statistics() if daemon.hot is None else daemon.hot.block_statistics()
            said["blocks"] = {"count": daemon.parts.index.block_count, **fetched}
            said["cache"] = await aio.run_io(daemon.parts.tree_cache.statistics)
            said["histograms"] = daemon.parts.fetcher.histograms()
            said["not_kept"] = daemon.parts.tree_cache.full_reason
            said["failing"] = self._failing(daemon.parts)
        if daemon.hot is not None:
            said.update(daemon.hot.statistics())
        said["device"] = daemon.stack.statistics()._asdict()
        return said

    def _failing(self, parts: DaemonParts) -> dict[str, Any]:
        """Return the blocks that readers cannot get now, and why."""
        count, error = parts.fetcher.failing()
        faults = self._daemon.faults
        lines = [] if faults is None else faults.missing_lines(parts.tree_cache.has)
        return {"blocks": max(count, len(lines)), "error": error or next(iter(lines), "")}

    async def _status_folder(self, request: Mapping[str, Any]) -> dict[str, Any]:
        del request
        daemon = self._daemon
        async with daemon.mounting:
            self._hot()
            if self._folder is None or not await aio.run_io(self._folder.is_shown):
                from bootseer.mounts.tree_daemon.status_folder import StatusFolder

                folder = StatusFolder(daemon.place.status, partial(self._status, {}))
                await aio.run_io(folder.start, await self._status({}))
                self._folder = folder
            return {"folder": daemon.place.status}

    async def _first_step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        del request
        hot = self._hot()
        is_recorded = await hot.end_recording(is_started=True)
        if self._daemon.settings.streams:
            hot.stream(self._daemon.settings.stream_after_s)
        return {"recorded": is_recorded}

    async def _prefetch(self, request: Mapping[str, Any]) -> dict[str, Any]:
        hot = self._hot()
        if request.get("whole") is True:
            hot.stream()
        else:
            hot.prefetch(_workload(request, self._daemon.settings.workload))
        return {}

    async def _trace(self, request: Mapping[str, Any]) -> dict[str, Any]:
        hot, parts = self._hot(), self._daemon.parts
        assert parts is not None
        path = parts.traces.own_path(_workload(request, self._daemon.settings.workload))
        is_there = await aio.run_io(os.path.exists, path)
        return {"path": path if is_there else "", "recording": hot.recording}

    async def _stop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        daemon = self._daemon
        pids = sorted({lease.peer.pid for lease in daemon.listener.leases})
        if pids and daemon.state.value == "ready" and request.get("force") is not True:
            raise ConfigError(
                f"{daemon.place.root}: is held by process {', '.join(map(str, pids[:8]))}: end it first, or use"
                " --force, which makes all reads there fail"
            )
        if pids:
            daemon.record_end("it was unmounted by force")
        daemon.request_end()
        await daemon.is_unmounted.wait()
        return {}

    def _hot(self) -> HotBlocks:
        daemon = self._daemon
        if daemon.failure is not None:
            raise daemon.failure
        if daemon.hot is None or daemon.state.value != "ready" or daemon.wants_end.is_set():
            raise StorageError(f"{daemon.place.root}: is {daemon.state.value}")
        return daemon.hot


def _idle_s(request: Mapping[str, Any], now_s: float) -> float:
    """Return the longer time; 0 is for ever."""
    wanted_s = request.get("idle_s", now_s)
    if not isinstance(wanted_s, int | float) or not 0 <= wanted_s < _MAX_S:
        raise ConfigError("idle_s: seconds, 0 for ever")
    return max(float(wanted_s), now_s) if wanted_s and now_s else 0.0


def _peers(request: Mapping[str, Any]) -> str:
    found = request.get("peers", "")
    if not isinstance(found, str) or not (found == "" or os.path.isabs(found)) or "\0" in found:
        raise ConfigError("peers: an absolute path")
    return found


def _workload(request: Mapping[str, Any], default: str) -> str:
    wanted = request.get("workload", default)
    if not isinstance(wanted, str) or not _WORKLOAD.fullmatch(wanted):
        raise ConfigError("a workload is 16 hex digits")
    return wanted
