"""Finding a version for the keeper: `Resolver` is the keeper's side, `run_resolver` a process that it forks.

Out of the process: its news, JSON lines: `waiting` while the store does not answer, `alive` now and then, and at
last one of
    pinned damaged passed         the version; newer ones that were passed over, as their manifests are damaged;
                                  a line for each newer save that is not whole
    absent kind                   nothing is there (NOTHING), nothing that could be loaded (UNUSABLE), or nothing
                                  can be there (MISPLACED): what was asked for is a typo
    failed older                  older: a version that could be loaded in place of a damaged one, "" for none
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from bootseer import aio
from bootseer.checkpoint.keeper_process import Child, end_child, run_child
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.versions import NoneComplete, pin, resolve
from bootseer.errors import BootseerError, IntegrityError, NotFound, SourceChanged
from bootseer.storage.paths import redact
from bootseer.storage.places import why_misplaced

NOTHING, UNUSABLE, MISPLACED = "none", "unusable", "misplaced"
TRIES_S = 60.0  # a store that is away for a moment must not end a job
PIN_TRIES_S = 10.0  # another node has just seen it: what this one has cached of a listing goes
PIN_WAIT_S = 0.5
TELL_AFTER_S = 3.0
ALIVE_S = 10.0
SILENCE_LIMIT_S = 60.0  # the launcher waits longer
LIMIT_S = 600.0  # for all tries: tens of thousands of files take minutes
News = dict[str, Any]
Fork = Callable[[Callable[[socket.socket], None]], Child]


class Resolver:
    """Asks for one version at a time. Runs on the keeper's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fork: Fork,
        say: Callable[[str], object],
        say_alive: Callable[[], object],
    ) -> None:
        self._selector = selector
        self._fork = fork
        self._say = say
        self._say_alive = say_alive
        self._child: Child | None = None
        self._found: Callable[[News], object] | None = None
        self._limit_s = self._silence_limit_s = 0.0

    def ask(
        self,
        url: str,
        version: str,
        digest: str,
        found: Callable[[News], object],
        without: Collection[str] = (),
        *,
        falls_back: bool = False,
    ) -> None:
        """Calls `found` with the last of the process's news, in place of whoever has asked before.

        Without a digest it is the newest version. Args: without: digests of those that cannot be loaded;
        falls_back: those with a damaged manifest are passed over, too.
        """
        self.drop()
        try:
            self._child = self._fork(
                lambda connection: run_resolver(
                    connection, url, version, digest, tuple(without), falls_back=falls_back
                )
            )
        except OSError as error:
            found({"failed": f"no process could be started to look for the version: {error.strerror}"})
            return
        self._found = found
        now_s = time.monotonic()
        self._limit_s, self._silence_limit_s = now_s + LIMIT_S, now_s + SILENCE_LIMIT_S
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self._hear)

    def drop(self) -> None:
        """Nobody wants to know any more."""
        child, self._child, self._found = self._child, None, None
        if child is not None:
            end_child(child, self._selector)

    def tick(self) -> None:
        """Gives up what hangs."""
        if self._child is not None and time.monotonic() > min(self._limit_s, self._silence_limit_s):
            self._end({"failed": "the version could not be found in time"})

    def close_inherited(self) -> None:
        """In a forked child: the connection is the keeper's."""
        if self._child is not None:
            self._child.lines.close()

    def _hear(self) -> None:
        assert self._child is not None
        lines = self._child.lines.receive()
        if lines is None:
            lines = [{"failed": "the process that looks for the version has died"}]
        self._silence_limit_s = time.monotonic() + SILENCE_LIMIT_S
        for news in lines:
            if "waiting" in news:
                self._say(f"trying again: {news['waiting']}")
            elif "alive" in news:
                self._say_alive()
            else:
                self._end(news)
                return

    def _end(self, news: News) -> None:
        found = self._found
        self.drop()
        if found is not None:
            found(news)


# ---- the process ---------------------------------------------------------------------------------------------


def run_resolver(
    connection: socket.socket,
    url: str,
    version: str,
    digest: str,
    without: Collection[str] = (),
    *,
    falls_back: bool = False,
) -> None:
    """Finds the newest version of `url`, or the one given, and tells it; ends the process.

    While the store is away it tries again for a while, and tells that once. Args: as `Resolver.ask`.
    """
    has_told = False
    began_s = time.monotonic()

    async def find() -> News:
        store, path = store_at(url)
        damaged: list[str] = []
        passed: list[str] = []

        def pass_over(error: IntegrityError) -> None:
            damaged.append(str(error))

        try:
            if digest:
                found = await pin(store, path, version, digest)
            else:
                on_damaged = pass_over if falls_back else None
                found = await resolve(store, path, without=without, on_damaged=on_damaged, on_passed=passed.append)
        finally:
            await store.aclose()
        return {"pinned": json.loads(msgspec.json.encode(found)), "damaged": damaged, "passed": passed}

    def send(news: News) -> None:
        connection.sendall(json.dumps(news).encode() + b"\n")

    def tell(why: str) -> None:
        nonlocal has_told
        if not has_told:
            has_told = True
            send({"waiting": why})

    async def attempt(_: int) -> News:
        # The store tries again by itself, too.
        timer = asyncio.get_running_loop().call_later(TELL_AFTER_S, tell, f"{redact(url)} does not answer")
        try:
            return await find()
        except BootseerError as error:
            if error.retryable:
                tell(str(error))
            raise
        finally:
            timer.cancel()

    async def patiently() -> News:
        policy = aio.RetryPolicy(tries=30, base_s=0.5, most_s=5.0, budget_s=TRIES_S)
        while True:
            try:
                return await aio.retry(policy, attempt)
            except BootseerError as error:
                if not may_come(error, bool(digest), time.monotonic() - began_s):
                    return await explain(error)
            await asyncio.sleep(PIN_WAIT_S)

    async def explain(error: BootseerError) -> News:
        """What came of it, with what can be done about it."""
        if isinstance(error, NotFound) and not digest and (why := await why_misplaced(url)):
            return {"absent": why, "kind": MISPLACED}
        return outcome(error) | ({"older": await older_than(url, without)} if is_damage(error) else {})

    async def give_signs() -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            send({"alive": True})

    async def work() -> News:
        signs = asyncio.create_task(give_signs())
        try:
            return await patiently()
        finally:
            signs.cancel()

    run_child(connection, work)


def may_come(error: BootseerError, is_pinned: bool, elapsed_s: float) -> bool:
    """Whether what is not there now may be in a moment: another node has seen it, or somebody is changing it."""
    kinds = (NotFound, SourceChanged) if is_pinned else (SourceChanged,)
    return isinstance(error, kinds) and elapsed_s < PIN_TRIES_S


def outcome(error: BootseerError) -> News:
    """What is told of an error. Only what surely is no checkpoint may let a job start from nothing."""
    if isinstance(error, NotFound):
        return {"absent": str(error), "kind": NOTHING}
    if isinstance(error, NoneComplete):
        return {"absent": str(error), "kind": UNUSABLE}
    return {"failed": str(error)}


def is_damage(error: BootseerError) -> bool:
    """Whether the version itself is wrong, so that another one might do."""
    return isinstance(error, IntegrityError) and not isinstance(error, SourceChanged)


async def older_than(url: str, without: Collection[str]) -> str:
    """The name of what could be loaded where these and those with damaged manifests cannot; "" for none."""
    try:
        store, path = store_at(url)
        try:
            return (await resolve(store, path, without=without, on_damaged=lambda _: None)).version
        finally:
            await store.aclose()
    except BootseerError:
        return ""
