"""Resolution of a version: `Resolver` is the checkpoint service's side, `run_resolver` a process that it forks.

The process sends JSON lines: `waiting` while the store does not answer, `alive` regularly, and at last one of
    pinned damaged passed         the version; newer ones that were skipped because of damaged manifests; a line
    for
                                  each newer save that is incomplete
    absent kind                   nothing exists (NOTHING), nothing that could be loaded (UNUSABLE), or nothing can
                                  exist (MISPLACED): the URL has a typo
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
from bootseer.checkpoint.opening import store_at
from bootseer.checkpoint.service.process import Child, Fork, end_child, run_child
from bootseer.checkpoint.versions.pinned import NoCompleteCheckpoint, Pinned
from bootseer.checkpoint.versions.resolve import pin, resolve
from bootseer.errors import BootseerError, IntegrityError, NotFound, SourceChanged
from bootseer.ipc.framing import encode
from bootseer.logs import get_logger
from bootseer.storage.paths import redact
from bootseer.storage.places import why_url_is_invalid
from bootseer.tuning import current

_log = get_logger(__name__)

NOTHING, UNUSABLE, MISPLACED = "none", "unusable", "misplaced"
PIN_TRIES_S = 10.0  # another node has just seen it: cached listings of this node expire
PIN_WAIT_S = 0.5
REPORT_AFTER_S = 3.0
ALIVE_S = 10.0
SILENCE_LIMIT_S = 60.0  # shorter than the launcher's own limit
LIMIT_S = 600.0  # for all tries: tens of thousands of files take minutes
News = dict[str, Any]


class Resolver:
    """Requests one version at a time. Runs on the service's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fork: Fork,
        say_alive: Callable[[], object],
    ) -> None:
        self._selector = selector
        self._fork = fork
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
        """Call `found` with the process's last news; this replaces an earlier request.

        Without a digest, find the newest version. Args: without: digests of versions that cannot be loaded;
        falls_back: versions with a damaged manifest are skipped, too.
        """
        self.drop()
        try:
            self._child = self._fork(
                lambda connection: run_resolver(
                    connection, url, version, digest, tuple(without), falls_back=falls_back
                )
            )
        except OSError as error:
            found({"failed": f"cannot start a process to find the version: {error.strerror}"})
            return
        self._found = found
        now_s = time.monotonic()
        self._limit_s, self._silence_limit_s = now_s + LIMIT_S, now_s + SILENCE_LIMIT_S
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self._hear)

    def drop(self) -> None:
        """Cancel the request."""
        child, self._child, self._found = self._child, None, None
        if child is not None:
            end_child(child, self._selector, may_leave=True)

    def tick(self) -> None:
        """End a process that hangs."""
        if self._child is not None and time.monotonic() > min(self._limit_s, self._silence_limit_s):
            self._end({"failed": "the version was not found in time"})

    def _hear(self) -> None:
        assert self._child is not None
        lines = self._child.lines.receive_ready()
        if lines is None:
            lines = [{"failed": "the process that finds the version has died"}]
        self._silence_limit_s = time.monotonic() + SILENCE_LIMIT_S
        for news in lines:
            if "waiting" in news:
                _log.info("trying again: %s", news["waiting"])
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


def pinned_of(news: News) -> Pinned:
    """Return the version that was found."""
    return msgspec.convert(news["pinned"], type=Pinned)


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
    """Find the newest version of `url`, or the given one, and report it; end the process.

    While the store is unavailable, retry for a while, and report that once. Args: as `Resolver.ask`.
    """
    has_reported = False
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
        connection.sendall(encode(news))

    def tell(why: str) -> None:
        nonlocal has_reported
        if not has_reported:
            has_reported = True
            send({"waiting": why})

    async def attempt(_: int) -> News:
        # The store retries by itself, too.
        timer = asyncio.get_running_loop().call_later(REPORT_AFTER_S, tell, f"{redact(url)} does not answer")
        try:
            return await find()
        except BootseerError as error:
            if error.retryable:
                tell(str(error))
            raise
        finally:
            timer.cancel()

    async def patiently() -> News:
        policy = retry_policy()
        while True:
            try:
                return await aio.retry(policy, attempt)
            except BootseerError as error:
                if not may_appear(error, bool(digest), time.monotonic() - began_s):
                    return await explain(error)
            await asyncio.sleep(PIN_WAIT_S)

    async def explain(error: BootseerError) -> News:
        """Return the news for an error, with a possible fix."""
        if isinstance(error, NotFound) and not digest and (why := await why_url_is_invalid(url)):
            return {"absent": why, "kind": MISPLACED}
        return outcome(error) | ({"older": await find_older(url, without)} if is_damage(error) else {})

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


def retry_policy() -> aio.RetryPolicy:
    """Return the retries of a store that fails: a short outage must not end a job."""
    budget_s = current().checkpoint.resolve_s
    return aio.RetryPolicy(tries=max(30, int(budget_s)), base_s=0.5, max_s=5.0, budget_s=budget_s)


def may_appear(error: BootseerError, is_pinned: bool, elapsed_s: float) -> bool:
    """Return whether a missing version may appear soon: another node has seen it, or it is being changed."""
    kinds = (NotFound, SourceChanged) if is_pinned else (SourceChanged,)
    return isinstance(error, kinds) and elapsed_s < PIN_TRIES_S


def outcome(error: BootseerError) -> News:
    """Return the news for an error. Only a certain absence of checkpoints may let a job start from nothing."""
    if isinstance(error, NotFound):
        return {"absent": str(error), "kind": NOTHING}
    if isinstance(error, NoCompleteCheckpoint):
        return {"absent": str(error), "kind": UNUSABLE}
    return {"failed": str(error)}


def is_damage(error: BootseerError) -> bool:
    """Return whether the version itself is damaged, so that another one might be usable."""
    return isinstance(error, IntegrityError) and not isinstance(error, SourceChanged)


async def find_older(url: str, without: Collection[str]) -> str:
    """Return the name of a version that could be loaded instead of these and of damaged ones; "" for none."""
    try:
        store, path = store_at(url)
        try:
            return (await resolve(store, path, without=without, on_damaged=lambda _: None)).version
        finally:
            await store.aclose()
    except BootseerError:
        return ""
