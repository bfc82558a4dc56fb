"""The listening server of `bootseer serve`: aiohttp behind the limits of connections.py."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import Mapping

from aiohttp import web

from bootseer.errors import UsageError
from launcher.serve.app import Dashboard
from launcher.serve.connections import HEAD_S, Connections
from launcher.serve.options import Options
from launcher.serve.otlp_metrics import OtlpExport

BACKLOG = 512
CLOSE_S = 2.0  # for answers that are being sent


class Server:
    """A server that listens, until `close`."""

    def __init__(
        self,
        dashboard: Dashboard,
        connections: Connections,
        runner: web.AppRunner,
        server: asyncio.Server,
        export: OtlpExport | None,
    ) -> None:
        self.dashboard, self.connections = dashboard, connections
        self._runner, self._server, self._export = runner, server, export
        self.port: int = server.sockets[0].getsockname()[1]

    @classmethod
    async def start(cls, options: Options, environ: Mapping[str, str]) -> Server:
        """Begin to listen. Raises: OSError; UsageError for a certificate that cannot be used."""
        tls = _tls(options)
        dashboard = Dashboard(environ, options.access, options.all_ranks)
        silent = logging.getLogger("bootseer.serve")  # bad requests are the clients' affair
        silent.addHandler(logging.NullHandler())
        silent.propagate = False
        runner = web.AppRunner(dashboard.make_app(), access_log=None, shutdown_timeout=CLOSE_S, logger=silent)
        await runner.setup()
        assert runner.server is not None
        dashboard.connections = connections = Connections(runner.server)
        host, port = options.address
        try:
            server = await asyncio.get_running_loop().create_server(
                connections.make,
                host,
                port,
                ssl=tls,
                backlog=BACKLOG,
                ssl_handshake_timeout=HEAD_S if tls is not None else None,
            )
        except BaseException:
            await runner.cleanup()
            raise
        return cls(dashboard, connections, runner, server, _export(options, dashboard))

    async def close(self) -> None:
        self._server.close()
        if self._export is not None:
            try:
                await self._export.close()
            except Exception as error:
                print(f"bootseer serve: warning: OTLP: {type(error).__name__}", file=sys.stderr)
        await self._runner.cleanup()


def _export(options: Options, dashboard: Dashboard) -> OtlpExport | None:
    if options.otlp_warning:
        print(f"bootseer serve: warning: {options.otlp_warning}", file=sys.stderr)
    if options.otlp is None:
        return None
    try:
        return OtlpExport(options.otlp, dashboard.collect)
    except ModuleNotFoundError:
        print("bootseer serve: metrics are not sent by OTLP: pip install 'bootseer[otlp]'", file=sys.stderr)
    except Exception as error:  # of the library, by further variables, whose values may be secrets
        print(f"bootseer serve: warning: metrics are not sent by OTLP: {type(error).__name__}", file=sys.stderr)
    return None


def _tls(options: Options) -> ssl.SSLContext | None:
    if options.tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = options.tls
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # a key with a passphrase cannot be used
    except (OSError, ssl.SSLError) as error:
        what = error.strerror or str(error)
        raise UsageError(f"--tls-cert {certificate}, --tls-key {key}: cannot be used: {what}") from None
    return context
