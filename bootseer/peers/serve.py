"""The peer server of a node, which serves its spans: `python -P -m bootseer.peers.serve FILE [options]`.

FILE: the private file of the job's peers (membership.py); it may be created, changed and removed meanwhile. It
writes JSON lines to standard output: `{"port": N}` once it listens, `{"statistics": ...}` for each input line
`statistics`, and again at the end. It ends when standard input is closed, so with its parent, and by SIGTERM.
Messages for the user go to standard error. The key is only in FILE, never in the arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from bootseer.errors import BootseerError, ConfigError
from bootseer.ipc.framing import InvalidMessageError, LineBuffer, encode
from bootseer.linux import processes
from bootseer.logs import send_to
from bootseer.peers.membership import PeersFile
from bootseer.peers.server import PeerServer
from bootseer.peers.spool import Spool
from bootseer.tuning import current

BACKLOG = 512
MAX_LINE_BYTES = 64 << 10


def listen(address: str, port: int) -> socket.socket:
    """Open the listening socket. Raises: ConfigError."""
    try:
        if not address and socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{address or '*'}, port {port}: cannot listen for other nodes: {error}") from error


async def run(server: PeerServer, port: int) -> None:
    """Serve until standard input is closed or a signal arrives."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    pending = LineBuffer(MAX_LINE_BYTES)

    def hear() -> None:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            lines = pending.feed(data)
        except InvalidMessageError:
            data, lines = b"", []
        for line in lines:
            if line.strip() == b"statistics":
                write_line({"statistics": server.statistics()})
        if not data:
            loop.remove_reader(0)
            is_over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_over.set)
    with suppress(PermissionError):  # a file or /dev/null never ends; only signals end it then
        loop.add_reader(0, hear)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        write_line({"port": port})
        await is_over.wait()
        serving.cancel()
    write_line({"statistics": server.statistics()})


def write_line(what: object) -> None:
    """Write a line; a closed output is ignored."""
    with suppress(OSError):
        sys.stdout.buffer.write(encode(what))
        sys.stdout.flush()


def print_line(line: str) -> None:
    print(f"bootseer peers: {line}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bootseer.peers.serve", allow_abbrev=False)
    parser.add_argument("file", help="Private file of the job's peers")
    parser.add_argument("--address", default="", help="Address to listen on (default: all addresses of this node)")
    parser.add_argument("--port", type=int, default=0, help="Port to listen on (default: a free port)")
    parser.add_argument("--spool", required=True, help="Directory for the data that is stored for other nodes")
    parser.add_argument("--spool-bytes", type=int, default=None)
    parser.add_argument(
        "--upload-bytes-per-s",
        type=float,
        default=None,
        help="Maximum bytes per second to other nodes (default: unlimited)",
    )
    parser.add_argument("--remove-folder", action="store_true", help="Remove the directory of FILE at the end")
    return parser.parse_args(argv)


def main(argv: Sequence[str], kind: type[PeerServer] = PeerServer) -> int:
    """Run the server and return the exit status. Args: kind: a class with faults, in tests."""
    args = parse(argv)
    send_to(print_line)
    try:
        processes.allow_files(2 * current().peers.max_connections)
        own_bytes = args.spool_bytes
        spool = Spool(args.spool, current().peers.spool_bytes if own_bytes is None else own_bytes)
        with listen(args.address, args.port) as listener:
            server = kind(listener, PeersFile(args.file), spool, upload_bytes_per_s=args.upload_bytes_per_s)
            asyncio.run(run(server, listener.getsockname()[1]))
    except BootseerError as error:
        print_line(str(error))
        return error.exit_status
    finally:
        if args.remove_folder:
            shutil.rmtree(os.path.dirname(os.path.abspath(args.file)), ignore_errors=True)
    return 0


def _exit(status: int) -> NoReturn:
    """Exit without waiting for hanging threads."""
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
