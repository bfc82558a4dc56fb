"""The process of a node that serves its spans: `python -P -m bootseer.peers.serve FILE [options]`.

FILE: the private file of the job's peers (membership.py); it may come later, change and go. Out, as JSON lines on
standard output: `{"port": N}` as soon as it listens, `{"statistics": ...}` for each line `statistics` that comes
in, and once more at the end. It ends when standard input does, so with whoever started it, and by SIGTERM. Lines
for people go to standard error. The key is in FILE alone, never in the arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from bootseer.errors import BootseerError, ConfigError
from bootseer.peers.membership import PeersFile
from bootseer.peers.server import MOST_CONNECTIONS, PeerServer
from bootseer.peers.spool import MOST_BYTES, Spool

BACKLOG = 512
MOST_LINE_BYTES = 64 << 10


def listen(address: str, port: int) -> socket.socket:
    """Raises: ConfigError."""
    try:
        if not address and socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{address or '*'}, port {port}: other nodes cannot be served there: {error}") from error


async def run(server: PeerServer, port: int) -> None:
    """Until standard input ends or a signal says so."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    pending = bytearray()

    def hear() -> None:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending.extend(data)
        if not data or len(pending) > MOST_LINE_BYTES:
            loop.remove_reader(0)
            is_over.set()
        while (place := pending.find(b"\n")) >= 0:
            if pending[:place].strip() == b"statistics":
                say({"statistics": server.statistics()})
            del pending[: place + 1]

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_over.set)
    with suppress(PermissionError):  # a file or /dev/null never ends: then signals end it
        loop.add_reader(0, hear)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve())
        say({"port": port})
        await is_over.wait()
        serving.cancel()
    say({"statistics": server.statistics()})


def say(what: object) -> None:
    """One line; whoever does not listen any more misses it."""
    with suppress(OSError):
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def log(line: str) -> None:
    print(f"bootseer peers: {line}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bootseer.peers.serve", allow_abbrev=False)
    parser.add_argument("file", help="the private file of the job's peers")
    parser.add_argument("--address", default="", help="where to listen; default: all of this node's addresses")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--spool", required=True, help="folder for what is kept for others")
    parser.add_argument("--spool-bytes", type=int, default=MOST_BYTES)
    parser.add_argument("--upload-bytes-per-s", type=float, default=None, help="default: no limit")
    parser.add_argument("--remove-folder", action="store_true", help="that of FILE, at the end")
    return parser.parse_args(argv)


def main(argv: Sequence[str], kind: type[PeerServer] = PeerServer) -> int:
    """The exit status. `kind`: one that fails on purpose, in tests."""
    args = parse(argv)
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MOST_CONNECTIONS)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        spool = Spool(args.spool, args.spool_bytes)
        with listen(args.address, args.port) as listener:
            server = kind(
                listener, PeersFile(args.file, log=log), spool, upload_bytes_per_s=args.upload_bytes_per_s, log=log
            )
            asyncio.run(run(server, listener.getsockname()[1]))
    except BootseerError as error:
        log(str(error))
        return error.exit_status
    finally:
        if args.remove_folder:
            shutil.rmtree(os.path.dirname(os.path.abspath(args.file)), ignore_errors=True)
    return 0


def _exit(status: int) -> NoReturn:
    """Threads that hang are not waited for."""
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
