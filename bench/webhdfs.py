"""`python -m bench webhdfs`: calls to a NameNode and a registry with many referrers, now and before.

A real NameNode; CALLS calls (GETFILESTATUS) in three ways (bench/webhdfs_client.py), each in a process of its own,
in turn: one after the other and WIDTH at once, over plain TCP and through a server that takes TLS off.
`webhdfs.calls_ratio` is seconds before over seconds now, one call after the other without TLS; `..._tls` with TLS;
`..._wide` WIDTH at once. `webhdfs.possible_ratio` is seconds before over those of a bare socket, which is the time
of the NameNode itself: no client is faster. `webhdfs.threads` is the most threads of the way `now`.
`webhdfs.aiohttp_ratio` is seconds now over seconds with aiohttp, `webhdfs.aiohttp_import_s` the CPU of its import.

A real registry with TLS and a password holds a tree with REFERRERS referrers (access traces, by the list of the
fallback tag). `registry.referrers_ratio` is seconds to pull them before over seconds now; `before` asks for the
list once for each, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.record import BenchError, Figures, Target, note
from bootseer.image.artifacts import pull_tree, push_trace, push_tree
from bootseer.image.registry import Registry
from bootseer.storage import Entry, Store, open_store
from bootseer.storage.memory import forget
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.oci.store import OciStore
from bootseer.storage.small_files import read_small
from tests.testing import minihdfs, registry
from tests.testing.minihdfs import MiniHdfs
from tests.testing.registry import RegistryServer, make_certificates
from tests.unit.bootseer.image.trees import SmallTree, make_tree

ROUNDS = 7
CALLS, WIDTH = 1000, 16
REFERRERS = 200
DEADLINE_S = 120.0
WAYS = ("before", "now", "aiohttp", "floor")
MAX_TRACE_BYTES = 1 << 20
TARGETS = {
    "webhdfs.calls_ratio_tls_wide": Target(at_least=3.0),
    "webhdfs.threads": Target(at_most=4),
    "registry.referrers_ratio": Target(at_least=2.0),
}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this bench."""
    parser.add_argument("--calls", type=int, default=CALLS, help="calls to the NameNode in each measurement")
    parser.add_argument("--referrers", type=int, default=REFERRERS, help="referrers of the tree")


def run(args: argparse.Namespace) -> Figures:
    """Measures, see the module's docstring."""
    if reason := minihdfs.why_not() or registry.why_not():
        raise BenchError(reason)
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="bench-webhdfs-") as directory:
        _calls(args, directory, figures)
        asyncio.run(_referrers(args, directory, figures))
    return figures


# ---- NameNode --------------------------------------------------------------------------------------------------


def _calls(args: argparse.Namespace, directory: str, figures: Figures) -> None:
    samples: dict[str, list[dict[str, Any]]] = {}
    with MiniHdfs(os.path.join(directory, "hdfs"), datanodes=1, replication=1) as hdfs:
        address = hdfs.web_url.removeprefix("webhdfs://")
        _make_directory(address)
        with _without_tls(directory, address) as (tls, environ):
            places = {"": f"http://{address}", "_tls": tls}
            for number in range(args.rounds):
                for place, web in places.items():
                    for width in (1, WIDTH):
                        ways = WAYS if width == 1 else WAYS[:-1]
                        for way in ways if number % 2 == 0 else ways[::-1]:
                            measured = _measure(way, web, args.calls, width, environ)
                            samples.setdefault(f"{way}{place}{'_wide' if width > 1 else ''}", []).append(measured)
                note(f"round {number + 1} of {args.rounds}: the NameNode")
    for kind in ("", "_wide", "_tls", "_tls_wide"):
        found = [way for way in WAYS if way + kind in samples]
        seconds = {way: [each["seconds"] for each in samples[way + kind]] for way in found}
        cpu = {way: [each["cpu_s"] for each in samples[way + kind]] for way in found}
        figures.add_ratio(f"webhdfs.calls_ratio{kind}", seconds["before"], seconds["now"])
        if "floor" in found:
            figures.add_ratio(f"webhdfs.possible_ratio{kind}", seconds["before"], seconds["floor"])
        figures.add_ratio(f"webhdfs.aiohttp_ratio{kind}", seconds["now"], seconds["aiohttp"])
        figures.add_ratio(f"webhdfs.cpu_ratio{kind}", cpu["before"], cpu["now"])
        figures.add_ratio(f"webhdfs.aiohttp_cpu_ratio{kind}", cpu["now"], cpu["aiohttp"])
    most = [max(samples[f"now{kind}"][n]["threads"] for kind in ("", "_wide")) for n in range(args.rounds)]
    figures.add("webhdfs.threads", "threads", most)
    before = [samples["before_wide"][n]["threads"] for n in range(args.rounds)]
    figures.add("webhdfs.threads_before", "threads", before)
    figures.add("webhdfs.aiohttp_import_s", "s", [each["import_s"] for each in samples["aiohttp"]])


