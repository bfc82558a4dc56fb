"""The daemon's side of tree_bringer.py: starts it, reads its figures, ends it.

The first one is forked before the daemon has its order, so that it has nothing to import when it gets its own.
What it does not bring is brought by the daemon itself: `run` never raises for what goes wrong there.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable

import msgspec

from bootseer import aio
from bootseer.mounts import tree_bringer
from bootseer.mounts.forked import Helper, fork_helper
from bootseer.mounts.tree_bringer import Brought, Order, encode
from bootseer.own_module import command_of

SILENCE_S = 5.0  # it says something several times a second; a stopped one holds blocks that others wait for
MODULE = "bootseer.mounts.tree_bringer"
SHOWN = b"shown\n"

_waiting: list[Helper] = []  # at most one


def begin_spare() -> None:
    """Forks one; to be called before this process has threads. Never fails."""
    helper = fork_helper(tree_bringer.NAME, socket.SOCK_STREAM, tree_bringer.main)
    if helper is not None:
        _waiting.append(helper)


def end_spare() -> None:
    """The one that nobody has needed."""
    try:
        _waiting.pop().end()
    except IndexError:
        pass


class Bringer:
    """One process. `brought`: its newest figures."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.brought = Brought(prefetch={}, blocks={})
        self._log = log
        self._is_shown = False
        self._connection: socket.socket
        self._to_it: asyncio.StreamWriter | None = None

    def note_shown(self) -> None:
        """The tree can be read through its mount."""
        self._is_shown = True
        if self._to_it is None:
            return
        try:
            if not self._to_it.transport.get_write_buffer_size():
                # Past the transport, which forgets what is still to be read when this cannot be sent.
                self._connection.send(SHOWN)
                return
        except BlockingIOError:
            pass
        except OSError:
            return  # it is ending
        self._to_it.write(SHOWN)  # after its order

    async def run(self, order: Order) -> None:
        """Until it has ended, well or not. Cancelled, it ends it."""
        why = ""
        try:
            taken = _take()
            helper = await aio.run_io(_start) if taken is None else taken
        except OSError as error:
            self._log(f"hot blocks are brought by this process, as another cannot be started: {error.strerror}")
            return
        try:
            await self._talk(helper.connection, order)
        except TimeoutError:
            why = f"it has said nothing for {SILENCE_S:g} s"
        except ConnectionError:
            pass  # it has ended, and its status says how
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = str(error)
        finally:
            if self._to_it is not None:
                self._to_it.transport.abort()
                self._to_it = None
            helper.kill()  # at once, whatever becomes of this task
            status = await aio.run_io(helper.wait)
        if status and not why:
            why = f"it ended with status {status}"
        if why:
            self._log(f"hot blocks are brought by this process, as the one that was to bring them failed: {why}")

    async def _talk(self, connection: socket.socket, order: Order) -> None:
        self._connection = connection
        head, body = encode(order)
        socket.send_fds(connection, [head], [2])  # a few bytes, into an empty buffer
        from_it, self._to_it = await asyncio.open_unix_connection(sock=connection)
        self._to_it.write(body)
        if self._is_shown:
            self.note_shown()
        while True:
            async with asyncio.timeout(SILENCE_S):
                line = await from_it.readline()
            if not line:
                return
            self.brought = msgspec.json.decode(line, type=Brought)


def _take() -> Helper | None:
    try:
        return _waiting.pop()
    except IndexError:
        return None


def _start() -> Helper:
    """One with an interpreter of its own. Raises: OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            process = subprocess.Popen(
                command_of(MODULE), stdin=theirs.fileno(), stdout=subprocess.DEVNULL, cwd="/"
            )
        except BaseException:
            ours.close()
            raise
    process.returncode = 0  # `Helper` waits for it
    return Helper(process.pid, ours)
