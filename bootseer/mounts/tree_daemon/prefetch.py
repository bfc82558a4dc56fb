"""The daemon's side of the prefetch worker (prefetch_worker.py): starts it, reads its figures, ends it.

The first one is forked before the daemon has its order, so that it has nothing left to import by then. Blocks that
the worker does not fetch are fetched by the daemon: `run` never raises for an error of the worker.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess

import msgspec

from bootseer import aio
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon import prefetch_worker as tree_worker
from bootseer.mounts.tree_daemon.forked import ForkedHelper, fork_helper
from bootseer.mounts.tree_daemon.prefetch_worker import PrefetchFigures, PrefetchOrder, encode
from bootseer.own_module import command_of
from bootseer.tuning import current

_log = get_logger(__name__)

MODULE = "bootseer.mounts.tree_daemon.prefetch_worker"
SHOWN = b"shown\n"

_waiting: list[ForkedHelper] = []  # at most one


def fork_spare_worker() -> None:
    """Fork a worker; call it before this process has threads. Never fails."""
    helper = fork_helper(tree_worker.NAME, socket.SOCK_STREAM, tree_worker.main)
    if helper is not None:
        _waiting.append(helper)


def end_spare_worker() -> None:
    try:
        _waiting.pop().end()
    except IndexError:
        pass


class PrefetchWorker:
    """One prefetch worker. `fetched`: its newest figures."""

    def __init__(self) -> None:
        self.fetched = PrefetchFigures(prefetch={}, blocks={})
        self._is_shown = False
        self._connection: socket.socket
        self._to_it: asyncio.StreamWriter | None = None

    def note_shown(self) -> None:
        """Send the worker that the tree can be read through its mount."""
        self._is_shown = True
        self._say(SHOWN)

    def note_demand(self, number: int) -> None:
        """Send the worker that a reader waits for a block."""
        self._say(b"%d\n" % number, is_needed=False)

    def _say(self, line: bytes, *, is_needed: bool = True) -> None:
        if self._to_it is None:
            return
        try:
            if not self._to_it.transport.get_write_buffer_size():
                # Not by the transport, which drops unread input when a send fails.
                self._connection.send(line)
                return
        except BlockingIOError:
            pass
        except OSError:
            return  # it is ending
        if is_needed:
            self._to_it.write(line)  # after its order

    async def run(self, order: PrefetchOrder) -> None:
        """Run the worker until it has ended, well or not. Cancelled, end it."""
        why = ""
        try:
            taken = _take()
            helper = await aio.run_io(_start) if taken is None else taken
        except OSError as error:
            _log.info("prefetch worker disabled: %s; this process fetches hot blocks", error.strerror)
            return
        try:
            await self._talk(helper.connection, order)
        except TimeoutError:
            why = f"it has sent nothing for {current().mounts.worker_silence_s:g} s"
        except ConnectionError:
            pass  # it has ended, and its status shows how
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = str(error)
        finally:
            if self._to_it is not None:
                self._to_it.transport.abort()
                self._to_it = None
            helper.kill()  # at once, even if this task is cancelled
            status = await aio.run_io(helper.wait)
        if status and not why:
            why = f"it ended with status {status}"
        if why:
            _log.info("prefetch worker disabled: %s; this process fetches hot blocks", why)

    async def _talk(self, connection: socket.socket, order: PrefetchOrder) -> None:
        self._connection = connection
        head, body = encode(order)
        socket.send_fds(connection, [head], [2])  # a few bytes, into an empty buffer
        from_it, self._to_it = await asyncio.open_unix_connection(sock=connection)
        self._to_it.write(body)
        if self._is_shown:
            self.note_shown()
        # It reports several times a second; a stopped one holds blocks that others wait for.
        silence_s = current().mounts.worker_silence_s
        while True:
            async with asyncio.timeout(silence_s):
                line = await from_it.readline()
            if not line:
                return
            self.fetched = msgspec.json.decode(line, type=PrefetchFigures)


def _take() -> ForkedHelper | None:
    try:
        return _waiting.pop()
    except IndexError:
        return None


def _start() -> ForkedHelper:
    """Start a worker with an interpreter of its own. Raises: OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            process = subprocess.Popen(
                command_of(MODULE), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, cwd="/"
            )
        except BaseException:
            ours.close()
            raise
    process.returncode = 0  # `ForkedHelper` waits for it
    return ForkedHelper(process.pid, ours)