def _make_directory(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    connection.request("PUT", "/webhdfs/v1/calls?op=MKDIRS&user.name=root")
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise BenchError(f"the NameNode made no directory: status {status}")


@contextmanager
def _without_tls(directory: str, address: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a server with TLS before the NameNode, and an environment that trusts it."""
    certificates = make_certificates(directory)
    host, _, port = address.rpartition(":")
    argv = [sys.executable, "-m", "bench.webhdfs_tls", certificates.certificate, certificates.key, host, port]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError("the server that takes TLS off did not start")
            yield f"https://127.0.0.1:{int(line)}", {**os.environ, "SSL_CERT_FILE": certificates.ca}
        finally:
            process.kill()


def _measure(way: str, web: str, calls: int, width: int, environ: dict[str, str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "bench.webhdfs_client", way, web, str(calls), str(width)]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise BenchError(f"{way}: {done.stderr.strip()[-400:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


# ---- registry --------------------------------------------------------------------------------------------------


async def _referrers(args: argparse.Namespace, directory: str, figures: Figures) -> None:
    tree = make_tree()
    times: dict[str, list[float]] = {"before": [], "now": []}
    requests: dict[str, list[float]] = {"before": [], "now": []}
    with RegistryServer(os.path.join(directory, "registry")) as server:
        await _push(server, tree, args.referrers)
        for number in range(args.rounds):
            for way in ("before", "now") if number % 2 == 0 else ("now", "before"):
                seconds, asked = await _pull(way, server, tree, args.referrers)
                times[way].append(seconds)
                requests[way].append(asked)
            note(f"round {number + 1} of {args.rounds}: the registry")
    figures.add_ratio("registry.referrers_ratio", times["before"], times["now"])
    for way, values in requests.items():
        figures.add(f"registry.requests_{way}", "requests", values)


async def _push(server: RegistryServer, tree: SmallTree, count: int) -> None:
    source = open_store("memory://bench-webhdfs-source")
    for path, data in tree.files.items():
        await source.publish(path, data)
    reference = parse_reference(f"oci://{server.host}/bench/tree:v1")
    async with Registry(options=server.options()) as client:
        pushed = await push_tree(client, reference, source)
        for number in range(count):
            await push_trace(client, pushed.reference, tree.trace(f"{number:016x}", runs=1))
    forget("bench-webhdfs-source")


async def _pull(way: str, server: RegistryServer, tree: SmallTree, count: int) -> tuple[float, float]:
    """Pull the tree with its traces, or the tree and then the traces as before; all must be there."""
    target = open_store("memory://bench-webhdfs-target")
    reference = parse_reference(f"oci://{server.host}/bench/tree:v1")
    async with Registry(options=server.options()) as client:
        began_s = time.perf_counter()
        await pull_tree(client, reference, target, with_traces=way == "now")
        if way == "before":
            await _traces_before(client.store(reference), tree.digest, target)
        seconds = time.perf_counter() - began_s
        asked = client.statistics()["requests"]
    if len(await target.list(f"traces/{tree.digest}")) != count:
        raise BenchError(f"{way}: not all traces were pulled")
    forget("bench-webhdfs-target")
    return seconds, asked


async def _traces_before(source: OciStore, tree: str, target: Store) -> None:
    entries: list[Entry] = []
    listed = await source._list_traces(await source.tree())
    for path in listed:
        blob = await source._find(path, is_current=False)
        entries.append(Entry(path.rpartition("/")[2], blob.size, False, 0.0))
    for entry in entries:
        path = f"traces/{tree}/{entry.name}"
        await target.publish(path, await read_small(source, path, MAX_TRACE_BYTES))
