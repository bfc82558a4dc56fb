"""The daemon's side of tree_bringer.py: starts it, reads its figures, ends it.

What it does not bring is brought by the daemon itself: `run` never raises for what goes wrong there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import msgspec

from bootseer.mounts.tree_bringer import Brought, Order, encode

SILENCE_S = 5.0  # it says something several times a second; a stopped one holds blocks that others wait for
MODULE = "bootseer.mounts.tree_bringer"


class Bringer:
    """One process. `brought`: its newest figures."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.brought = Brought(prefetch={}, blocks={})
        self._log = log
        self._is_shown = False
        self._input: asyncio.StreamWriter | None = None  # once it has its order

    def note_shown(self) -> None:
        """The tree can be read through its mount."""
        self._is_shown = True
        if self._input is not None:
            self._input.write(b"shown\n")

    async def run(self, order: Order) -> None:
        """Until it has ended, well or not. Cancelled, it ends it."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd="/",
            )
        except OSError as error:
            self._log(f"hot blocks are brought by this process, as another cannot be started: {error.strerror}")
            return
        try:
            await self._talk(process, encode(order))
        finally:
            self._input = None
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _talk(self, process: asyncio.subprocess.Process, order: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(order)
            await process.stdin.drain()
            self._input = process.stdin
            if self._is_shown:
                self.note_shown()
            while True:
                async with asyncio.timeout(SILENCE_S):
                    line = await process.stdout.readline()
                if not line:
                    break
                self.brought = msgspec.json.decode(line, type=Brought)
            status = await process.wait()
            why = f"it ended with status {status}" if status else ""
        except TimeoutError:
            why = f"it has said nothing for {SILENCE_S:g} s"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = str(error)
        if why:
            self._log(f"hot blocks are brought by this process, as the one that was to bring them failed: {why}")
