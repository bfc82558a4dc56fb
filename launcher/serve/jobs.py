"""The running jobs of this user on this node, asked over their status sockets, without waiting for any of them.

All sockets are asked at the same time. A look waits a moment; a job that answers later is in the next one, and
keeps its last answer until then. A job that has ended stays for a while, so that its last state can be read.
Answers are shared: however many clients ask, a job is asked at most once in MIN_AGE_S, about thousands of ranks
less often.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from bootseer.ipc.unix_sockets import is_own_or_root, peer_of, with_short_address
from launcher.status.job_ranks import add_cores
from launcher.status.places import UNFINISHED, folders
from launcher.status.server import MAX_ANSWER_BYTES

ANSWER_S = 3.0
LOOK_S = 1.0  # for which a look waits for answers; a bootrun takes half a second to measure its ranks
MIN_AGE_S = 0.5
RANKS_PER_S = 2000  # that a coordinator's bootrun is asked for, so that its event loop has other work
MAX_SOCKETS = 256
ENDED_S = 600.0  # how long an ended job stays
MAX_ENDED = 16
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")  # of a path that is not UTF-8


class AgentAnswer(NamedTuple):
    """One bootrun of a job, and its newest answer."""

    path: str  # of its socket
    status: dict[str, Any]  # {} if it has never answered
    ranks: dict[str, Any] | None  # columns of job_ranks.py, on the coordinator's node
    why: str  # why there is no newer answer; "": there is
    at_s: float  # of the status, by the monotonic clock
    ranks_at_s: float = 0.0  # of the columns


class JobView(NamedTuple):
    """A job as seen from this node: all its bootruns here, that of the coordinator first."""

    name: str  # its id; with bootrun's pid if another job here has the same id
    run_id: str
    agents: tuple[AgentAnswer, ...]
    ended_s: float | None = None  # by the monotonic clock; None: it runs
    looked_s: float = 0.0  # when its bootruns were asked, by the monotonic clock

    @property
    def path(self) -> str:
        """The socket of its first bootrun: another job has another one, whatever its name."""
        return self.agents[0].path

    @property
    def status(self) -> dict[str, Any]:
        """The status that its first bootrun gave."""
        return self.agents[0].status

    @property
    def ranks(self) -> dict[str, Any] | None:
        """The columns of all ranks of the job; None where only the ranks of this node are known."""
        return next((agent.ranks for agent in self.agents if agent.ranks is not None), None)


class NotAnsweredError(Exception):
    """A socket gave no answer; the text is the reason."""


class Jobs:
    """The jobs of this user on this node."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._known: dict[str, AgentAnswer] = {}  # by socket
        self._asking: dict[str, asyncio.Task[AgentAnswer | None]] = {}
        self._names: dict[str, str] = {}  # of running jobs, by the socket of a bootrun
        self._ended: dict[str, JobView] = {}
        self._views: list[JobView] = []
        self._at_s = -1e9
        self._refresh: asyncio.Task[None] | None = None

    async def look(self, max_age_s: float = MIN_AGE_S) -> list[JobView]:
        """Return the jobs, the oldest first, ended ones last. Args: max_age_s: of the answers.

        Raises: ConfigError if the directory of sockets is not private to this user.
        """
        if time.monotonic() - self._at_s > max(max_age_s, MIN_AGE_S):
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._ask_all())
            await asyncio.shield(self._refresh)
        return self._views

    async def find(self, name: str, max_age_s: float = MIN_AGE_S) -> JobView | None:
        """Return the job with this name, or with a bootrun of this pid."""
        views = await self.look(max_age_s)
        by_name = next((view for view in views if view.name == name), None)
        return by_name or next((view for view in views if str(view.status.get("pid")) == name), None)

    @property
    def names(self) -> set[str]:
        """The names of the jobs of the last look."""
        return {view.name for view in self._views}

    @property
    def has_running(self) -> bool:
        """Whether a job ran at the last look."""
        return any(view.ended_s is None for view in self._views)

    async def close(self) -> None:
        tasks = [*([] if self._refresh is None else [self._refresh]), *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_all(self) -> None:
        paths = [path for folder in folders(self._environ) for path in _sockets(folder)][:MAX_SOCKETS]
        for path in paths:
            if path not in self._asking:
                self._asking[path] = asyncio.create_task(self._ask(path))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=LOOK_S)
        there = set(paths)
        for path, task in list(self._asking.items()):
            if task.done():
                del self._asking[path]
                answer = task.result()
                if answer is not None:
                    self._known[path] = answer
                else:
                    there.discard(path)
        self._known = {path: answer for path, answer in self._known.items() if path in there}
        now_s = time.monotonic()
        self._note(self._name(group(list(self._known.values()))), now_s)
        self._at_s = now_s

    def _name(self, views: list[JobView]) -> list[JobView]:
        """Return the jobs with names that they keep until they end."""
        names: dict[str, str] = {}
        known = [
            next((self._names[each.path] for each in view.agents if each.path in self._names), "")
            for view in views
        ]
        taken = {name for name in known if name}
        named = []
        for view, before in zip(views, known, strict=True):
            new = view.run_id if view.run_id not in taken else f"{view.run_id}~{view.status.get('pid')}"
            name = before or new
            taken.add(name)
            names.update((agent.path, name) for agent in view.agents)
            named.append(view._replace(name=name))
        self._names = names
        return named

    def _note(self, views: list[JobView], now_s: float) -> None:
        """Keep what runs, and for a while what has ended."""
        paths = {agent.path for view in views for agent in view.agents}
        for view in self._views:
            if view.ended_s is None and view.status and not paths & {agent.path for agent in view.agents}:
                self._ended[view.name] = view._replace(ended_s=now_s)
        running = {view.name for view in views}
        kept = [
            view
            for name, view in self._ended.items()
            if name not in running and view.ended_s is not None and now_s - view.ended_s < ENDED_S
        ][-MAX_ENDED:]
        self._ended = {view.name: view for view in kept}
        self._views = [*(view._replace(looked_s=now_s) for view in views), *kept]

    async def _ask(self, path: str) -> AgentAnswer | None:
        """Return a job's answer; None if it has ended."""
        last = self._known.get(path, AgentAnswer(path, {}, None, "", 0.0))
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await request(path, "status")
                answer = AgentAnswer(path, status, last.ranks, "", time.monotonic(), last.ranks_at_s)
                return await self._with_ranks(answer, last) if status.get("coordinator") else answer
        except TimeoutError:
            return last._replace(why=f"its bootrun has not answered within {ANSWER_S:g} s; it may be stopped")
        except NotAnsweredError as error:
            return last._replace(why=str(error))
        except OSError as error:
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                return None
            return last._replace(why=error.strerror or str(error))

    @staticmethod
    async def _with_ranks(answer: AgentAnswer, last: AgentAnswer) -> AgentAnswer:
        """Add the columns of all ranks; those of a large job may be older."""
        count = answer.status.get("world_size")
        every_s = count / RANKS_PER_S if isinstance(count, int) else 0.0
        is_same = last.ranks is not None and last.ranks.get("attempt") == answer.status.get("attempt")
        if is_same and answer.at_s - last.ranks_at_s < every_s:
            return answer
        try:
            ranks = await request(answer.path, "ranks")
        except NotAnsweredError:
            return answer._replace(ranks=None)  # an older bootrun, which does not know this request
        now_s = time.monotonic()
        add_cores(ranks, last.ranks, now_s - last.ranks_at_s)
        return answer._replace(ranks=ranks, ranks_at_s=now_s)


