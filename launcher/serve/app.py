"""The HTTP side of `bootseer serve`: routes, their answers, and the checks before each. Everything is read-only.

/                              the page, of all jobs or of the only one
/jobs/ID                       the page of one job
/api/v1/jobs                   the answers of `bootseer status --json`
/api/v1/jobs/ID                one job with all its ranks
/api/v1/jobs/ID/report         `bootseer report --json` of the newest start (?attempt=N)
/api/v1/jobs/ID/events         server-sent events: states and events, resumed by Last-Event-ID
/api/v1/jobs/ID/hangs/NAME     the report of a hang, as text
/api/v1/warm                   the last results of `bootseer warm --jobs`
/metrics                       for Prometheus
/healthz, /readyz              for probes, without a token
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from prometheus_client.core import Metric

from bootseer import __version__, aio
from bootseer.errors import BootseerError, UsageError
from bootseer.report.finding import open_regular
from bootseer.report.page_frame import asset
from launcher.serve import page
from launcher.serve.access import Access
from launcher.serve.connections import Connections
from launcher.serve.feed import Feed, TooManyError, Watcher
from launcher.serve.jobs import Jobs, JobView
from launcher.serve.metrics import JobFacts, MountTimes, StepTimes, collect, expose
from launcher.serve.options import SERVER, SHARE_HEADER, share_value
from launcher.serve.reports import Reports
from launcher.serve.trees import look_at_trees
from launcher.serve.views import make_detail

READ_S = 10.0
MAX_HANG_BYTES = 4 << 20
KEEPALIVE_S = 15.0  # between two signs of life of a stream
WRITE_S = 30.0  # for a client to take what was sent before
SCRAPE_AGE_S = 1.0
_HANG_NAME = re.compile(r"standstill-[0-9]{1,6}\.txt")
_PROBES = ("/healthz", "/readyz")
_HEADERS = {
    "Server": f"{SERVER}/{__version__}",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_ASSETS = {"app.js": "text/javascript", "app.css": "text/css"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The answers to all routes."""

    connections: Connections

    def __init__(self, environ: Mapping[str, str], access: Access, all_ranks: bool) -> None:
        """Args: all_ranks: whether each rank of a large job gets metrics of its own. Set `connections` then."""
        self._environ, self._access = environ, access
        self._all_ranks = all_ranks
        self.jobs = Jobs(environ)
        self._reports = Reports()
        self._mounts = MountTimes()
        self._feeds: dict[str, _Followed] = {}  # by the job's name

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        get = app.router.add_get
        get("/", self._page)
        get("/jobs/{job}", self._page)
        get("/static/{name}", self._asset)
        get("/api/v1/jobs", self._list)
        get("/api/v1/jobs/{job}", self._job)
        get("/api/v1/jobs/{job}/report", self._report)
        get("/api/v1/jobs/{job}/events", self._events, allow_head=False)
        get("/api/v1/jobs/{job}/hangs/{name}", self._hang)
        get("/api/v1/warm", self._warm)
        get("/metrics", self._metrics)
        for probe in _PROBES:
            get(probe, self._probe)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        for followed in self._feeds.values():
            await followed.feed.close()
        await self.jobs.close()

    # ---- before each request ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connections = self.connections
        connections.began(request.transport, is_stream=request.path.endswith("/events"))
        try:
            response = await self._answer(request, handler)
        finally:
            connections.ended(request.transport)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        refusal = None
        if request.path not in _PROBES:
            refusal = self._access.check(headers.get("Host"), headers.get("Origin"), headers.get("Authorization"))
        if refusal is not None:
            found = _error(refusal.status, refusal.reason)
            if (
                refusal.status == 401
            ):  # a line each: browsers take a line for one scheme, and the first that they know
                found.headers.add("WWW-Authenticate", 'Basic realm="bootseer"')
                found.headers.add("WWW-Authenticate", "Bearer")
            return found
        try:
            response = await handler(request)
        except web.HTTPException as error:
            allowed = error.headers.get("Allow")  # which methods, with status 405
            return _error(error.status, error.reason.lower(), {"Allow": allowed} if allowed else {})
        except UsageError as error:
            return _error(404, str(error))
        except (BootseerError, OSError, TimeoutError) as error:
            return _error(503, str(error) or "it took too long")
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    # ---- pages -----------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        views = await self.jobs.look()
        name = request.match_info.get("job")
        view = await self._find(name) if name is not None else None
        if view is None and len(views) == 1:
            view = views[0]
        text = page.make_page(views, view)
        return web.Response(text=text, content_type="text/html")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in _ASSETS:
            raise web.HTTPNotFound
        text = resources.files(__package__).joinpath(name).read_text("utf-8")
        if name.endswith(".css"):
            text = asset("page.css") + text  # the look of the page of a report
        return web.Response(text=text, content_type=_ASSETS[name])

    # ---- the API ---------------------------------------------------------------------------------------------

    async def _list(self, _: web.Request) -> web.Response:
        views = await self.jobs.look()
        agents = [agent for view in views if view.ended_s is None for agent in view.agents]
        return _json({"jobs": [agent.status if not agent.why else {"error": agent.why} for agent in agents]})

    async def _job(self, request: web.Request) -> web.Response:
        return _json(make_detail(await self._find(request.match_info["job"])))

    async def _report(self, request: web.Request) -> web.Response:
        view = await self._find(request.match_info["job"])
        attempt = request.query.get("attempt", "last")
        if attempt != "last" and not (attempt.isdecimal() and attempt.isascii() and len(attempt) < 7):
            return _error(400, "attempt: give a number, or last")
        feed = self._follow(view).feed
        await feed.counts()
        if feed.log is None:
            raise UsageError(f"job {view.name[:80]} writes no events (--events-dir)")
        number = None if attempt == "last" else int(attempt)
        return _json(await self._reports.get(feed.log, view.run_id, number))

    async def _hang(self, request: web.Request) -> web.Response:
        view = await self._find(request.match_info["job"])
        name = request.match_info["name"]
        if not _HANG_NAME.fullmatch(name):
            raise web.HTTPNotFound
        for agent in view.agents:  # the node of rank 0 has it
            path = os.path.join(str(agent.status.get("logs") or "/nowhere"), name)
            try:
                text = await aio.run_abandonable(_read, path, timeout_s=READ_S)
            except (OSError, TimeoutError):
                continue
            return web.Response(text=text, content_type="text/plain")
        return _error(404, f"{name}: not on this node; the log directory of the node with rank 0 has it")

    async def _warm(self, _: web.Request) -> web.Response:
        from launcher.warm.daemon import read_status

        return _json(await aio.run_abandonable(read_status, timeout_s=READ_S))

    async def _probe(self, request: web.Request) -> web.Response:
        if request.path == "/readyz":
            await self.jobs.look(SCRAPE_AGE_S)
        return web.Response(text="ok\n", headers={SHARE_HEADER: share_value(self._environ, self._access)})

    async def _metrics(self, request: web.Request) -> web.Response:
        facts, trees = await self._look()
        is_open = "application/openmetrics-text" in request.headers.get("Accept", "")
        body, kind = expose(
            __version__,
            facts,
            trees,
            mounts=self._mounts,
            labels_all_ranks=self._all_ranks,
            as_openmetrics=is_open,
        )
        return web.Response(body=body, headers={"Content-Type": kind})

    async def collect(self) -> Sequence[Metric]:
        """Return what `/metrics` exposes."""
        facts, trees = await self._look()
        return collect(__version__, facts, trees, mounts=self._mounts, labels_all_ranks=self._all_ranks)

    async def _look(self) -> tuple[list[JobFacts], list[tuple[str, Mapping[str, Any]]]]:
        views = await self.jobs.look(SCRAPE_AGE_S)
        facts = [await self._facts(view) for view in views]
        trees = [(each.digest, each.status) for each in await look_at_trees(self._environ)]
        self._mounts.look(trees)
        return facts, trees

    async def _facts(self, view: JobView) -> JobFacts:
        (feed, steps), detail = self._follow(view), make_detail(view)
        counts = await feed.counts()
        steps.look(detail["attempt"], detail["ranks"], view.agents[0].ranks_at_s or view.agents[0].at_s)
        stages: list[Any] = []
        if feed.log is not None and feed.log.last:
            try:
                stages = msgspec.to_builtins((await self._reports.get(feed.log, view.run_id)).stages)
            except BootseerError:
                pass  # no start yet
        return JobFacts(detail, counts, stages, steps)

    # ---- streams ---------------------------------------------------------------------------------------------

    async def _events(self, request: web.Request) -> web.StreamResponse:
        view = await self._find(request.match_info["job"])
        feed = self._follow(view).feed
        try:
            watcher = await feed.watch(request.headers.get("Last-Event-ID", "")[:64], partial(_abort, request))
        except TooManyError:
            return _error(503, "too many watch this job: try again later", {"Retry-After": "10"})
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._send(response, watcher)
        except ConnectionError:
            pass  # the client has gone
        except TimeoutError:
            _abort(request)  # it does not read
        finally:
            feed.leave(watcher)
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, watcher: Watcher) -> None:
        """Send frames until the end of the feed. Raises: TimeoutError for a client that does not read."""
        data = b"retry: 2000\n\n"
        while data:
            async with asyncio.timeout(WRITE_S):
                await response.write(data)
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    data = await watcher.take()
            except TimeoutError:
                data = b": still here\n\n"

    # ---- jobs ------------------------------------------------------------------------------------------------

    async def _find(self, name: str) -> JobView:
        view = await self.jobs.find(name)
        if view is None:
            known = ", ".join(each.name[:60] for each in (await self.jobs.look())[:8])
            raise UsageError(f"no job {name[:80]!r} runs here; known: {known or 'none'}")
        return view

    def _follow(self, view: JobView) -> _Followed:
        found = self._feeds.get(view.name)
        if found is not None and not found.feed.is_of(view):
            found.feed.end()
            found = None
        if found is None:
            for name in self._feeds.keys() - self.jobs.names:  # of jobs that ended a while ago
                if self._feeds[name].feed.is_idle:
                    del self._feeds[name]
            found = self._feeds[view.name] = _Followed(Feed(self.jobs, view), StepTimes())
        return found


class _Followed(NamedTuple):
    """What is kept of a job between requests."""

    feed: Feed
    steps: StepTimes


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _read(path: str) -> str:
    with open(open_regular(path), "rb") as file:
        return file.read(MAX_HANG_BYTES).decode("utf-8", "replace")


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    found = web.Response(
        status=status, body=msgspec.json.encode({"error": reason}), content_type="application/json"
    )
    found.headers.update({**_HEADERS, **(headers or {})})
    return found
