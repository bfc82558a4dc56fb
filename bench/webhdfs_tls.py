"""A server that takes TLS off, for `bench webhdfs`: `python -m bench.webhdfs_tls CERTIFICATE KEY HOST PORT`.

It prints its port. Each connection becomes one to HOST:PORT. (The Hadoop of the tests is too old for the TLS of a
newer JDK, so the NameNode cannot do that itself.)
"""

from __future__ import annotations

import asyncio
import ssl
import sys


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(64 << 10):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass  # the other direction ends as well
    finally:
        writer.close()


async def serve(certificate: str, key: str, host: str, port: int) -> None:
    """Serve until the standard input ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_pump(reader, behind_writer), _pump(behind_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