def group(answers: list[AgentAnswer]) -> list[JobView]:
    """Return the jobs, the oldest first: each coordinator has one; bootruns of its endpoint belong to it."""
    by_id: dict[tuple[str, str], list[AgentAnswer]] = {}
    for answer in answers:
        status = answer.status
        # One that has never answered is nobody's: it is shown by its socket.
        run_id = str(status.get("run_id") or os.path.basename(answer.path))
        by_id.setdefault((run_id, str(status.get("endpoint"))), []).append(answer)

    def rank(answer: AgentAnswer) -> tuple[int, str]:
        node_rank = answer.status.get("node_rank")
        return node_rank if isinstance(node_rank, int) else 1 << 30, answer.path

    views = []
    for (run_id, _), found in by_id.items():
        # Some launches leave the id at its default, so several jobs can have the same one.
        leaders = sorted((each for each in found if each.status.get("coordinator")), key=_age)
        others = sorted((each for each in found if not each.status.get("coordinator")), key=rank)
        first, *more = leaders or [others.pop(0)]
        views.append(JobView(run_id, run_id, (first, *others)))
        views += [JobView(run_id, run_id, (each,)) for each in more]
    return sorted(views, key=lambda view: _age(view.agents[0]))


async def request(path: str, do: str) -> dict[str, Any]:
    """Ask a status socket. Raises: OSError; NotAnsweredError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            with_short_address(path, connection.connect)
        except BlockingIOError:
            raise NotAnsweredError("its bootrun accepts no connection; it may be stopped") from None
        if not is_own_or_root(peer_of(connection)):
            raise NotAnsweredError("another user's process answers there")
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_ANSWER_BYTES + 2)
    except BaseException:
        connection.close()
        raise
    try:
        writer.write(msgspec.json.encode({"do": do}) + b"\n")
        return _decode(await _read_line(reader))
    finally:
        writer.close()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise NotAnsweredError("it has closed the connection: too many clients, or it ends") from None
        raise NotAnsweredError("its answer is cut off") from None
    except asyncio.LimitOverrunError:
        raise NotAnsweredError("its answer is too long") from None


def _decode(line: bytes) -> dict[str, Any]:
    found = _parse(line)
    if found is None:
        found = _parse(_SURROGATE.sub(rb"\\ufffd", line))
    answer = found.get("ok") if isinstance(found, dict) else None
    if isinstance(answer, dict):
        return answer
    error = found.get("error") if isinstance(found, dict) else None
    reason = "its answer is not JSON" if found is None else str(error or "its answer has another form")
    raise NotAnsweredError(reason[:300])


def _parse(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _sockets(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []  # gone meanwhile
    return [os.path.join(folder, name) for name in sorted(names) if not name.startswith(UNFINISHED)]


def _age(answer: AgentAnswer) -> float:
    """The older, the less."""
    value = answer.status.get("runs_s")
    return -float(value) if isinstance(value, int | float) else 0.0
