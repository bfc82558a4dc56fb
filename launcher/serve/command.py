"""`bootseer serve`: the process. It listens, serves until a signal or until no job runs, and ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, ConfigError
from launcher.serve.options import NAME, SHARE_HEADER, Options, parse, share_value

if TYPE_CHECKING:
    from launcher.serve.server import Server

IDLE_POLL_S = 2.0
MAX_FILES = 4096  # connections, sockets of jobs, event files
SHARE_S = 3.0  # for the answer of another server


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    try:
        options = parse(argv)
        try:
            import aiohttp  # noqa: F401
            import prometheus_client  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'bootseer[serve]'") from None
        if options.otlp is not None and options.otlp.is_asked and not _has_otlp():
            raise ConfigError("--otlp needs opentelemetry: pip install 'bootseer[otlp]'")
        from bootseer.linux.priority import lower
        from bootseer.linux.processes import allow_files

        lower()  # the jobs of this node have priority
        allow_files(MAX_FILES)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(options))
    except BootseerError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _has_otlp() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http.metric_exporter  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop  # there is no wheel for this platform
    return uvloop.new_event_loop


async def _serve(options: Options) -> int:
    from launcher.serve.server import Server

    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        server = await Server.start(options, os.environ)
    except OSError as error:
        if options.shares and error.errno == errno.EADDRINUSE and await asyncio.to_thread(_is_served, options):
            print(f"{NAME}: {_url(options)} (shared with other jobs)", file=sys.stderr, flush=True)
            return 0
        print(f"{NAME}: error: {options.address}: cannot listen: {_why(error)}", file=sys.stderr)
        return 1
    try:
        if not options.is_quiet:
            print(f"{NAME}: {_url(options, server.port)}", file=sys.stderr, flush=True)
        if options.shares:  # started by bootrun, which holds what is said in memory
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        await _until_idle(server, ended, options.idle_s)
    finally:
        await server.close()
    return 0


async def _until_idle(server: Server, ended: asyncio.Event, idle_s: float | None) -> None:
    """Return after a signal, or when no job has run for `idle_s`; None: never."""
    if idle_s is None:
        await ended.wait()
        return
    loop, jobs = asyncio.get_running_loop(), server.dashboard.jobs
    seen_s = loop.time()
    while not ended.is_set() and loop.time() - seen_s < idle_s:
        try:
            await jobs.look(IDLE_POLL_S)
        except BootseerError:
            pass  # its directory is not readable now
        if jobs.has_running:
            seen_s = loop.time()
        try:
            async with asyncio.timeout(min(IDLE_POLL_S, idle_s)):
                await ended.wait()
        except TimeoutError:
            pass


def _is_served(options: Options) -> bool:
    """Return whether a `bootseer serve` listens at the address that serves the same jobs as openly."""
    import http.client
    import ssl

    host, port = options.address
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    connection = http.client.HTTPConnection(host, port, timeout=SHARE_S)
    if options.tls is not None:
        context = ssl.create_default_context(cafile=options.tls[0])
        context.check_hostname = False
        connection = http.client.HTTPSConnection(host, port, timeout=SHARE_S, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().getheader(SHARE_HEADER) == share_value(os.environ, options.access)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _url(options: Options, port: int | None = None) -> str:
    scheme = "https" if options.tls else "http"
    return f"{scheme}://{options.address if port is None else options.address._replace(port=port)}/"


def _why(error: OSError) -> str:
    fixes = {
        errno.EADDRINUSE: "another process listens there (ss -ltnp shows it): give another port, or 0 for any",
        errno.EADDRNOTAVAIL: "this node has no such address (ip addr shows them)",
        errno.EACCES: "ports below 1024 are for root: give another one",
    }
    code = error.errno or 0
    reason = os.strerror(code).lower() if code > 0 else error.strerror or str(error)
    return f"{reason}; {fixes[code]}" if code in fixes else reason
